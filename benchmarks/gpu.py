"""Measures how much of a GPU's speed `recipes/cls.py` reaches, on data that lie on the GPU and on files.

    python benchmarks/gpu.py [--quick] [--model vit_small_patch16_224] [--compile] [--output FILE]

A model of timm at 224 pixels in bf16. The bound is a step written by hand on one normalised batch that lies on the device:
forward, loss, backward, fused AdamW, cudnn.benchmark. It is compared with the recipe's own `main`, whose feed is replaced by
one that gives, in turns, one batch that lies on the device, or JPEGs of 500 x 375 pixels: decoded by the workers,
or once (`--cache`). The peer for JPEGs is timm's own loader with its prefetcher, as many workers and the same
augmentation, in front of the step written by hand.

The ways take turns in one process, forwards and backwards. A turn starts with empty loader queues and some steps that are not
measured; clocks are read once the device is idle. A ratio is a ratio of medians. Without a GPU only --quick runs.
"""

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import timm.data
import torch
import torch.nn.functional as F
from input_pipeline import make_photographs
from paired import LR, WEIGHT_DECAY, Enough, Setting, recipe
from table import Row, show
from timm.optim import create_optimizer_v2
from torchvision.datasets import ImageFolder

from common.classification import sources
from common.classification.augmentation import Normalize
from common.classification.batches import Batch, TrainingSamples
from common.classification.color_jitter import ColorJitter
from common.classification.transforms import training_transform
from common.data import workers as data_workers
from common.data.batch_plan import BatchPlan
from common.data.cache import open_cache
from common.data.loader import Prefetcher, training_loader, worker_count
from common.data.stream import Stream
from common.training import step as training_step

OF_LIMIT, OF_TIMM = 0.98, 2.0  # goals: share of the bound, times timm's loader
# The defaults of timm's loader.
VARIED = SimpleNamespace(crop_scale=0.08, hflip=0.5, vflip=0.0, augment="", color_jitter=0.4)
CACHE = 1.5  # side of a cached image / side of a crop
WARM_UP = 3  # steps of a turn that are not measured
CLASSES = 2
FILES = ("worker", "cache")


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    model: str
    compiled: bool
    image_size: int
    batch_size: int
    photographs: int  # in each class
    seconds: float  # of a turn of the step written by hand
    workers: int

    @property
    def layout(self) -> torch.memory_format:
        return torch.contiguous_format if self.model.startswith("vit") else torch.channels_last


def now(device: torch.device) -> float:
    """The time in seconds, once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---- where batches come from


class Queue:
    """Batches of a loader whose workers live as long as the benchmark, and are stopped when it is not their turn."""

    def __init__(self, batches: Iterable, ready: int):
        others = multiprocessing.active_children()
        self.batches, self.ready = iter(batches), ready  # how many batches may be prefetched
        next(self.batches)  # starts the workers of a generator
        self.workers = [child.pid for child in multiprocessing.active_children() if child not in others]
        self._tell(signal.SIGSTOP)

    def __iter__(self) -> Iterator:
        return self.batches

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Lets the workers run. Prefetched batches are skipped: they would make the first steps cheaper."""
        self._tell(signal.SIGCONT)
        try:
            for _ in range(self.ready):
                next(self.batches)
            yield
        finally:
            self._tell(signal.SIGSTOP)

    def _tell(self, number: int) -> None:
        for worker in self.workers:
            os.kill(worker, number)


@dataclass
class Sources:
    """One batch on the device, and the loaders. Their workers are forked before a model exists."""

    size: Size
    folder: Path
    device: torch.device
    queues: dict[str, Queue] = field(default_factory=dict)
    feeds: dict[str, Prefetcher] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.size
        train, _ = sources.load(sources.Spec(str(self.folder), seed=0, val_share=0.05))
        data = timm.data.resolve_data_config({"input_size": (3, size.image_size, size.image_size)})
        stream, transform = Stream(len(train), size.batch_size, 0), training_transform(VARIED, data)
        augmentations = [ColorJitter(0, VARIED.color_jitter), Normalize(data, torch.float32, torch.device("cpu"))]
        samples = TrainingSamples(train, stream, transform, 0, augmentations)  # which the recipe will have
        kinds = {
            "worker": samples,
            "cache": replace(samples, cache=open_cache(len(train), int(CACHE * size.image_size), "")),
        }
        plan = BatchPlan(size.batch_size, 1, size.batch_size)
        for name in FILES:
            loader = training_loader(kinds[name], plan, 0, 10**9, size.workers)
            self.queues[name] = Queue(loader, 4 * size.workers)
        self.queues["timm"] = Queue(self._timm(data), 2 * size.workers)
        self.feeds = {name: Prefetcher(self.queues[name], self.device) for name in FILES}

        generator = torch.Generator().manual_seed(0)
        shape = (size.batch_size, size.image_size, size.image_size, 3)
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).permute(0, 3, 1, 2)
        labels = torch.randint(0, CLASSES, (size.batch_size,), generator=generator)
        none = [torch.zeros(size.batch_size, 0)] * len(augmentations)
        self.resident = Batch(images, labels, torch.arange(size.batch_size), none).to(self.device)
        mean, std = (255 * torch.tensor(data[key], device=self.device)[:, None, None] for key in ("mean", "std"))
        self.normalised = ((self.resident.images.float() - mean) / std).contiguous()

    def _timm(self, data: dict) -> Iterator:
        files = ImageFolder(self.folder)
        files.samples = files.samples * 2000  # a very long epoch: the loader pauses at its end
        loader = timm.data.create_loader(
            files,
            data["input_size"],
            self.size.batch_size,
            is_training=True,
            color_jitter=VARIED.color_jitter,
            scale=(VARIED.crop_scale, 1.0),
            hflip=VARIED.hflip,
            mean=data["mean"],
            std=data["std"],
            num_workers=self.size.workers,
            pin_memory=self.device.type == "cuda",
            device=self.device,
        )
        while True:
            yield from loader


# ---- the step written by hand


class Hand:
    """The step written by hand."""

    def __init__(self, size: Size, device: torch.device):
        self.device, self.layout = device, size.layout
        torch.manual_seed(0)
        self.model = timm.create_model(size.model, num_classes=CLASSES).to(device, memory_format=self.layout)
        self.optimizer = create_optimizer_v2(self.model, "adamw", lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
        if size.compiled:
            self.model.compile()

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        images = images.contiguous(memory_format=self.layout)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(images)
        F.cross_entropy(logits.float(), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, batches: Iterator, steps: int) -> float:
        """Seconds of `steps`, after the warm-up."""
        own = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            for _ in range(WARM_UP):
                self.step(*next(batches))
            began = now(self.device)
            for _ in range(steps):
                self.step(*next(batches))
            return now(self.device) - began
        finally:
            torch.backends.cudnn.benchmark = own


# ---- the recipe


class Conducted:
    """Replaces the recipe's feed: gives it the batches of its turns; the others' turns run in between."""

    def __init__(self, batches: Iterator[Batch]):
        self.batches = batches

    def __next__(self) -> Batch:
        return next(self.batches)

    def take(self) -> tuple[float, tuple[str, ...]]:
        return 0.0, ()


def train(data: Sources, batches: Iterator[Batch]) -> None:
    """Runs the recipe on `batches` until they raise `Enough`."""
    size, jitter = data.size, ColorJitter.apply

    def jittered(self, images, targets, draws):
        """The resident batch has no draws: its colours stay, as those of the step written by hand."""
        return jitter(self, images, targets, draws) if draws.numel() else (images, targets)

    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as switches, contextlib.ExitStack() as stack:
        json.dump({"compile": size.compiled, "channels_last": size.layout is torch.channels_last}, switches)
        switches.flush()
        flags = {"config": switches.name, "data": data.folder, "val_share": 0.05, "image_size": size.image_size}
        flags |= {key: getattr(VARIED, key) for key in ("crop_scale", "hflip", "color_jitter")}
        quiet = io.StringIO()
        stack.enter_context(patch.object(training_step, "Prefetcher", lambda loader, device: Conducted(batches)))
        stack.enter_context(patch.object(ColorJitter, "apply", jittered))
        # The end of a run kills all data workers of the process; those of the queues end with this program.
        stack.enter_context(patch.object(data_workers, "end", lambda: None))
        stack.enter_context(contextlib.redirect_stdout(quiet))
        stack.enter_context(contextlib.redirect_stderr(quiet))
        stack.enter_context(contextlib.suppress(Enough))
        recipe("cls", lambda setting: flags)(Setting(size.model, size.image_size, size.batch_size, 0))


def measure(data: Sources) -> dict[str, list[float]]:
    """Images per second in each turn of each way."""
    size, device, speeds = data.size, data.device, {}
    hand = Hand(size, device)
    resident = endless(data.normalised.contiguous(memory_format=hand.layout), data.resident.labels)
    hand.turn(resident, 2)
    steps = max(2, min(200, math.ceil(size.seconds / (hand.turn(resident, 3) / 3))))

    def note(way: str, seconds: float) -> None:
        speeds.setdefault(way, []).append(size.batch_size * steps / seconds)

    def of_recipe(way: str) -> Iterator[Batch]:
        following = partial(next, data.feeds[way]) if way in data.feeds else lambda: data.resident
        for _ in range(WARM_UP):
            yield following()
        start = now(device)
        for _ in range(steps):
            yield following()
        note(way, now(device) - start)  # the recipe asks for the next batch: these steps are done

    def conduct() -> Iterator[Batch]:
        for _ in range(WARM_UP):
            yield data.resident
        for way in ["resident", "by hand", "by hand", "resident", *FILES, "timm", "timm", *FILES[::-1]]:
            with data.queues[way].turn() if way in data.queues else contextlib.nullcontext():
                if way in ("by hand", "timm"):
                    note(way, hand.turn(resident if way == "by hand" else data.queues[way].batches, steps))
                else:
                    yield from of_recipe(way)
        raise Enough

    train(data, conduct())
    if len(speeds.get(FILES[0], ())) < 2:
        raise RuntimeError(f"{size.model}: the recipe ended before its turns: {speeds}")
    return speeds


def endless(*batch: torch.Tensor) -> Iterator:
    while True:
        yield batch


def rows_of(speeds: dict[str, list[float]]) -> list[Row]:
    median = {way: statistics.median(of_way) for way, of_way in speeds.items()}
    limit, rows = median["by hand"], []
    for way in ("resident", *FILES):
        what, peer, goal = f"JPEG, {way}", "timm", min(OF_TIMM, OF_LIMIT * limit / median["timm"])
        if way == "resident":
            what, peer, goal = "on the device", "by hand", OF_LIMIT
        name = "the step by hand" if peer == "by hand" else "timm's loader, the step by hand"
        rows.append(Row(what, "images/s", median[way], name, median[peer], median[way] / median[peer], limit, goal))
    return rows


def of_shards(gpus: int, quick: bool) -> list[Row]:
    """Runs sharded.py with a shard on each GPU."""
    with tempfile.TemporaryDirectory() as folder:
        output, root = Path(folder) / "rows.json", Path(__file__).resolve().parent.parent
        launcher = [sys.executable, "-m", "accelerate.commands.launch"]
        launcher += ["--config_file", root / "accelerate_configs/fsdp_bf16.yaml", "--num_processes", str(gpus)]
        words = [root / "benchmarks/sharded.py", "--output", output, *(["--quick"] if quick else [])]
        done = subprocess.run([*map(str, launcher + words)], env=os.environ | {"PYTHONPATH": str(root)})
        if done.returncode:
            raise SystemExit(f"benchmarks/sharded.py ended with {done.returncode}")
        return [Row(**row) for row in json.loads(output.read_text())]


def fitting(size: Size) -> int:
    """Workers whose batches fit into /dev/shm. A worker holds 10 batches of pixels."""
    of_worker = size.batch_size * 10 * 3 * size.image_size**2
    try:
        return max(1, min(size.workers, int(0.8 * shutil.disk_usage("/dev/shm").free) // of_worker))
    except OSError:  # a system without it
        return size.workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it works: a tiny model, also on a CPU")
    parser.add_argument("--model", default="resnet50", help="of timm, for 224 pixels (default: resnet50)")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu and not arguments.quick:
        print("not measured: this needs a GPU; --quick shows that it works on any device")
        return
    if not gpu:
        os.environ["ACCELERATE_USE_CPU"] = "1"
        torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no stopped worker is left behind
    size = Size(arguments.model, arguments.compile, 224, 256, 256, 1.2, worker_count(-1))
    size = replace(size, workers=fitting(size))
    if arguments.quick:
        size = Size("test_resnet", arguments.compile, 64, 8, 16, 0.0, 1)
    facts = {"device": torch.cuda.get_device_name(device) if gpu else "CPU", "cores": len(os.sched_getaffinity(0))}
    facts |= {"torch": torch.__version__, "timm": timm.__version__, **asdict(size)}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_photographs(Path(folder), 500, 375, size.photographs)
            speeds = measure(Sources(size, Path(folder), device))
    finally:
        data_workers.end()  # stopped ones, too
    rows = rows_of(speeds)
    show(rows)
    if torch.cuda.device_count() > 1:
        rows += of_shards(torch.cuda.device_count(), arguments.quick)
    if arguments.output:
        result = facts | {"rows": [asdict(row) for row in rows], "speeds": speeds}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
