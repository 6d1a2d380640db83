"""How much time does `recipes/cls.py` add to the model's own step?

    python benchmarks/loop.py [--quick] [--output FILE]

The recipe's own `main` against the loop that one would write by hand without any framework: the same timm model, images
in memory, transforms, loss, optimizer, gradient norm and learning rate per step, loss read a step late. Both load in the
training process (workers 0), so that nothing of the input pipeline is hidden. Blocks of both run in the order ABBA, again
and again; the ratios between blocks of the same kind say how far those between the kinds can be trusted.
On the CPU torch works in one thread: what is waited for is then also what is computed.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from timm.data import create_transform, resolve_model_data_config
from timm.optim import create_optimizer_v2
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from common import sources

ROOT = Path(__file__).resolve().parent.parent
LR, WEIGHT_DECAY, CROP_SCALE = 1e-3, 0.05, 0.7
TOTAL_STEPS = 100_000  # of the schedule; a block ends long before
WARM_UP = 3  # steps at the start of a block that don't count
PER_STEP_MS, PER_SAMPLE_US, THROUGHPUT = 1.0, 10.0, 0.97  # goals


@dataclass(frozen=True)
class Setting:
    """One model at one batch size."""

    model: str
    image_size: int
    batch_size: int
    steps: int  # in a block

    def __str__(self) -> str:
        return f"{self.model}, {self.image_size} px, batch {self.batch_size}"


class Enough(Exception):
    """Ends a block."""


class Clock:
    """Stamps every optimizer step, whoever makes it, and ends the block after the last."""

    def __init__(self) -> None:
        self._stamps: list[tuple[float, float]] = []  # wall and CPU seconds
        self._steps = 0
        register_optimizer_step_post_hook(self._stamp)

    def _stamp(self, *_) -> None:
        self._stamps.append((time.perf_counter(), time.process_time()))
        if len(self._stamps) == WARM_UP + self._steps:
            raise Enough

    def measure(self, loop: Callable[[Setting], None], setting: Setting) -> tuple[float, float]:
        """Wall and CPU milliseconds of a step of `loop`."""
        self._stamps, self._steps = [], setting.steps
        gc.collect()
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(Enough):
            loop(setting)
        (wall, cpu), (wall_end, cpu_end) = self._stamps[WARM_UP - 1], self._stamps[-1]
        return 1e3 * (wall_end - wall) / setting.steps, 1e3 * (cpu_end - cpu) / setting.steps


def recipe(setting: Setting) -> None:
    """`recipes/cls.py`, with no evaluation and no checkpoint in between."""
    flags = {
        "model": setting.model,
        "image_size": setting.image_size,
        "global_batch_size": setting.batch_size,
        "max_micro_batch_size": setting.batch_size,
        "max_steps": TOTAL_STEPS,
        "eval_every": TOTAL_STEPS,
        "checkpoint_every": TOTAL_STEPS,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "crop_scale": CROP_SCALE,
        "workers": 0,
        "tracker": "none",
        "resume": "never",
        "output_dir": tempfile.mkdtemp(),
    }
    own = sys.argv
    sys.argv = ["cls.py", *(f"--{name}={value}" for name, value in flags.items())]
    try:
        CLS.main()
    finally:
        sys.argv = own
        shutil.rmtree(flags["output_dir"])


class Images(Dataset):
    """Pixels in memory -> PIL image -> transformed tensor."""

    def __init__(self, source: sources.Source, transform: Callable):
        self.source, self.labels, self.transform = source, source.labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.transform(self.source.image(index)), self.labels[index]


def bare(setting: Setting) -> None:
    """The loop written by hand."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source, _ = sources.load("digits", seed=0, val_share=0.2)
    model = timm.create_model(setting.model, num_classes=len(source.classes)).to(device)
    data = resolve_model_data_config(model, {"input_size": (3, setting.image_size, setting.image_size)})
    transform = create_transform(
        data["input_size"],
        is_training=True,
        use_prefetcher=True,  # ends in uint8
        scale=(CROP_SCALE, 1.0),
        hflip=0.0,
        color_jitter=None,
        interpolation=data["interpolation"],
    )
    mean, std = (255 * torch.tensor(data[key], device=device)[:, None, None] for key in ("mean", "std"))
    loader = DataLoader(
        Images(source, transform), setting.batch_size, shuffle=True, drop_last=True, pin_memory=device.type == "cuda"
    )
    optimizer = create_optimizer_v2(model, "adamw", lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    parameters = list(model.parameters())
    step, numbers = 0, torch.zeros(2)
    model.train()
    while True:
        for images, labels in loader:
            for group in optimizer.param_groups:
                group["lr"] = LR * (1 + math.cos(math.pi * step / TOTAL_STEPS)) / 2
            images = images.to(device, non_blocking=True).to(torch.float32).sub_(mean).div_(std)
            loss = F.cross_entropy(model(images), labels.to(device, non_blocking=True))
            loss.backward()
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
            optimizer.step()
            optimizer.zero_grad()
            late = numbers.tolist()  # of the step before
            if not all(map(math.isfinite, late)):
                raise FloatingPointError(f"step {step}: {late}")
            numbers = torch.stack([loss.detach(), norm])
            step += 1


def compare(clock: Clock, setting: Setting, quartets: int) -> dict:
    """Blocks in the order recipe, bare, bare, recipe, `quartets` times: medians over these of times, ratios and overhead."""
    rows = []
    for _ in range(quartets):
        a, b, b_again, a_again = (clock.measure(loop, setting) for loop in (recipe, bare, bare, recipe))
        for kind, name in enumerate(("wall", "cpu")):
            ours, theirs = a[kind] + a_again[kind], b[kind] + b_again[kind]
            rows.append(
                {
                    "clock": name,
                    "recipe_ms": ours / 2,
                    "bare_ms": theirs / 2,
                    "overhead_ms": (ours - theirs) / 2,
                    "throughput": theirs / ours,
                    "recipe_again": a_again[kind] / a[kind],
                    "bare_again": b_again[kind] / b[kind],
                }
            )
    result = {"setting": asdict(setting), "quartets": quartets}
    for name in ("wall", "cpu"):
        mine = [row for row in rows if row["clock"] == name]
        result[name] = {key: statistics.median(row[key] for row in mine) for key in mine[0] if key != "clock"}
        ratios = [row["throughput"] for row in mine]
        result[name] |= {"throughput_least": min(ratios), "throughput_most": max(ratios)}
    return result


def overhead(small: dict, large: dict, clock: str) -> tuple[float, float]:
    """Milliseconds a step and microseconds a sample that the recipe adds, from two batch sizes of the same model."""
    few, many = small["setting"]["batch_size"], large["setting"]["batch_size"]
    a_sample = (large[clock]["overhead_ms"] - small[clock]["overhead_ms"]) / (many - few)
    return small[clock]["overhead_ms"] - few * a_sample, 1e3 * a_sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only see that it works: few steps of a tiny model")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file, too")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)
    model = Setting("resnet50", 224, 64, 30) if gpu else Setting("resnet18", 64, 32, 15)
    small, large = Setting("test_resnet", 32, 8, 200), Setting("test_resnet", 32, 128, 30)
    quartets = 8
    if arguments.quick:
        model, small, large = (Setting("test_resnet", 32, size, 3) for size in (16, 8, 24))
        quartets = 1

    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} thread"
    print(f"{device}; torch {torch.__version__}, timm {timm.__version__}; medians of {quartets} x ABBA")
    print(f"{'':36}{'a step (ms)':>19}{'images/s':>21}{'the same again':>19}")
    print(f"{'':28}{'clock':>8}{'bare':>10}{'recipe':>9}{'recipe / bare':>21}{'bare':>11}{'recipe':>8}")
    clock, results = Clock(), []
    for setting in (model, small, large):
        clock.measure(recipe, setting), clock.measure(bare, setting)  # both start warm
        results.append(compare(clock, setting, quartets))
        for name in ("wall", "cpu"):
            row = results[-1][name]
            print(
                f"{str(setting) if name == 'wall' else '':<30}{name:>6}{row['bare_ms']:10.2f}{row['recipe_ms']:9.2f}"
                f"{row['throughput']:7.3f} ({row['throughput_least']:.3f}-{row['throughput_most']:.3f})"
                f"{row['bare_again']:10.3f}{row['recipe_again']:8.3f}",
                flush=True,
            )
    for name in ("wall", "cpu"):
        a_step, a_sample = overhead(results[1], results[2], name)
        print(f"overhead ({name}): {a_step:.2f} ms a step + {a_sample:.1f} µs a sample")
    print(f"goals: images/s at least {THROUGHPUT}; at most {PER_STEP_MS:g} ms a step + {PER_SAMPLE_US:g} µs a sample")
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


def _load(path: Path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CLS = _load(ROOT / "recipes" / "cls.py")

if __name__ == "__main__":
    main()
