"""Measures what `recipes/det.py` adds to the detector's own step, and how fast it reads.

    python benchmarks/detection.py [--quick] [--brief] [--output FILE]

First the recipe's own `main` is compared with a loop written by hand around the same detector: the same scenes in the same
order, resizing, loss, optimizer, gradient norm and learning rate per step; the loss is read one step late. Both load data in
the training process (workers 0), so that no part of the input pipeline is hidden. `paired.py` explains the comparison. Then the
CPU time of one data worker per image, from JPEGs of 640 x 480 to batches handed over, is compared with torchvision's pipeline;
CPU time, so that other work on the machine counts less. On the CPU torch uses one thread, so that waiting is not hidden by
other threads' work.
"""

import contextlib
import gc
import itertools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
import torchvision
from paired import TOTAL_STEPS, Setting, compare_loops, recipe, train_by_hand
from PIL import Image
from sklearn.datasets import load_sample_images
from table import Row, compare, script, take_turns
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from common.data.batch_plan import BatchPlan
from common.data.loader import training_loader
from common.data.stream import Stream
from common.detection.batches import TrainDataset
from common.detection.data import sources
from common.detection.data.annotated import Annotated
from common.detection.models import detectors
from common.detection.models.spec import DetectorSpec
from common.detection.transforms import BoxAugmentation

LEVELS, WIDTH, CONVOLUTIONS = (3, 4), 64, 2  # of the FCOS that the loops train
READ_BATCH, QUALITY = 8, 92  # images per batch when reading; of their JPEGs
READING = 2.5  # goal of the ratio to torchvision


# ---- the loops


def flags(setting: Setting) -> dict:
    return {
        "detector": "fcos",
        "data": "digits",
        "hflip": 0,
        "warmup_epochs": 0,
        "levels": "{}-{}".format(*LEVELS),
        "width": WIDTH,
        "convolutions": CONVOLUTIONS,
        "short_sides": setting.image_size,
        "long_side": setting.image_size,
    }


@dataclass
class Scenes(Dataset):
    """Maps the number of a scene to its resized image and boxes."""

    source: Annotated
    transform: Callable

    def __len__(self) -> int:
        return 2**62  # scenes are drawn on access

    def __getitem__(self, number: int):
        image, boxes, labels, _ = self.source.scene(number)
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=image.shape[:2])
        image, boxes = self.transform(image, boxes)
        crowd = torch.zeros(len(labels), dtype=torch.bool)
        return image, {"boxes": boxes, "labels": torch.from_numpy(labels), "crowd": crowd}


def collate(samples: list):
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


def bare(setting: Setting) -> None:
    """The loop written by hand."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source, _ = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    shape = {"levels": LEVELS, "width": WIDTH, "convolutions": CONVOLUTIONS}
    model = detectors.build_detector(DetectorSpec("fcos", setting.model, len(source.classes), **shape)).to(device)
    mean, std = (255 * torch.tensor(model.pretrained_cfg[key], device=device)[:, None, None] for key in ("mean", "std"))
    transform = v2.Compose([v2.ToImage(), v2.Resize([setting.image_size] * 2), v2.ToPureTensor()])
    in_order = range(TOTAL_STEPS * setting.batch_size)
    loader = DataLoader(
        Scenes(source, transform),
        setting.batch_size,
        sampler=in_order,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
    )

    def loss_of(images: torch.Tensor, targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        images = images.to(device, non_blocking=True).to(torch.float32).sub_(mean).div_(std)
        targets = [{key: value.to(device, non_blocking=True) for key, value in one.items()} for one in targets]
        return model.losses(images, targets, model.counts(targets, images.shape[2:]))[0].sum()

    train_by_hand(model, loader, loss_of)


# ---- reading


def make_photographs(folder: Path, count: int) -> None:
    """Parts of scikit-learn's photographs as JPEGs of 640 x 480 with 7 boxes each, in COCO's format."""
    random, photographs = np.random.default_rng(0), [Image.fromarray(pixels) for pixels in load_sample_images().images]
    folder.mkdir()
    images, boxes = [], []
    for number in range(count):
        photograph = photographs[number % 2]
        size = np.array([4, 3]) * random.uniform(80, 142)
        corner = random.random(2) * (photograph.size - size)
        part = photograph.resize((640, 480), Image.Resampling.LANCZOS, (*corner, *(corner + size)))
        part.save(folder / f"{number}.jpg", quality=QUALITY)
        images.append({"id": number, "file_name": f"{number}.jpg", "width": 640, "height": 480})
        for width, height in random.uniform(20, 240, (7, 2)):
            left, top = random.random(2) * (640 - width, 480 - height)
            box = {"bbox": [left, top, width, height], "area": width * height, "iscrowd": 0}
            boxes.append(box | {"id": len(boxes), "image_id": number, "category_id": 1 + len(boxes) % 80})
    categories = [{"id": number, "name": str(number)} for number in range(1, 81)]
    content = {"images": images, "annotations": boxes, "categories": categories}
    for part in ("train", "val"):
        (folder / f"{part}.json").write_text(json.dumps(content))


def our_loader(folder: Path, side: int):
    train, _ = sources.load(sources.Spec(str(folder), seed=0, val_share=0.2))
    stream = Stream(len(train), READ_BATCH, seed=0)
    augmentation = BoxAugmentation(0, (side,), 1333, hflip=0.5)
    samples = TrainDataset(train, stream, augmentation, 32, (124, 116, 104), 0)
    return training_loader(samples, BatchPlan(READ_BATCH, 1, READ_BATCH), 0, 10**9, workers=1)


def torchvision_loader(folder: Path, side: int):
    """As torchvision's training script for detection reads with `--data-augmentation multiscale`."""
    vary = [v2.RandomShortestSize([side], max_size=1333), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    end = [v2.ToDtype(torch.float32, scale=True), v2.SanitizeBoundingBoxes(), v2.ToPureTensor()]
    transform = v2.Compose([*vary, *end])
    with contextlib.redirect_stdout(None):
        data = torchvision.datasets.CocoDetection(str(folder), str(folder / "train.json"), transforms=transform)
    data = torchvision.datasets.wrap_dataset_for_transforms_v2(data, ("boxes", "labels"))
    endless = (number % len(data) for number in itertools.count())
    return DataLoader(data, READ_BATCH, sampler=endless, num_workers=1, collate_fn=as_lists)


def as_lists(samples: list) -> tuple:
    return tuple(zip(*samples, strict=True))


def worker_cpu(make: Callable, folder: Path, side: int, batches: int) -> float:
    """CPU milliseconds of the loader's worker per image, handing over included."""

    def spent() -> float:
        times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
        return sum(time.user + time.system for time in times)

    running = iter(make(folder, side))
    for _ in range(10):  # the start, and batches that are read ahead
        next(running)
    before = spent()
    for _ in range(batches):
        next(running)
    after = spent()
    del running
    gc.collect()
    return 1e3 * (after - before) / (READ_BATCH * batches)


def rows_of_reading(count: int, batches: int, turns: int) -> list[Row]:
    """The CPU time per image of both ways, at two sizes."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "coco"
        make_photographs(folder, count)
        for side in (480, 800):
            ways = {
                "ours": partial(worker_cpu, our_loader, folder, side, batches),
                "torchvision": partial(worker_cpu, torchvision_loader, folder, side, batches),
            }
            what = f"CPU of an image with boxes, short side {side}"
            rows.append(compare(what, "ms", take_turns(ways, turns), "torchvision", goal=READING))
    return rows


def measure(quick: bool, brief: bool) -> tuple[list[Row], list]:
    """The loops in three settings, as loop.py's, and the reading at two sizes."""
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)
    settings = (
        Setting("resnet50", 800, 8, 30) if gpu else Setting("resnet18", 128, 4, 6),
        Setting("test_resnet", 64, 2, 24),
        Setting("test_resnet", 64, 16, 12),
    )
    quartets, reading = (2, (64, 40, 3)) if brief else (5, (64, 40, 7))
    if quick:
        settings = tuple(Setting("test_resnet", 64, batch_size, 3) for batch_size in (4, 2, 6))
        quartets, reading = 1, (16, 4, 1)
    rows, figures = compare_loops("det", recipe("det", flags), bare, settings, quartets)
    return rows + rows_of_reading(*reading), figures


if __name__ == "__main__":
    script(__doc__, measure)
