"""Measures what `recipes/det.py` adds to the detector's own step, and how fast it reads.

    python benchmarks/detection.py [--quick] [--brief] [--output FILE]

First the recipe's own `main` is compared with a loop written by hand around the same detector: the same scenes in the same
order, resizing, loss, optimizer, gradient norm and learning rate per step; the loss is read one step late. Both load data in
the training process (workers 0), so that no part of the input pipeline is hidden. `paired.py` explains the comparison. Then the
CPU time of one data worker per image, from JPEGs of 640 x 480 to batches handed over, is compared with torchvision's pipeline;
CPU time, so that other work on the machine counts less. On the CPU torch uses one thread, so that waiting is not hidden by
other threads' work.
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import timm
import torch
import torchvision
from paired import LR, TOTAL_STEPS, WEIGHT_DECAY, Setting, recipe, report, rows_of_loops
from PIL import Image
from sklearn.datasets import load_sample_images
from table import Row
from timm.optim import create_optimizer_v2
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from common.data.batch_plan import BatchPlan
from common.data.cache import open_cache
from common.data.loader import training_loader
from common.data.stream import Stream
from common.detection.batches import TrainingImages
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
        image, boxes, labels = self.source.scene(number)
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
    optimizer = create_optimizer_v2(model, "adamw", lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    parameters = list(model.parameters())
    numbers = torch.zeros(2)
    model.train()
    for step, (images, targets) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 + math.cos(math.pi * step / TOTAL_STEPS)) / 2
        images = images.to(device, non_blocking=True).to(torch.float32).sub_(mean).div_(std)
        targets = [{key: value.to(device, non_blocking=True) for key, value in one.items()} for one in targets]
        losses, _ = model(images, targets, model.counts(targets, images.shape[2:]))
        loss = losses.sum()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        optimizer.step()
        optimizer.zero_grad()
        late = numbers.tolist()  # of the previous step
        if not all(map(math.isfinite, late)):
            raise FloatingPointError(f"step {step}: {late}")
        numbers = torch.stack([loss.detach(), norm])


# ---- reading


def make_photographs(folder: Path, count: int) -> int:
    """COCO's format: parts of scikit-learn's photographs as JPEGs of 640 x 480 with 7 boxes each; returns bytes per image."""
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
    return round(statistics.mean(file.stat().st_size for file in folder.glob("*.jpg")))


def our_loader(folder: Path, side: int, cache: int = 0):
    train, _ = sources.load(sources.Spec(str(folder), seed=0, val_share=0.2))
    stream = Stream(len(train), READ_BATCH, seed=0)
    augmentation = BoxAugmentation(0, (side,), 1333, hflip=0.5)
    samples = TrainingImages(
        train, stream, augmentation, 32, (124, 116, 104), 0, cache=open_cache(len(train), cache, "")
    )
    return training_loader(samples, BatchPlan(READ_BATCH, 1, READ_BATCH), 0, 10**9, workers=1)


def torchvision_loader(folder: Path, side: int, tensors: bool = False):
    """As torchvision's training script for detection reads with `--data-augmentation multiscale`; `tensors`: its --backend."""
    convert = [v2.PILToTensor()]
    vary = [v2.RandomShortestSize([side], max_size=1333), v2.RandomHorizontalFlip()]
    end = [v2.ToDtype(torch.float32, scale=True), v2.SanitizeBoundingBoxes(), v2.ToPureTensor()]
    transform = v2.Compose([*(convert + vary if tensors else vary + convert), *end])
    with contextlib.redirect_stdout(None):
        data = torchvision.datasets.CocoDetection(str(folder), str(folder / "train.json"), transforms=transform)
    data = torchvision.datasets.wrap_dataset_for_transforms_v2(data, ("boxes", "labels"))
    endless = (number % len(data) for number in itertools.count())
    return DataLoader(data, READ_BATCH, sampler=endless, num_workers=1, collate_fn=as_lists)


def as_lists(samples: list) -> tuple:
    return tuple(zip(*samples, strict=True))


def worker_cpu(loader, skipped: int, batches: int) -> float:
    """CPU milliseconds of the loader's worker per image, handing over included."""

    def spent() -> float:
        times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
        return sum(time.user + time.system for time in times)

    running = iter(loader)
    for _ in range(skipped):  # start, what is read ahead, and the first pass into a cache
        next(running)
    before = spent()
    for _ in range(batches):
        next(running)
    after = spent()
    del running
    gc.collect()
    return 1e3 * (after - before) / (READ_BATCH * batches)


def report_reading(count: int, batches: int, turns: int) -> list[dict]:
    """Prints and returns the CPU time per image of every way, at two sizes."""
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "coco"
        size = make_photographs(folder, count)
        print(f"\nCPU ms of a data worker per image: JPEGs of 640 x 480 and {size / 1000:.0f} kB, quality {QUALITY}")
        for side in (480, 800):
            ways = {
                "ours": lambda side=side: our_loader(folder, side),
                "torchvision": lambda side=side: torchvision_loader(folder, side),
                "torchvision, tensors": lambda side=side: torchvision_loader(folder, side, tensors=True),
                "ours, cached": lambda side=side: our_loader(folder, side, cache=640),
            }
            times = {way: [] for way in ways}
            skipped = max(10, -(-count // READ_BATCH) + 5)
            for turn in range(turns):
                for way in list(ways)[:: 1 if turn % 2 else -1]:
                    times[way].append(worker_cpu(ways[way](), skipped, batches))
            medians = {way: statistics.median(values) for way, values in times.items()}
            ratios = {
                way: statistics.median(a / b for a, b in zip(values, times["ours"], strict=True))
                for way, values in times.items()
            }
            results.append({"short_side": side, "bytes": size, "medians": medians, "ratios": ratios})
            for way in ways:
                print(f"short side {side}  {way:24}{medians[way]:8.2f}{ratios[way]:8.2f}", flush=True)
    return results


def table(results: dict) -> list[Row]:
    """Rows for the common table."""
    rows = rows_of_loops("det", results["loops"])
    for result in results["reading"]:
        medians, ratios = result["medians"], result["ratios"]
        for way in ("torchvision", "torchvision, tensors"):
            goal = READING if way == "torchvision" else None
            what = f"CPU of an image with boxes, short side {result['short_side']}"
            rows.append(Row(what, "ms", medians["ours"], way, medians[way], ratios[way], None, goal))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it works: few steps of tiny models")
    parser.add_argument("--brief", action="store_true", help="fewer repetitions, as for `make bench`")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)
    settings = (
        Setting("resnet50", 800, 8, 30) if gpu else Setting("resnet18", 128, 4, 6),
        Setting("test_resnet", 64, 2, 24),
        Setting("test_resnet", 64, 16, 12),
    )
    quartets = 2 if arguments.brief else 5
    count, batches, turns = 64, 40, 3 if arguments.brief else 7
    if arguments.quick:
        settings, quartets = tuple(Setting("test_resnet", 64, batch_size, 3) for batch_size in (4, 2, 6)), 1
        count, batches, turns = 16, 4, 1

    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} thread"
    print(f"{device}; torch {torch.__version__}, torchvision {torchvision.__version__}, timm {timm.__version__}")
    results = {
        "loops": report(recipe("det", flags), bare, settings, quartets),
        "reading": report_reading(count, batches, turns),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
