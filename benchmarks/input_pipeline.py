"""Measures how fast photographs become training batches, compared with other libraries on the same files.

    python benchmarks/input_pipeline.py [--quick] [--brief] [--output FILE]

JPEGs of 500 x 375 pixels and of 12 megapixels, made of scikit-learn's two photographs, are cropped to 224 pixels (crop_scale
0.08, mirrored half the time). Measured are:

- CPU time of one image on one core, from the file to uint8 or to what the peer ends in. Peers: timm's train pipeline as it
  comes (with colour jitter, which ours leaves to the device) and without jitter, and torchvision's usual transforms. The bound
  is a plain decode, crop and resize. Also from `--cache`.
- Images per second of each library's own loader, with the cores of the machine.

All take turns in one run; a ratio is the median of the ratios of turns.
"""

import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import timm.data
import torch
import torch.nn.functional as F
from PIL import Image
from simplejpeg import decode_jpeg
from sklearn.datasets import load_sample_images
from table import Row, compare, script, take_turns
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from common.classification import sources
from common.classification.batches import TrainDataset
from common.classification.transforms import TrainingTransform, crop
from common.data.batch_plan import BatchPlan
from common.data.cache import open_cache
from common.data.decoding import Picture
from common.data.loader import training_loader, worker_count
from common.data.stream import Stream
from common.randomness import seed_generators

SIZE, BATCH = 224, 32
CONFIG = SimpleNamespace(crop_scale=0.08, hflip=0.5, vflip=0.0, augment="")
DATA = {"input_size": (3, SIZE, SIZE), "interpolation": "bilinear", "mean": (0.485, 0.456, 0.406), "std": (0.229,) * 3}
CACHE = 336
FROM_JPEG = "ours from JPEG"


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
    vary = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    end = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(DATA["mean"], DATA["std"])]
    return v2.Compose([*vary, *end])


def torchvision_image() -> Callable[[str], object]:
    transform = torchvision_transform()
    return lambda path: transform(Image.open(path).convert("RGB"))


def our_image(cache=None) -> Callable[[str], object]:
    """As in a data worker, which seeds its generators for each image."""
    transform, places = TrainingTransform(CONFIG, DATA), {}

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


def cpu_of_image(way: Callable[[str], object], paths: list[str]) -> float:
    """CPU milliseconds per image."""
    began = time.process_time()
    for path in paths:
        way(path)
    return 1e3 * (time.process_time() - began) / len(paths)


def rows_of_images(folder: Path, count: int, turns: int) -> list[Row]:
    rows = []
    for name, width, height, goal, share in (("500 x 375", 500, 375, 1.7, 1), ("4000 x 3000", 4000, 3000, 4.0, 16)):
        make_photographs(folder / name, width, height, max(2, count // share))
        paths = [str(path) for path in sorted((folder / name).rglob("*.jpg"))]
        cache = open_cache(len(paths), CACHE, "")
        ways = {
            FROM_JPEG: our_image(),
            "from the cache": our_image(cache),
            "timm, as it comes": timm_image(0.4),
            "timm without jitter": timm_image(None),
            "torchvision": torchvision_image(),
            "limit": bare_image,
        }
        for way in ways.values():
            cpu_of_image(way, paths)  # also fills the cache
        times = take_turns({name: partial(cpu_of_image, way, paths) for name, way in ways.items()}, turns)
        limit, what = statistics.median(times["limit"]) if width < 1000 else None, f"CPU of an image, {name}"
        for way, of_way in (("timm, as it comes", goal), ("timm without jitter", None), ("torchvision", None)):
            rows.append(compare(what, "ms", times, way, FROM_JPEG, limit=limit, goal=of_way))
        rows.append(compare(f"CPU of a cached image, {name}", "ms", times, FROM_JPEG, "from the cache", goal=5.0))
    return rows


# ---- loaders


def our_samples(folder: Path) -> TrainDataset:
    train, _ = sources.load(sources.Spec(str(folder), seed=0, val_share=0.05))
    return TrainDataset(train, Stream(len(train), BATCH, 0), TrainingTransform(CONFIG, DATA), 0)


def our_loader(folder: Path, workers: int) -> Iterator:
    """Ours, normalised like the others; the recipe does that on the device."""
    mean, std = (255 * torch.tensor(DATA[key])[:, None, None] for key in ("mean", "std"))
    for batch in training_loader(our_samples(folder), BatchPlan(BATCH, 1, BATCH), 0, 10**9, workers):
        yield batch.images.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std), batch.labels


def epochs(loader: DataLoader) -> Iterator:
    """Epoch after epoch, as in a usual training script."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


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
    return epochs(loader)


def torchvision_loader(folder: Path, workers: int) -> Iterator:
    dataset = ImageFolder(folder, torchvision_transform())
    return epochs(DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, drop_last=True))


def rows_of_loaders(folder: Path, batches: int, turns: int) -> list[Row]:
    workers = max(1, worker_count(-1))

    def speed(make: Callable[[Path, int], Iterator]) -> float:
        gc.collect()  # the loader before
        loader = make(folder, workers)
        for _ in range(4 * workers + 1):  # skip what the workers had prefetched
            next(loader)
        began = time.perf_counter()
        for _ in range(batches):
            next(loader)
        return BATCH * batches / (time.perf_counter() - began)

    makers = {"ours": our_loader, "timm, as it comes": timm_loader, "torchvision": torchvision_loader}
    speeds = take_turns({name: partial(speed, make) for name, make in makers.items()}, turns)
    what = f"loader, {workers} worker{'s' * (workers > 1)}"
    return [compare(what, "images/s", speeds, peer) for peer in list(makers)[1:]]


def measure(quick: bool, brief: bool) -> tuple[list[Row], None]:
    """All rows; with `brief` in about 90 seconds."""
    count, turns, batches = (2, 1, 1) if quick else (64, 4 if brief else 6, 12)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of_images(Path(folder), count, turns)
        loaded = Path(folder) / "loaded"
        make_photographs(loaded, 500, 375, max(count * 2, BATCH))
        rows += rows_of_loaders(loaded, batches, max(1, turns - 2))
    return rows, None


if __name__ == "__main__":
    script(__doc__, measure)
