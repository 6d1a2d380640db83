"""Caches of decoded images: a JPEG is decoded once, not in every epoch or evaluation.

Of training images, all processes and data workers of a machine share one file without a name, in
memory or in a folder, which the system frees with the last of them. A slot is filled when its image
is first read; the first epoch sees the same pixels as later ones.

Of evaluated images, a data worker keeps those that it has decoded; the loader gives it the same
batches each time. The caches of all workers and ranks of a machine take a small share of its memory
together; images beyond that are decoded each time.
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
_RECORD = np.dtype([("height", "<u4"), ("width", "<u4")])  # 0: not there yet


@dataclass
class Cache:
    """`count` images of any shape; larger ones than `side` x `side` pixels are scaled down to that area."""

    count: int
    side: int
    folder: str  # empty: memory
    _file: "SharedFile" = field(repr=False)

    def __str__(self) -> str:
        """One line for people."""
        limit = _in_words(needed(self.count, self.side))
        return (
            f"images of at most {self.side} x {self.side} pixels in {self.folder or 'memory'}, up "
            f"to {limit}"
        )

    def picture(self, index: int, read: Callable[[], Picture]) -> Picture:
        """The image at `index` as the cache keeps it: from its slot, or if that is not complete
        from `read`.
        """
        record = np.frombuffer(
            os.pread(self._file.fileno(), _RECORD.itemsize, index * _RECORD.itemsize), _RECORD
        )
        if len(record) and record["height"][0]:
            rows = np.empty((*record[0].tolist(), 3), np.uint8)
            if os.preadv(self._file.fileno(), [rows.data], self._place(index)) != rows.nbytes:
                raise OSError(f"the cache of decoded images, {self}, can't be read any more")
            return Picture(torch.from_numpy(rows).permute(2, 0, 1))
        picture = read()
        height, width = shrunk(picture.height, picture.width, self.side)
        pixels = picture.crop_and_resize(
            0, 0, picture.height, picture.width, (height, width), "bicubic"
        )
        rows = pixels.permute(1, 2, 0).contiguous().numpy()  # [H, W, 3]
        with suppress(OSError):  # the disk has filled up since: the image is then decoded each time
            if os.pwrite(self._file.fileno(), rows.data, self._place(index)) == rows.nbytes:
                # Only now the record, which says that the pixels are complete.
                os.pwrite(
                    self._file.fileno(),
                    np.array([height, width], "<u4").tobytes(),
                    index * _RECORD.itemsize,
                )
        return Picture(pixels)

    def _place(self, index: int) -> int:
        return self.count * _RECORD.itemsize + index * 3 * self.side**2


def shrunk(height: int, width: int, side: int) -> tuple[int, int]:
    """Height and width of the same shape with at most side x side pixels."""
    scale = side / (height * width) ** 0.5
    if scale >= 1:
        return height, width
    height, width = max(1, int(height * scale)), max(1, int(width * scale))
    return min(height, side**2), min(width, side**2)  # for a stripe, whose short side is one pixel


def needed(count: int, side: int) -> int:
    """Bytes for `count` images."""
    return count * (3 * side**2 + _RECORD.itemsize)


def open_cache(count: int, side: int, folder: str) -> Cache | None:
    """One cache per machine for `count` images; None for side 0. A collective. Raises `Refused` if
    they do not fit.
    """
    if not side:
        if folder:
            raise Refused(
                f"--cache_folder {folder}: nothing is kept there without --cache, such as --cache "
                "336"
            )
        return None
    return Cache(
        count,
        side,
        folder,
        shared_file("the cache of decoded images", lambda: _make(count, side, folder)),
    )


class SharedFile:
    """A file without a name, which other processes of the machine open by a path. It can be pickled."""

    def __init__(self, path: str, file: BinaryIO | None = None):
        self.path, self.file = path, file or open(path, "r+b", buffering=0)

    def __reduce__(self) -> tuple:
        return SharedFile, (self.path,)

    def fileno(self) -> int:
        return self.file.fileno()


def shared_file(what: str, make: Callable[[], BinaryIO]) -> SharedFile:
    """One file per machine. A collective."""
    with all_or_none(f"making {what}"):
        file = make() if is_local_main() else None
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}" if file else ""
    path = next(
        path for node, path in gather_objects((node_rank(), path)) if node == node_rank() and path
    )
    with all_or_none(f"opening {what}"):
        if not file:
            with suppress(OSError):
                return SharedFile(path)
            file = make()  # a system without /proc has one file per process
    return SharedFile(path, file)


def _make(count: int, side: int, folder: str) -> BinaryIO:
    where = folder or "memory"
    try:
        free = psutil.disk_usage(folder).free if folder else get_available_memory()
        if needed(count, side) > free:
            sizes = (
                f"take up to {_in_words(needed(count, side))}, and {where} has {_in_words(free)} "
                "left"
            )
            advice = (
                "take a smaller --cache"
                + ", or a file on a disk with room: --cache_folder" * (not folder)
            )
            raise Refused(f"--cache {side}: {count:,} images {sizes}; {advice}")
        return unnamed_file(folder)
    except OSError as error:
        raise Refused(
            f"--cache_folder {Path(where)}: {error.strerror}; name a folder to write to"
        ) from None


def unnamed_file(folder: str = "") -> BinaryIO:
    """A file that the system frees with the last process that has it open: in memory, or in `folder`."""
    if folder or sys.platform != "linux":
        return tempfile.TemporaryFile(dir=folder or None, buffering=0)
    return open(os.memfd_create("images"), "r+b", buffering=0)


def _in_words(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


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
            self._keep(index, image)
        return image

    def _keep(self, index: int, image: torch.Tensor) -> None:
        if self._free_bytes is None:
            worker = get_worker_info()
            num_processes = self._num_ranks * (worker.num_workers if worker else 1)
            self._free_bytes = int(EVAL_MEMORY_SHARE * get_available_memory() / num_processes)
        if image.nbytes <= self._free_bytes:
            self._free_bytes -= image.nbytes
            self._images[index] = image.clone()  # not a view of something larger
