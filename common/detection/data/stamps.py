"""Stamps of files: their sizes and times, which tell whether a file has changed since it was read."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from common.data.source import encode_paths

# Seconds: resolution of a file system's clock (FAT); a change within it would not be seen.
_COARSEST = 2.0


class Stamps:
    """Files and folders with their sizes and times, which change whenever their content does."""

    def __init__(self):
        # Folder, paths below it, int64[n, 3]
        self.groups: list[tuple[str, pa.LargeBinaryArray, np.ndarray]] = []
        # True if all had been unchanged for so long that any later change will be seen.
        self.settled = True

    def take(self, folder: str, paths: pa.LargeBinaryArray) -> None:
        """Add `paths` below `folder`, before they are read: so a change meanwhile is seen, too."""
        stamps, now = stamps_of(folder, paths), time.time_ns()
        self.groups.append((folder, paths, stamps))
        self.settled &= bool((stamps[:, 2] <= now - int(1e9 * _COARSEST)).all())

    def take_files(self, files: Iterable[str | Path]) -> None:
        """The same for absolute paths. A folder's stamp changes with the names in it."""
        self.take("/", encode_paths(files))

    def hold(self) -> bool:
        """True if nothing has changed."""
        return all(
            np.array_equal(stamps_of(folder, paths), stamps)
            for folder, paths, stamps in self.groups
        )


def stamps_of(folder: str, paths: pa.LargeBinaryArray) -> np.ndarray:
    """int64[n, 3]: bytes, mtime, and ctime, which no program can set, in ns; zeros for a missing file."""
    return each_of(folder, paths, _stamp, 3)


def each_of(
    folder: str, paths: pa.LargeBinaryArray, read: Callable[[bytes], Sequence[int]], columns: int
) -> np.ndarray:
    """int64[n, columns]: `read` of each file; several at once, since a network file system is slow."""

    def part(start: int) -> np.ndarray:
        files = (
            os.path.join(os.fsencode(folder), path)
            for path in paths[start : start + 512].to_pylist()
        )
        return np.array([*map(read, files)], np.int64)

    with ThreadPoolExecutor(16) as pool:
        return np.concatenate(
            [np.zeros((0, columns), np.int64), *pool.map(part, range(0, len(paths), 512))]
        )


def _stamp(path: bytes) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # no file has a NUL in its name
        return 0, 0, 0
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns
