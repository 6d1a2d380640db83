"""Measures how the cost of what surrounds a step grows with the work: with parameters, samples, classes, detections.

    python benchmarks/growth.py [--quick] [--output FILE] [--chart FILE]

Prints one line per part: its time at each size, and the exponent of the growth between the last two sizes, where 1 is
proportional. Parts: a step of `recipes/cls.py` on one 32 px image, and of a bare loop (timm's ConvNeXts of 3 to 196 million
parameters); the stop for a checkpoint, and the checkpoint (AdamW and an average: 16 bytes per parameter); from a folder or an
index of shards to the indices of the first batch; from a folder with one image per class; counting and summing up an
evaluation of 1,024 images; an evaluation of boxes, 80 classes, 50 detections and 7 objects per image. One thread.
"""

import argparse
import contextlib
import io
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import loop
import numpy as np
import timm
import torch
from checkpoint import Training
from paired import Setting, measure, recipe
from PIL import Image

from common.classification import sources
from common.classification.metrics import ClassificationCounts
from common.data import shard_index, shards
from common.data.stream import Blocks, Stream
from common.detection.data.annotated import Annotated
from common.detection.evaluation.metrics import Detections
from common.run import plots

BATCH = 1024
MODELS = "convnext_atto", "convnext_tiny", "convnext_base", "convnext_large"


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def parameters(model: str) -> int:
    with torch.device("meta"):
        return sum(weights.numel() for weights in timm.create_model(model, num_classes=10).parameters())


def step(model: str, ours: bool) -> float:
    way = recipe("cls", loop.flags) if ours else loop.bare
    return measure(way, Setting(model, 32, 1, 5))[0] / 1e3


def checkpoint(model: str) -> tuple[float, float]:
    """Seconds that training stops, and until the file is complete; of the second checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(model, 1, Path(folder))
        training.step()
        for _ in range(2):
            figures = training.save(beside=True)
    return figures["stop_s"], figures["writing_s"]


def first_batch(source, blocks: Blocks | None = None) -> None:
    Stream(len(source), BATCH, 0, blocks=blocks).indices(np.arange(BATCH))


def folder_of(samples: int, classes: int, root: Path) -> Path:
    """A folder with so many images to train on, in so many class folders, and one per class to evaluate: links to one image."""
    image = root / "image.png"
    Image.new("RGB", (8, 8)).save(image)
    folder = root / f"{samples}-{classes}"
    for part, count in (("train", samples), ("val", classes)):
        for label in range(classes):
            (folder / part / f"{label:07d}").mkdir(parents=True)
        for number in range(count):
            (folder / part / f"{number % classes:07d}/{number}.png").symlink_to(image)
    return folder


def start_of_folder(folder: Path) -> float:
    return timed(lambda: first_batch(sources.load(sources.Spec(str(folder), seed=0, val_share=0.2))[0]))


def start_of_shards(samples: int, root: Path) -> float:
    """With an index of so many samples, whose files are sparse."""
    folder = root / str(samples)
    folder.mkdir()
    with (folder / "entries").open("wb") as file:
        file.truncate(shard_index.ENTRY.itemsize * samples)
    np.lib.format.open_memmap(folder / "labels.npy", "w+", np.int64, (samples,))
    np.save(folder / "edges.npy", np.arange(0, samples + 1, min(samples, 400)))
    facts = {"classes": ["a"], "counts": [samples], "fingerprint": "0", "notes": [], "block_bytes": 100}
    (folder / "facts.json").write_text(json.dumps(facts))
    listed = shard_index.ShardList(("a.tar",), ((0, ""),), "", "")

    def start() -> None:
        index = shard_index._load(folder, listed)
        source = shards.Shards(index.entries, index, labels=index.labels, classes=index.classes)
        first_batch(source, Blocks(index.edges, 300))

    return timed(start)


def evaluation(classes: int, images: int = BATCH) -> float:
    """Counting batches of 64 images, and the results; logits of random numbers are not counted."""
    counts, labels = ClassificationCounts(classes, "cpu"), torch.arange(64) % classes
    logits = torch.rand(64, classes)
    batches = images // 64
    return timed(lambda: ([counts.update(logits, labels) for _ in range(batches)], counts.results()))


def evaluation_of_boxes(detections: int) -> float:
    random, images = np.random.default_rng(0), detections // 50
    corners = random.random((images, 7, 2), np.float32) * 400
    boxes = np.concatenate([corners, corners + 10 + 200 * random.random((images, 7, 2), np.float32)], 2)
    labels = random.integers(0, 80, images * 7)
    areas = (boxes[..., 2:] - boxes[..., :2]).prod(-1).reshape(-1).astype(np.float64)
    source = Annotated(
        tuple(map(str, range(80))),
        np.arange(80),
        np.arange(images),
        np.full((images, 2), 640, np.int32),
        np.arange(0, images * 7 + 1, 7),
        boxes.reshape(-1, 4),
        labels,
        np.zeros(images * 7, bool),
        areas,
    )
    found = Detections()
    for image in range(images):
        objects = random.integers(0, 7, 50)
        moved = boxes[image, objects] + random.normal(0, 15, (50, 4)).astype(np.float32)
        moved[:, 2:] = np.maximum(moved[:, 2:], moved[:, :2] + 1)
        of_classes = labels[image * 7 + objects].astype(np.float32)
        rows = np.column_stack([moved, np.sort(random.random(50, np.float32))[::-1], of_classes])
        found.images.append(np.full(50, image))
        found.rows.append(rows.astype(np.float32))
        found.count += 1

    def evaluate() -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # COCO's table
            found.results(source)
        found.details()

    return timed(evaluate)


def powers(first: int, last: int) -> list[int]:
    return [10**exponent for exponent in range(first, last + 1)]


def parts(quick: bool, root: Path) -> Iterator[tuple[str, dict[int, float]]]:
    """Name of each part, and its seconds by size; a first call of each warms up."""
    models = ("test_convnext", "test_convnext2") if quick else MODELS
    sizes = {name: parameters(name) for name in models}
    step(models[0], True)
    yield "step of cls.py, parameters", {sizes[name]: step(name, True) for name in models}
    step(models[0], False)
    yield "step of a bare loop, parameters", {sizes[name]: step(name, False) for name in models}
    saved = {sizes[name]: checkpoint(name) for name in models}
    yield "stop for a checkpoint, parameters", {size: both[0] for size, both in saved.items()}
    yield "checkpoint, parameters", {size: both[1] for size, both in saved.items()}
    start_of_folder(folder_of(10, 2, root))
    counts = powers(3, 4 if quick else 6)
    yield "start from a folder, samples", {count: start_of_folder(folder_of(count, 10, root)) for count in counts}
    counts = powers(3, 5 if quick else 9)
    yield "start from shards, samples", {count: start_of_shards(count, root) for count in counts}
    counts = powers(1, 3 if quick else 5)
    yield "start from a folder, classes", {count: start_of_folder(folder_of(count, count, root)) for count in counts}
    evaluation(10)
    yield "evaluation, classes", {count: evaluation(count) for count in powers(1, 4 if quick else 6)}
    evaluation_of_boxes(1000)
    yield (
        "evaluation of boxes, detections",
        {count: evaluation_of_boxes(count) for count in powers(4, 5 if quick else 6)},
    )


def exponent(times: dict[int, float]) -> float:
    """Of the growth between the last two sizes."""
    (small, before), (large, after) = [*times.items()][-2:]
    return math.log(after / before) / math.log(large / small)


def draw(tables: dict[str, dict[int, float]], path: Path) -> None:
    """A chart of all parts by what they grow with: docs/pictures/growth.png."""
    figure = plots.new_figure(10, 3.6)
    kinds = [*dict.fromkeys(name.rpartition(", ")[2] for name in tables)]
    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True), kinds, strict=True):
        for name, times in tables.items():
            if name.endswith(kind):
                axes.loglog(*zip(*times.items(), strict=True), marker=".", label=name.removesuffix(f", {kind}"))
        axes.set_xlabel(kind)
        axes.legend(fontsize=7, frameon=False)
        axes.grid(color=plots.PALE)
    figure.supylabel("seconds")
    plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it works: small sizes")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    parser.add_argument("--chart", type=Path, help="also draw them into this PNG file")
    arguments, tables = parser.parse_args(), {}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for part, times in parts(arguments.quick, Path(folder)):
            tables[part] = times
            line = ", ".join(f"{size:.2g}: {seconds:.3g} s" for size, seconds in times.items())
            print(f"{part:34} exponent {exponent(times):5.2f}  {line}", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(tables, indent=1) + "\n")
    if arguments.chart:
        draw(tables, arguments.chart)


if __name__ == "__main__":
    main()
