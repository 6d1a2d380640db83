"""Caches of decoded images: a JPEG is decoded once, not in every epoch or evaluation.

Training images lie in one file without a name, in memory or in a folder. All processes and data
workers of a machine share it, and the system frees it with the last of them. A slot is filled when
its image is first read; the first epoch sees the same pixels as the next ones.

A data worker keeps the evaluated images that it has decoded; the loader gives it the same batches
each time. The caches of all workers and ranks of a machine together take a small share of its
memory; images beyond that are decoded each time.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
import torch
from torch.utils.data import get_worker_info

from common.data.decoding import Picture
from common.distributed.collectives import all_or_none, gather_objects, is_local_main, node_rank
from common.distributed.environment import get_available_memory
from common.errors import Refused

# Of the memory that is available when a process keeps its first evaluated image.
EVAL_MEMORY_SHARE = 0.05
_RECORD = np.dtype([("height", "<u4"), ("width", "<u4")])  # 0: the slot is empty


@dataclass
class Cache:
    """`num_images` images of any shape, of at most the area of `max_side` x `max_side` pixels.

    Larger ones are scaled down to that area.
    """

    num_images: int
    max_side: int
    folder: str  # empty: memory
    _file: "SharedFile" = field(repr=False)

    def __str__(self) -> str:
        """One line for people."""
        limit = _format_bytes(count_bytes(self.num_images, self.max_side))
        return (
            f"images of at most {self.max_side} x {self.max_side} pixels in "
            f"{self.folder or 'memory'}, up to {limit}"
        )

    def get(self, index: int, read: Callable[[], Picture]) -> Picture:
        """The image at `index` from its slot, which is first filled with `read()`, scaled down."""
        picture = self._read_slot(index)
        if picture is None:
            picture = self._fill_slot(index, read())
        return picture

    def _read_slot(self, index: int) -> Picture | None:
        """The image in the slot; None if it is not complete."""
        record = os.pread(self._file.fileno(), _RECORD.itemsize, index * _RECORD.itemsize)
        sizes = np.frombuffer(record, _RECORD)
        if not len(sizes) or not sizes["height"][0]:
            return None
        height, width = sizes[0].tolist()
        image = np.empty((height, width, 3), np.uint8)
        num_bytes = os.preadv(self._file.fileno(), [image.data], self._get_offset(index))
        if num_bytes != image.nbytes:
            raise OSError(f"the cache of decoded images, {self}, can't be read any more")
        return Picture(torch.from_numpy(image).permute(2, 0, 1))

    def _fill_slot(self, index: int, picture: Picture) -> Picture:
        """`picture`, scaled down, after it has been written into the slot."""
        size = downscale_size(picture.height, picture.width, self.max_side)
        pixels = picture.crop_and_resize(0, 0, picture.height, picture.width, size, "bicubic")
        image = pixels.permute(1, 2, 0).contiguous().numpy()  # [H, W, 3]
        with suppress(OSError):  # the disk has filled up since: the image is then decoded each time
            num_bytes = os.pwrite(self._file.fileno(), image.data, self._get_offset(index))
            if num_bytes == image.nbytes:
                # Only now the record, which says that the pixels are complete.
                record = np.array(size, "<u4").tobytes()
                os.pwrite(self._file.fileno(), record, index * _RECORD.itemsize)
        return Picture(pixels)

    def _get_offset(self, index: int) -> int:
        """The byte of the file where a slot's pixels start: records come first."""
        return self.num_images * _RECORD.itemsize + index * 3 * self.max_side**2


def downscale_size(height: int, width: int, max_side: int) -> tuple[int, int]:
    """Height and width of the same shape with at most max_side x max_side pixels."""
    scale = max_side / (height * width) ** 0.5
    if scale >= 1:
        return height, width
    height = max(1, int(height * scale))
    width = max(1, int(width * scale))
    # The short side of a stripe is one pixel.
    return min(height, max_side**2), min(width, max_side**2)


def count_bytes(num_images: int, max_side: int) -> int:
    """Bytes of a cache of `num_images` images."""
    return num_images * (3 * max_side**2 + _RECORD.itemsize)


def open_cache(num_images: int, max_side: int, folder: str) -> Cache | None:
    """One cache per machine for `num_images` images; None for a `max_side` of 0. A collective.

    Raises `Refused` if they do not fit.
    """
    if not max_side:
        if folder:
            raise Refused(
                f"--cache_folder {folder}: nothing is kept there without --cache, such as --cache "
                "336"
            )
        return None
    file = open_shared_file(
        "the cache of decoded images", lambda: _create_file(num_images, max_side, folder)
    )
    return Cache(num_images, max_side, folder, file)


class SharedFile:
    """A file without a name, which other processes of the machine open by a path. It can be pickled."""

    def __init__(self, path: str, file: BinaryIO | None = None):
        self.path = path
        self.file = open(path, "r+b", buffering=0) if file is None else file

    def __reduce__(self) -> tuple:
        return SharedFile, (self.path,)

    def fileno(self) -> int:
        return self.file.fileno()


def open_shared_file(what: str, create: Callable[[], BinaryIO]) -> SharedFile:
    """One file per machine, which one of its processes has created. A collective."""
    with all_or_none(f"making {what}"):
        file = create() if is_local_main() else None
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}" if file else ""
    path_by_node = {node: path for node, path in gather_objects((node_rank(), path)) if path}
    path = path_by_node[node_rank()]
    with all_or_none(f"opening {what}"):
        if not file:
            with suppress(OSError):
                return SharedFile(path)
            file = create()  # a system without /proc has one file per process
    return SharedFile(path, file)


def _create_file(num_images: int, max_side: int, folder: str) -> BinaryIO:
    try:
        num_free = psutil.disk_usage(folder).free if folder else get_available_memory()
        num_bytes = count_bytes(num_images, max_side)
        if num_bytes > num_free:
            problem = (
                f"{num_images:,} images take up to {_format_bytes(num_bytes)}, and "
                f"{folder or 'memory'} has {_format_bytes(num_free)} left"
            )
            advice = "take a smaller --cache"
            if not folder:
                advice += ", or a file on a disk with room: --cache_folder"
            raise Refused(f"--cache {max_side}: {problem}; {advice}")
        return open_unnamed_file(folder)
    except OSError as error:
        raise Refused(
            f"--cache_folder {Path(folder or 'memory')}: {error.strerror}; name a folder to write to"
        ) from None


def open_unnamed_file(folder: str = "") -> BinaryIO:
    """A file that the system frees with the last process that has it open: in memory, or in `folder`."""
    if folder:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    if sys.platform != "linux":
        return tempfile.TemporaryFile(buffering=0)
    return open(os.memfd_create("images"), "r+b", buffering=0)


def _format_bytes(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


# ---- evaluated images


class EvalCache:
    """Decoded images by index, of this process alone; `num_ranks` ranks of the machine have such caches."""

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._images: dict[int, torch.Tensor] = {}
        self._free_bytes: int | None = None  # None until the first image

    def get(self, index: int, decode: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The image uint8[3, H, W] at `index`, by `decode` the first time. It must not be written to."""
        image = self._images.get(index)
        if image is None:
            image = decode()
            self._save(index, image)
        return image

    def _save(self, index: int, image: torch.Tensor) -> None:
        if self._free_bytes is None:
            worker = get_worker_info()
            num_workers = worker.num_workers if worker else 1
            num_processes = self._num_ranks * num_workers
            self._free_bytes = int(EVAL_MEMORY_SHARE * get_available_memory() / num_processes)
        if image.nbytes <= self._free_bytes:
            self._free_bytes -= image.nbytes
            self._images[index] = image.clone()  # not a view of something larger
