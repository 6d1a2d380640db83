"""Sizes and times of files, which tell whether a file has changed since it was read."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from common.data.source import encode_paths

# Seconds: resolution of a file system's clock (FAT); a change within it would not be seen.
_CLOCK_RESOLUTION = 2.0
_NUM_THREADS = 16
_CHUNK_SIZE = 512  # files that a thread reads at a time


class FileStats:
    """Files and folders with their sizes and times, which change whenever their content does."""

    def __init__(self):
        # Folder, paths below it, int64[n, 3]
        self.groups: list[tuple[str, pa.LargeBinaryArray, np.ndarray]] = []
        # True if all had been unchanged for so long that any later change will be seen.
        self.is_settled = True

    def add(self, folder: str, paths: pa.LargeBinaryArray) -> None:
        """Add `paths` below `folder`, before they are read: so a change meanwhile is seen, too."""
        stats = read_stats(folder, paths)
        newest = time.time_ns() - int(1e9 * _CLOCK_RESOLUTION)
        self.groups.append((folder, paths, stats))
        if (stats[:, 2] > newest).any():
            self.is_settled = False

    def add_files(self, files: Iterable[str | Path]) -> None:
        """Add absolute paths. The stats of a folder change with the names in it."""
        self.add("/", encode_paths(files))

    def are_current(self) -> bool:
        """True if nothing has changed."""
        for folder, paths, stats in self.groups:
            current_stats = read_stats(folder, paths)
            if not np.array_equal(current_stats, stats):
                return False
        return True


def read_stats(folder: str, paths: pa.LargeBinaryArray) -> np.ndarray:
    """int64[n, 3]: bytes, mtime, and ctime, which no program can set, in ns; zeros for a missing file."""
    return read_each(folder, paths, _read_stat, num_columns=3)


def read_each(
    folder: str,
    paths: pa.LargeBinaryArray,
    read: Callable[[bytes], Sequence[int]],
    num_columns: int,
) -> np.ndarray:
    """int64[n, num_columns]: `read` of each file; several at once, since a network file system is slow."""
    root = os.fsencode(folder)

    def read_chunk(start: int) -> np.ndarray:
        chunk = paths[start : start + _CHUNK_SIZE].to_pylist()
        return np.array([read(os.path.join(root, path)) for path in chunk], np.int64)

    if not len(paths):
        return np.zeros((0, num_columns), np.int64)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return np.concatenate(list(pool.map(read_chunk, range(0, len(paths), _CHUNK_SIZE))))


def _read_stat(path: bytes) -> tuple[int, int, int]:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):  # no file has a NUL in its name
        return 0, 0, 0
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
