"""Measures how much of a GPU's speed `recipes/cls.py` reaches on files.

    python benchmarks/gpu.py [--quick] [--turns N]

ResNet-50 at 224 pixels in bf16, on JPEGs of 500 x 375 pixels, decoded by the workers or once
(`--cache`). The peer is timm's loader with its prefetcher, as many workers and the same
augmentation, in front of the loop written by hand of `paired.py`. The bound is that loop on one
batch that lies on the device.

The ways take turns in one process, forwards and backwards. The first steps of a turn, for which
batches were read ahead, are not measured; clocks are read once the device is idle. Without a GPU
only --quick runs.
"""

import itertools
import os
import tempfile
from functools import partial
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from paired import WARM_UP, Setting, build_recipe_loop, time_steps, train_by_hand
from peers import timm_loader
from photographs import write_classes
from table import Row, compare, run_script, take_turns

from common.data.loader import count_workers

OF_BOUND = 0.98  # goals: share of the bound
OF_TIMM = 2.0  # times timm's loader


def train_recipe(way: str, setting: Setting, folder: Path, workers: int) -> None:
    """Runs the recipe until it is stopped, with the augmentation of timm's loader."""
    flags = {
        "data": folder,
        "image_size": setting.image_size,
        "crop_scale": 0.08,
        "hflip": 0.5,
        "color_jitter": 0.4,
        "channels_last": True,
        "workers": workers,
        "cache": 3 * setting.image_size // 2 if way == "cache" else 0,
    }
    build_recipe_loop("cls", lambda _: flags)(setting)


def train_bare(way: str, setting: Setting, folder: Path, workers: int) -> None:
    """The loop written by hand, on one batch or on those of timm's loader."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = timm.create_model(setting.model, num_classes=2).to(
        device, memory_format=torch.channels_last
    )
    batches = timm_loader(folder, setting.image_size, setting.batch_size, workers, device)
    if way == "one batch":
        batches = itertools.repeat(next(batches))

    def compute_loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(images.contiguous(memory_format=torch.channels_last))
        return F.cross_entropy(logits.float(), labels)

    with torch.backends.cudnn.flags(benchmark=True):
        train_by_hand(model, batches, compute_loss)


def measure_speed(way: str, setting: Setting, folder: Path, workers: int) -> float:
    """Images per second, after the steps for which batches were read ahead."""
    train = train_bare if way in ("one batch", "timm") else train_recipe
    loop = partial(train, way, setting, folder, workers)
    return 1e3 * setting.batch_size / time_steps(loop, WARM_UP + 4 * workers, setting.steps)


def measure(turns: int, quick: bool) -> list[Row]:
    gpu = torch.cuda.is_available()
    if not gpu and not quick:
        raise SystemExit(
            "not measured: this needs a GPU; --quick shows that it works on any device"
        )
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    if not gpu:
        os.environ["ACCELERATE_USE_CPU"] = "1"
    setting = Setting("resnet50", 224, 256, 100)
    workers = count_workers(-1)
    if quick:
        setting = Setting("test_resnet", 64, 8, 2)
        workers = 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "photographs"
        write_classes(folder, 500, 375, 2 * setting.batch_size)
        names = ("workers", "cache", "timm", "one batch")
        ways = {name: partial(measure_speed, name, setting, folder, workers) for name in names}
        speeds = take_turns(ways, turns)
    bound = compare("one batch", "images/s", speeds, "timm", "one batch")
    goal = min(OF_TIMM, OF_BOUND * bound.ratio)
    return [
        compare(f"{setting}, {way}", "images/s", speeds, "timm", way, goal)
        for way in ("workers", "cache")
    ]


if __name__ == "__main__":
    run_script(__doc__, measure)
