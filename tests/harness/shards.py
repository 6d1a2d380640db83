"""Shards that tests write: the images of class folders as WebDataset's tars, and as Parquet."""

import io
import itertools
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

COUNTS = (1, 17, 331)  # samples of each shard


def draw_noise(folder: Path, counts: Sequence[int], side: int = 32, seed: int = 0) -> Path:
    """A folder per class with that many PNGs: noise in the class's own brightness."""
    for label, count in enumerate(counts):
        class_folder = folder / f"class {label}"
        class_folder.mkdir(parents=True)
        for number in range(count):
            generator = np.random.default_rng([label, number, seed])
            pixels = generator.integers(60 * label, 60 * label + 60, (side, side, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(class_folder / f"{number:04}.png")
    return folder


def list_class_images(folder: Path) -> list[Path]:
    """The images of class folders, in the order in which `folder` itself is read."""
    return sorted(
        folder.glob("*/*.png"), key=lambda file: (file.parent.name, os.fsencode(file.name))
    )


def split_images(folder: Path, counts: Sequence[int]) -> list[list[Path]]:
    """The images of each shard; the last has all that are left."""
    files = iter(list_class_images(folder))
    shards = [list(itertools.islice(files, count)) for count in counts[:-1]]
    return shards + [list(files)]


def add(tar: tarfile.TarFile, name: str, content: bytes, **facts: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for fact, value in facts.items():
        setattr(info, fact, value)
    tar.addfile(info, io.BytesIO(content) if info.isreg() else None)


def write_tars(folder: Path, to: Path, part: str, counts: Sequence[int] = COUNTS) -> None:
    """`to/part-000.tar` and so on: of each sample its image, and its class in a `.cls`."""
    to.mkdir(exist_ok=True)
    for number, files in enumerate(split_images(folder, counts)):
        with tarfile.open(to / f"{part}-{number:03}.tar", "w") as tar:
            for file in files:
                name = str(file.relative_to(folder))
                add(tar, name, file.read_bytes())
                add(tar, f"{name.removesuffix('.png')}.cls", file.parent.name.encode())


def write_parquet(
    folder: Path, to: Path, part: str, counts: Sequence[int] = COUNTS, rows: int = 5
) -> None:
    """`to/part-000.parquet` and so on, in row groups of `rows` samples."""
    to.mkdir(exist_ok=True)
    for number, files in enumerate(split_images(folder, counts)):
        images = pa.array([file.read_bytes() for file in files])
        table = pa.table({"image": images, "label": [file.parent.name for file in files]})
        pq.write_table(table, to / f"{part}-{number:03}.parquet", row_group_size=rows)
