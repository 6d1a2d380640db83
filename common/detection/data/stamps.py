"""Stamps of files: their sizes and times, which tell whether a file has changed since it was read."""

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

_COARSEST = 2.0  # seconds: resolution of a file system's clock (FAT); a change within it would not be seen
_FAR = 100e-6  # seconds per file from which a file system counts as slow


class Stamps:
    """Files and folders with their sizes and times, which change whenever their content does."""

    def __init__(self):
        self.groups: list[tuple[str, pa.LargeBinaryArray, np.ndarray]] = []  # folder, paths below it, int64[n, 3]
        self.settled = True  # whether all had been unchanged for long enough that any later change will be seen

    def take(self, folder: str, paths: pa.LargeBinaryArray) -> None:
        """Add `paths` below `folder`. To be called before they are read, so that a change meanwhile is seen, too."""
        stamps, now = stamps_of(folder, paths), time.time_ns()
        self.groups.append((folder, paths, stamps))
        self.settled &= bool((stamps[:, 2] <= now - int(1e9 * _COARSEST)).all())

    def take_files(self, files: Iterable[str | Path]) -> None:
        """As `take`, for absolute paths of files or folders. A folder's stamp changes with the names in it."""
        self.take("/", pa.array([os.fsencode(file) for file in files], pa.large_binary()))

    def hold(self) -> bool:
        """True if nothing has changed."""
        return all(np.array_equal(stamps_of(folder, paths), stamps) for folder, paths, stamps in self.groups)


def stamps_of(folder: str, paths: pa.LargeBinaryArray) -> np.ndarray:
    """int64[n, 3]: size in bytes, mtime and ctime in ns; zeros for a missing file.

    A program can't set the ctime, so a copy that keeps the mtime is seen as a change. Takes 2 µs
    per file. If the first files are slow, as on a network file system, threads ask for the others;
    on a fast one threads would take longer.
    """
    above, first = os.path.join(os.fsencode(folder), b""), min(256, len(paths))

    def look(start: int, stop: int) -> np.ndarray:
        part = paths[start:stop].to_pylist()
        return np.array([_stamp(path if path[:1] == b"/" else above + path) for path in part], np.int64).reshape(-1, 3)

    began = time.perf_counter()
    found = [look(0, first)]
    is_far = time.perf_counter() - began > _FAR * first
    starts = range(first, len(paths), 4096)
    stops = (min(start + 4096, len(paths)) for start in starts)
    if is_far:
        with ThreadPoolExecutor(16) as pool:
            return np.concatenate(found + list(pool.map(look, starts, stops)))
    return np.concatenate(found + list(map(look, starts, stops)))


def _stamp(path: bytes) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # no file has a NUL in its name
        return 0, 0, 0
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns
