"""Measures how fast photographs become training batches, compared with other libraries on the same files.

    python benchmarks/input_pipeline.py [--quick] [--turns N]

JPEGs of 500 x 375 pixels and of 12 megapixels are cropped to 224 pixels (crop_scale 0.08, flipped
half the time). Measured are:

- CPU time of one image on one core, from the file to uint8. Peers: timm's train pipeline as it
  comes (with colour jitter, which ours leaves to the device) and without jitter, and SPDL with
  FFmpeg, which decodes to the same reduced size. Also from `--cache`.
- Images per second of each library's own loader with one worker, which is a thread in SPDL.

Images with boxes, JPEGs of 640 x 480, are resized and flipped; the peer is torchvision's pipeline
for detection. Images with masks (PNGs) are scaled by 0.5 to 2, cropped to 512 pixels, flipped and
distorted; the peer does that with torchvision's transforms v2, and CPU time on one core is compared.
All take turns in one run; a ratio is the median of the ratios of turns.
"""

import gc
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import timm.data
import torch
from peers import build_mask_reader, collate_boxes, open_boxes, open_long_folder, timm_loader
from photographs import NUM_MASK_CLASSES, write_boxes, write_classes, write_masks
from PIL import Image
from table import Row, compare, run_script, take_turns
from torch.utils.data import DataLoader

from common.classification import TrainDataset, sources
from common.classification.transforms import TrainingTransform, draw_crop
from common.data.batch_plan import BatchPlan
from common.data.cache import open_cache
from common.data.decoding import Picture
from common.data.loader import create_train_loader
from common.data.stream import Stream
from common.detection import BoxAugmentation
from common.detection import TrainDataset as BoxDataset
from common.detection.data import sources as box_sources
from common.randomness import seed_generators
from common.segmentation import CropAugmentation
from common.segmentation.masks import read_mask
from common.segmentation.source import Pair

try:
    import spdl.dataloader
    import spdl.io

    spdl.io.demux_config()  # needs FFmpeg
except (ImportError, RuntimeError):
    spdl = None
    print("no rows of SPDL: pip install spdl, and apt-get install ffmpeg", file=sys.stderr)

SIZE = 224
CONFIG = SimpleNamespace(crop_scale=0.08, hflip=0.5, vflip=0.0, augment="")
DATA = {
    "input_size": (3, SIZE, SIZE),
    "interpolation": "bilinear",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229,) * 3,
}
CACHE = 336
MASK_CROP = 512
MASK_SCALES = (0.5, 2.0)
BOX_BATCH_SIZE = 8


# ---- an image on one core


def build_our_reader(cache=None) -> Callable[[str], torch.Tensor]:
    """As in a data worker, which seeds its generators for each image."""
    transform = TrainingTransform(CONFIG, DATA)
    indices: dict[str, int] = {}

    def read(path: str) -> torch.Tensor:
        seed_generators(hash(path) + len(indices))
        if cache is None:
            return transform(Picture(path))
        index = indices.setdefault(path, len(indices))
        return transform(cache.get(index, lambda: Picture(path)))

    return read


def build_timm_reader(color_jitter: float | None) -> Callable[[str], torch.Tensor]:
    transform = timm.data.create_transform(
        SIZE, is_training=True, use_prefetcher=True, color_jitter=color_jitter
    )
    return lambda path: transform(Image.open(path).convert("RGB"))


def decode_with_spdl(path: str):
    """SPDL's frames: FFmpeg decodes to the smallest size of twice the crop's pixels, as ours, then
    crops, flips and resizes.
    """
    packets = spdl.io.demux_image(path)
    top, left, height, width = draw_crop(
        packets.codec.height, packets.codec.width, CONFIG.crop_scale
    )
    halvings = min(3, max(0, int(math.log2(min(height, width) / (2 * SIZE)))))
    filters = f"crop={width >> halvings}:{height >> halvings}:{left >> halvings}:{top >> halvings}"
    if random.random() < CONFIG.hflip:
        filters += ",hflip"
    filters += f",scale={SIZE}:{SIZE}:flags=bilinear,format=pix_fmts=rgb24"
    decode_config = spdl.io.decode_config(decoder_options={"lowres": str(halvings), "threads": "1"})
    return spdl.io.decode_packets(packets, decode_config=decode_config, filter_desc=filters)


def collate_with_spdl(frames: list) -> torch.Tensor:
    return spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2)


def measure_cpu(read: Callable[[Any], object], paths: Sequence[Any]) -> float:
    """CPU milliseconds per image."""
    start = time.process_time()
    for path in paths:
        read(path)
    return 1e3 * (time.process_time() - start) / len(paths)


def measure_images(folder: Path, turns: int, goal: float) -> list[Row]:
    paths = [str(path) for path in sorted(folder.rglob("*.jpg"))]
    readers = {
        "timm, as it comes": build_timm_reader(0.4),
        "timm without jitter": build_timm_reader(None),
        "ours from JPEG": build_our_reader(),
        "cache": build_our_reader(open_cache(len(paths), CACHE, "")),
    }
    if spdl:
        readers["SPDL"] = lambda path: collate_with_spdl([decode_with_spdl(path)])
    ways = {name: partial(measure_cpu, read, paths) for name, read in readers.items()}
    take_turns(ways, 1)  # also fills the cache
    times = take_turns(ways, turns)
    rows = [
        compare(
            f"CPU of a cached image, {folder.name}",
            "ms",
            times,
            "ours from JPEG",
            "cache",
            goal=5.0,
        )
    ]
    for peer in [name for name in readers if name.startswith(("timm", "SPDL"))]:
        peer_goal = goal if peer == "timm, as it comes" else None
        rows.append(
            compare(
                f"CPU of an image, {folder.name}", "ms", times, peer, "ours from JPEG", peer_goal
            )
        )
    return rows


def build_our_mask_reader() -> Callable[[Path], object]:
    augmentation = CropAugmentation(
        seed=0,
        crop_size=MASK_CROP,
        short_side=0,
        min_scale=MASK_SCALES[0],
        max_scale=MASK_SCALES[1],
        hflip=0.5,
        photometric=0.5,
    )
    positions = itertools.count()

    def read(path: Path) -> object:
        mask = read_mask(str(path.with_suffix(".png")), NUM_MASK_CLASSES, ignore_zero=False)
        return augmentation(Pair(Picture(str(path)), mask), next(positions))

    return read


def measure_masks(folder: Path, width: int, height: int, num_images: int, turns: int) -> Row:
    paths = write_masks(folder, width, height, num_images)
    sides = [round(scale * min(width, height)) for scale in MASK_SCALES]
    readers = {
        "torchvision": build_mask_reader(sides[0], sides[1], MASK_CROP),
        "ours": build_our_mask_reader(),
    }
    ways = {name: partial(measure_cpu, read, paths) for name, read in readers.items()}
    take_turns(ways, 1)
    times = take_turns(ways, turns)
    name = f"CPU of an image and its mask, {width} x {height}"
    return compare(name, "ms", times, "torchvision")


# ---- loaders with one worker


def normalize(images: torch.Tensor) -> torch.Tensor:
    """As timm's loader does; our recipe does that on the device."""
    mean, std = (255 * torch.tensor(DATA[key])[:, None, None] for key in ("mean", "std"))
    return images.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std)


def load_with_ours(samples: TrainDataset | BoxDataset, batch_size: int) -> DataLoader:
    return create_train_loader(
        samples, BatchPlan(batch_size, 1, batch_size), 0, 10**9, num_workers=1
    )


def our_loader(folder: Path, batch_size: int) -> Iterator:
    source, _ = sources.load(sources.Spec(str(folder), seed=0, val_share=0.25))
    samples = TrainDataset(
        source, Stream(len(source), batch_size, 0), TrainingTransform(CONFIG, DATA), 0
    )
    for batch in load_with_ours(samples, batch_size):
        yield normalize(batch.images)


def spdl_loader(folder: Path, batch_size: int) -> Iterator:
    paths = [path for path, _ in open_long_folder(folder).samples]
    loader = spdl.dataloader.DataLoader(
        random.sample(paths, len(paths)),
        preprocessor=decode_with_spdl,
        batch_size=batch_size,
        aggregator=collate_with_spdl,
        num_threads=1,
    )
    for images in loader:
        yield normalize(images)


def our_box_loader(folder: Path, short_side: int) -> DataLoader:
    source, _ = box_sources.load(box_sources.Spec(str(folder), seed=0, val_share=0.2))
    stream = Stream(len(source), BOX_BATCH_SIZE, seed=0)
    augmentation = BoxAugmentation(0, (short_side,), 1333, hflip=0.5)
    samples = BoxDataset(source, stream, augmentation, stride=32, fill=(124, 116, 104), seed=0)
    return load_with_ours(samples, BOX_BATCH_SIZE)


def torchvision_box_loader(folder: Path, short_side: int) -> DataLoader:
    images = open_boxes(folder, "train", short_side)
    endless = itertools.cycle(range(len(images)))
    return DataLoader(
        images, BOX_BATCH_SIZE, sampler=endless, num_workers=1, collate_fn=collate_boxes
    )


def measure_speed(build: Callable[[], Iterable], batch_size: int, batches: int) -> float:
    """Images per second."""
    gc.collect()  # the loader before
    loader = iter(build())
    for _ in range(5):  # skip what the worker had prefetched
        next(loader)
    start = time.perf_counter()
    for _ in range(batches):
        next(loader)
    return batch_size * batches / (time.perf_counter() - start)


def measure_loaders(
    name: str,
    loaders: dict[str, Callable[[], Iterable]],
    batch_size: int,
    turns: int,
    goal: float | None = None,
) -> list[Row]:
    """Compares the first loader with the others."""
    ways = {
        title: partial(measure_speed, build, batch_size, batches=12)
        for title, build in loaders.items()
    }
    speeds = take_turns(ways, turns)
    ours, *peers = loaders
    return [compare(f"loader, {name}", "images/s", speeds, peer, ours, goal=goal) for peer in peers]


def measure(turns: int, _: bool) -> list[Row]:
    """All rows; two turns take about three minutes."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for width, height, batch_size, goal in ((500, 375, 32, 1.7), (4000, 3000, 8, 4.0)):
            folder = Path(scratch) / f"{width} x {height}"
            write_classes(folder, width, height, 4 * batch_size)
            rows += measure_images(folder, turns, goal)
            timm_peer = partial(
                timm_loader, folder, SIZE, batch_size, workers=1, device=torch.device("cpu")
            )
            loaders = {
                "ours": partial(our_loader, folder, batch_size),
                "timm, as it comes": timm_peer,
            }
            if spdl:
                loaders["SPDL"] = partial(spdl_loader, folder, batch_size)
            rows += measure_loaders(folder.name, loaders, batch_size, turns)
        folder = Path(scratch) / "boxes"
        for split, num_images, seed in (("train", 64, 0), ("val", 2, 1)):
            write_boxes(folder, split, 640, 480, num_images, seed)
        for short_side in (480, 800):
            loaders = {
                "ours": partial(our_box_loader, folder, short_side),
                "torchvision": partial(torchvision_box_loader, folder, short_side),
            }
            name = f"boxes, short side {short_side}"
            rows += measure_loaders(name, loaders, BOX_BATCH_SIZE, turns, goal=2.5)
        masks = Path(scratch) / "masks"
        for width, height, num_images in ((500, 375, 32), (2048, 1024, 16)):
            folder = masks / f"{width} x {height}"
            rows.append(measure_masks(folder, width, height, num_images, turns))
    return rows


if __name__ == "__main__":
    run_script(__doc__, measure)
