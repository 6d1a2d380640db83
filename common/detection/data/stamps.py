"""Stamps of files: their sizes and times, which tell whether a file has changed since it was read."""

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

_COARSEST = 2.0  # seconds that the clock of a file system may stand still (FAT): a change within them would not show
_FAR = 100e-6  # seconds for a file


class Stamps:
    """Files and folders with what their system says of each, which changes whenever their content does."""

    def __init__(self):
        self.groups: list[tuple[str, pa.LargeBinaryArray, np.ndarray]] = []  # folder, paths below it, int64[n, 3]
        self.settled = True  # whether all had been left alone for long enough that any later change will show

    def take(self, folder: str, paths: pa.LargeBinaryArray) -> None:
        """Note how `paths` below `folder` look. To be called before they are read: a change meanwhile then shows, too."""
        stamps, now = stamps_of(folder, paths), time.time_ns()
        self.groups.append((folder, paths, stamps))
        self.settled &= bool((stamps[:, 2] <= now - int(1e9 * _COARSEST)).all())

    def take_files(self, files: Iterable[str | Path]) -> None:
        """The same for files or folders with whole paths; of a folder the names in it are noted."""
        self.take("/", pa.array([os.fsencode(file) for file in files], pa.large_binary()))

    def hold(self) -> bool:
        """Whether everything still looks as it did."""
        return all(np.array_equal(stamps_of(folder, paths), stamps) for folder, paths, stamps in self.groups)


def stamps_of(folder: str, paths: pa.LargeBinaryArray) -> np.ndarray:
    """int64[n, 3]: size in bytes, and when the content and when the file was last changed in ns; zeros where nothing is.

    The second time can't be set by a program, so a copy that keeps the first one shows as well. 2 µs a file; where the first
    ones answer late, as on a network file system, the others are asked for several at once, which would cost a near one more.
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
