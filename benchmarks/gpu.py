"""Measures how much of a GPU's speed `recipes/cls.py` reaches, on data that lie on the GPU and on files.

    python benchmarks/gpu.py [--quick] [--model vit_small_patch16_224] [--compile] [--output FILE]

A model of timm at 224 pixels in bf16. The bound is a step written by hand on one normalised batch that lies on the device:
forward, loss, backward, fused AdamW, cudnn.benchmark. It is compared with the recipe's own `main`: on one batch that lies on
the device, and on JPEGs of 500 x 375 pixels, decoded by the workers or once (`--cache`). Their peer is timm's own loader
with its prefetcher, as many workers and the same augmentation, in front of the step written by hand.

The ways take turns in one process, forwards and backwards. The first steps of a turn, for which batches were read ahead, are
not measured; clocks are read once the device is idle. Without a GPU only --quick runs.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import timm.data
import torch
import torch.nn.functional as F
from input_pipeline import make_photographs
from paired import LR, WEIGHT_DECAY, Setting, recipe, timed
from table import Row, compare, show, take_turns
from timm.optim import create_optimizer_v2
from torchvision.datasets import ImageFolder

from common.data.loader import Prefetcher, worker_count
from common.training import step as training_step

OF_LIMIT, OF_TIMM = 0.98, 2.0  # goals: share of the bound, times timm's loader
CROP_SCALE, HFLIP, JITTER = 0.08, 0.5, 0.4  # the defaults of timm's loader
WAYS = ("resident", "by hand", "worker", "cache", "timm")
CACHE = 1.5  # side of a cached image / side of a crop


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    model: str
    compiled: bool
    image_size: int
    batch_size: int
    photographs: int  # in each class
    steps: int  # of a turn
    workers: int

    @property
    def layout(self) -> torch.memory_format:
        return torch.contiguous_format if self.model.startswith("vit") else torch.channels_last


class Resident(Prefetcher):
    """Gives its first batch again and again."""

    first = None

    def __next__(self):
        self.first = self.first or super().__next__()
        return self.first


def train(way: str, size: Size, folder: Path) -> None:
    """Runs the recipe until it is stopped."""
    flags = {"data": folder, "val_share": 0.05, "image_size": size.image_size, "crop_scale": CROP_SCALE, "hflip": HFLIP}
    flags |= {"workers": size.workers}
    # Colours of the resident batch stay, as in the step written by hand.
    flags |= {"color_jitter": 0 if way == "resident" else JITTER}
    flags |= {"cache": int(CACHE * size.image_size)} if way == "cache" else {}
    flags |= {"compile": True} if size.compiled else {}
    flags |= {"channels_last": True} if size.layout is torch.channels_last else {}
    with patch.object(training_step, "Prefetcher", Resident if way == "resident" else Prefetcher):
        recipe("cls", lambda _: flags)(Setting(size.model, size.image_size, size.batch_size, size.steps))


def by_hand(way: str, size: Size, folder: Path) -> None:
    """The step written by hand, without an end: on one batch, or on the batches of timm's loader."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = timm.create_model(size.model, num_classes=2).to(device, memory_format=size.layout)
    optimizer = create_optimizer_v2(model, "adamw", lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    if size.compiled:
        model.compile()
    batches = of_timm(size, folder, device)
    for images, labels in batches if way == "timm" else itertools.repeat(next(batches)):
        images = images.contiguous(memory_format=size.layout)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def of_timm(size: Size, folder: Path, device: torch.device) -> Iterator:
    """Batches of timm's loader, normalised, on the device."""
    files = ImageFolder(folder)
    files.samples = files.samples * 2000  # a very long epoch: the loader pauses at its end
    options = {"color_jitter": JITTER, "scale": (CROP_SCALE, 1.0), "hflip": HFLIP, "num_workers": size.workers}
    shape = (3, size.image_size, size.image_size)
    pinned = {"pin_memory": device.type == "cuda", "device": device}
    return iter(timm.data.create_loader(files, shape, size.batch_size, is_training=True, **options, **pinned))


def speed(way: str, size: Size, folder: Path) -> float:
    """Images per second, after the steps for which batches were read ahead."""
    loop = by_hand if way in ("by hand", "timm") else train
    own = torch.backends.cudnn.benchmark
    try:
        step_ms, _ = timed(partial(loop, way, size, folder), 3 + 4 * size.workers, size.steps)
        return 1e3 * size.batch_size / step_ms
    finally:
        torch.backends.cudnn.benchmark = own


def rows_of(speeds: dict[str, list[float]]) -> list[Row]:
    limit, theirs = (statistics.median(speeds[way]) for way in ("by hand", "timm"))
    options = {"limit": limit, "goal": min(OF_TIMM, OF_LIMIT * limit / theirs)}
    return [
        compare("on the device", "images/s", speeds, "by hand", "resident", limit=limit, goal=OF_LIMIT),
        *(compare(f"JPEG, {way}", "images/s", speeds, "timm", way, **options) for way in ("worker", "cache")),
    ]


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
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    if not gpu:
        os.environ["ACCELERATE_USE_CPU"] = "1"
        torch.set_num_threads(1)
    size = Size(arguments.model, arguments.compile, 224, 256, 256, 100, worker_count(-1))
    if arguments.quick:
        size = Size("test_resnet", arguments.compile, 64, 8, 16, 2, 1)
    facts = {"device": torch.cuda.get_device_name() if gpu else "CPU", "cores": len(os.sched_getaffinity(0))}
    facts |= {"torch": torch.__version__, "timm": timm.__version__, **asdict(size)}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder), 500, 375, size.photographs)
        speeds = take_turns({way: partial(speed, way, size, Path(folder)) for way in WAYS}, 2)
    rows = rows_of(speeds)
    show(rows)
    if arguments.output:
        result = facts | {"rows": [asdict(row) for row in rows], "speeds": speeds}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
