"""Measures how fast photographs become training batches, compared with other libraries on the same files.

    python benchmarks/input_pipeline.py [--quick] [--brief] [--output FILE]

JPEGs of 500 x 375 pixels and of 12 megapixels, made of scikit-learn's two photographs, are cropped to 224 pixels (crop_scale
0.08, mirrored half the time). Measured are:

- CPU time of one image on one core, from the file to uint8 or to what the peer ends in. Peers: timm's train pipeline as it
  comes (with colour jitter, which ours leaves to the device) and without jitter, torchvision's usual transforms, Hugging Face
  datasets. The bound is a plain decode, crop and resize. Also from `--cache`.
- Images per second of each library's own loader, with the cores of the machine.
- The slowest step around the end of an epoch, and the memory of a data worker.

All take turns in one run; a ratio is the median of the ratios of turns.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import numpy as np
import psutil
import timm.data
import torch
import torch.nn.functional as F
from PIL import Image
from simplejpeg import decode_jpeg
from sklearn.datasets import load_sample_images
from table import Row, show
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from common.classification import sources
from common.classification.batches import TrainingSamples
from common.classification.transforms import crop, training_transform
from common.config.fields import AugmentationConfig
from common.data.batch_plan import BatchPlan
from common.data.cache import open_cache
from common.data.decoding import Picture
from common.data.loader import training_loader, worker_count
from common.data.stream import Stream
from common.randomness import seed_generators

SIZE, BATCH = 224, 32
CONFIG = AugmentationConfig(crop_scale=0.08, hflip=0.5)
DATA = {"input_size": (3, SIZE, SIZE), "interpolation": "bilinear", "mean": (0.485, 0.456, 0.406), "std": (0.229,) * 3}
CACHE = 336
datasets.disable_progress_bars()


def make_photographs(folder: Path, width: int, height: int, count: int) -> None:
    """Writes `count` JPEGs to each of two class folders, each a different part of its photograph."""
    random = np.random.default_rng(0)
    for name, pixels in zip(("flower", "temple"), load_sample_images().images[::-1], strict=True):
        (folder / name).mkdir(parents=True)
        photograph = Image.fromarray(pixels)
        for number in range(count):
            share = random.uniform(0.5, 1, 2)
            part = photograph.crop((0, 0, *(share * photograph.size).astype(int)))
            part.resize((width, height), Image.Resampling.BICUBIC).save(folder / name / f"{number}.jpg", quality=90)


# ---- an image on one core


def timm_image(jitter: float | None) -> Callable[[str], object]:
    transform = timm.data.create_transform(SIZE, is_training=True, use_prefetcher=True, color_jitter=jitter)
    return lambda path: transform(Image.open(path).convert("RGB"))


def torchvision_transform() -> v2.Compose:
    return v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(DATA["mean"], DATA["std"]),
        ]
    )


def torchvision_image() -> Callable[[str], object]:
    transform = torchvision_transform()
    return lambda path: transform(Image.open(path).convert("RGB"))


def our_image(cache=None) -> Callable[[str], object]:
    """As in a data worker, which seeds its generators for each image."""
    transform, places = training_transform(CONFIG, DATA), {}

    def image(path: str) -> torch.Tensor:
        seed_generators(hash(path) + len(places))
        if cache is None:
            return transform(Picture(path))
        return transform(cache.picture(places.setdefault(path, len(places)), lambda: Picture(path)))

    return image


def bare_image(path: str) -> torch.Tensor:
    """The bound: read, decode, crop, resize, and nothing else."""
    with open(path, "rb") as file:
        pixels = torch.from_numpy(decode_jpeg(file.read())).permute(2, 0, 1)
    top, left, height, width = crop(*pixels.shape[1:], CONFIG.crop_scale)
    part = pixels[None, :, top : top + height, left : left + width].contiguous(memory_format=torch.channels_last)
    return F.interpolate(part, (SIZE, SIZE), mode="bilinear", antialias=True)[0]


def huggingface_image(paths: list[str]) -> Callable[[str], object]:
    rows = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image())
    transform, places = torchvision_transform(), {path: place for place, path in enumerate(paths)}
    return lambda path: transform(rows[places[path]]["image"].convert("RGB"))


def cpu_of_image(ways: dict[str, Callable[[str], object]], paths: list[str], turns: int) -> dict[str, list[float]]:
    """CPU milliseconds per image, one value per turn; turns go through the ways forwards and backwards."""
    times = {name: [] for name in ways}
    for way in ways.values():
        way(paths[0])
    for turn in range(turns):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            began = time.process_time()
            for path in paths:
                ways[name](path)
            times[name].append(1e3 * (time.process_time() - began) / len(paths))
    return times


def ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def rows_of_images(folder: Path, count: int, turns: int) -> list[Row]:
    rows = []
    for name, width, height, goal, share in (("500 x 375", 500, 375, 1.7, 1), ("4000 x 3000", 4000, 3000, 4.0, 16)):
        make_photographs(folder / name, width, height, max(2, count // share))
        paths = [str(path) for path in sorted((folder / name).rglob("*.jpg"))]
        cache = open_cache(len(paths), CACHE, "")
        ways = {
            "ours": our_image(),
            "from the cache": our_image(cache),
            "timm, as it comes": timm_image(0.4),
            "timm without jitter": timm_image(None),
            "torchvision": torchvision_image(),
            "datasets": huggingface_image(paths),
            "limit": bare_image,
        }
        for path in paths:
            ways["from the cache"](path)  # fills it
        times = cpu_of_image(ways, paths, turns)
        medians = {way: statistics.median(values) for way, values in times.items()}
        rows += [
            Row(
                f"CPU of an image, {name}",
                "ms",
                medians["ours"],
                way,
                medians[way],
                ratio(times[way], times["ours"]),
                medians["limit"] if width < 1000 else None,
                goal if way.startswith("timm, as") else None,
            )
            for way in ("timm, as it comes", "timm without jitter", "torchvision", "datasets")
        ]
        rows.append(
            Row(
                f"CPU of a cached image, {name}",
                "ms",
                medians["from the cache"],
                "ours from JPEG",
                medians["ours"],
                ratio(times["ours"], times["from the cache"]),
                None,
                5.0,
            )
        )
    return rows


# ---- loaders


def our_samples(folder: Path) -> TrainingSamples:
    train, _ = sources.load(sources.Spec(str(folder), seed=0, val_share=0.05))
    return TrainingSamples(train, Stream(len(train), BATCH, 0), training_transform(CONFIG, DATA), 0)


def our_loader(folder: Path, workers: int, steps: int) -> Iterator:
    """Ours, normalised like the others; the recipe does that on the device."""
    mean, std = (255 * torch.tensor(DATA[key])[:, None, None] for key in ("mean", "std"))
    for batch in training_loader(our_samples(folder), BatchPlan(BATCH, 1, BATCH), 0, steps, workers):
        yield batch.images.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std), batch.labels


def endless(loader: DataLoader) -> Iterator:
    """Epoch after epoch, as in a usual training script."""
    while True:
        yield from loader


def timm_loader(folder: Path, workers: int) -> Iterator:
    loader = timm.data.create_loader(
        ImageFolder(folder),
        (3, SIZE, SIZE),
        BATCH,
        is_training=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        device=torch.device("cpu"),  # where its prefetcher normalises
    )
    return endless(loader)


def torchvision_loader(folder: Path, workers: int) -> Iterator:
    dataset = ImageFolder(folder, torchvision_transform())
    return endless(DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, drop_last=True))


def huggingface_loader(folder: Path, workers: int) -> Iterator:
    transform = torchvision_transform()
    rows = datasets.load_dataset(
        "imagefolder", data_dir=str(folder), split="train", cache_dir=str(folder.parent / "hf")
    )

    def transformed(batch: dict) -> dict:
        return {"image": [transform(image.convert("RGB")) for image in batch["image"]], "label": batch["label"]}

    return endless(
        DataLoader(rows.with_transform(transformed), BATCH, shuffle=True, num_workers=workers, drop_last=True)
    )


def rows_of_loaders(folder: Path, batches: int, turns: int) -> list[Row]:
    workers = max(1, worker_count(-1))
    makers = {
        "ours": lambda: our_loader(folder, workers, 10**9),
        "timm, as it comes": lambda: timm_loader(folder, workers),
        "torchvision": lambda: torchvision_loader(folder, workers),
        "datasets": lambda: huggingface_loader(folder, workers),
    }
    speeds = {name: [] for name in makers}
    for turn in range(turns):
        for name in list(makers)[:: 1 if turn % 2 else -1]:
            loader = makers[name]()
            for _ in range(4 * workers + 1):  # skip what the workers had prefetched
                next(loader)
            began = time.perf_counter()
            for _ in range(batches):
                next(loader)
            speeds[name].append(BATCH * batches / (time.perf_counter() - began))
            del loader
            gc.collect()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return [
        Row(
            f"loader, {workers} worker{'s' * (workers > 1)}",
            "images/s",
            medians["ours"],
            name,
            medians[name],
            ratio(speeds["ours"], speeds[name]),
        )
        for name in list(makers)[1:]
    ]


def rows_of_epochs(folder: Path, epochs: int) -> list[Row]:
    """The slowest step over several ends of epochs, with steps about as long as the decoding of a batch."""

    def slowest(loader: Iterator, steps: int) -> float:
        for _ in range(3):
            next(loader)
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            next(loader)
            time.sleep(0.06)  # stands for the model: the worker gets ahead, as in training
            times.append(time.perf_counter() - began)
        return 1e3 * max(times)

    steps = epochs * (len(list(folder.rglob("*.jpg"))) // BATCH)
    ours, theirs = slowest(our_loader(folder, 1, 10**9), steps), slowest(torchvision_loader(folder, 1), steps)
    return [
        Row(f"slowest of {steps} steps of 60 ms, {epochs} epochs", "ms", ours, "torchvision", theirs, theirs / ours)
    ]


# ---- memory


class Listed(Dataset):
    """As ImageFolder: a Python list of paths and classes."""

    def __init__(self, root: Path, path: str, count: int):
        self.samples = [(f"{root}/{path}#{number}", number % 2) for number in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: np.ndarray) -> int:
        return sum(len(self.samples[index][0]) + self.samples[index][1] for index in indices)


class Read(Dataset):
    """Our columns, read as in a worker, but without decoding, so that a million samples take seconds."""

    def __init__(self, source: sources.Source):
        self.source = source

    def __getitems__(self, indices: np.ndarray) -> int:
        return sum(len(self.source.content(index)) + int(self.source.labels[index]) for index in indices)


def growth(dataset: Dataset, count: int) -> float:
    """Growth of a data worker's private memory from its first batch to the last of `count` samples, in MiB."""
    order = np.random.default_rng(0).permutation(count).reshape(-1, 1000)
    loader = iter(DataLoader(dataset, batch_sampler=order, num_workers=1, collate_fn=lambda value: value))
    next(loader)
    (worker,) = loader._workers
    process = psutil.Process(worker.pid)
    before = process.memory_full_info().uss
    for _ in range(len(order) - 2):
        next(loader)
    return (process.memory_full_info().uss - before) / 2**20


def rows_of_memory(count: int) -> list[Row]:
    import pyarrow as pa

    paths = pa.array([f"class/{number}.jpg".encode() for number in range(count)], pa.large_binary())
    ours = sources.Folder(Path("/data"), paths, np.zeros(count, np.int64), np.arange(count) % 2, ("a", "b"))
    mine, theirs = growth(Read(ours), count), growth(Listed(Path("/data"), "class", count), count)
    return [
        Row(
            f"growth of a worker over {count:,} samples",
            "MiB",
            mine,
            "a list of paths",
            theirs,
            theirs / max(mine, 0.1),
        )
    ]


def table(measured: list[dict]) -> list[Row]:
    """Rows for the common table."""
    return [Row(**row) for row in measured]


def rows(quick: bool = False, brief: bool = False) -> list[Row]:
    """All rows; with `brief` in about 90 seconds."""
    count, turns, batches, samples = (2, 1, 1, 10_000) if quick else (64, 6, 12, 10**6)
    if brief:
        turns = 4
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = rows_of_images(Path(folder), count, turns)
        loaded = Path(folder) / "loaded"
        make_photographs(loaded, 500, 375, max(count * 2, BATCH))
        result += rows_of_loaders(loaded, batches, max(1, turns - 2))
        result += rows_of_epochs(loaded, 2 if quick else 5)
    return result + rows_of_memory(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it works: few images")
    parser.add_argument("--brief", action="store_true", help="fewer repetitions, as for `make bench`")
    parser.add_argument("--output", type=Path, help="also write the rows to this JSON file")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    measured = rows(arguments.quick, arguments.brief)
    show(measured)
    if arguments.output:
        arguments.output.write_text(json.dumps([row.__dict__ for row in measured], indent=2) + "\n")


if __name__ == "__main__":
    main()
