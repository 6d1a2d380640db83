"""Blocks of samples from URLs, shared by the processes and data workers of a machine.

The first process that needs a block reads it; the least recently used one gives way. All blocks lie
in one file in memory without a name, which the system frees with the last process.
"""

import fcntl
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import BinaryIO

import numpy as np

from common.data.cache import SharedFile, open_shared_file, open_unnamed_file
from common.errors import Refused

IN_FLIGHT = 8  # requests of a process at a time
_MAX_REQUEST = 2**25  # bytes of blocks that are asked for at once
_BOUNDS_BYTES = 16  # of the two numbers that say where a sample begins and ends
# Block + 1, or 0 for none; a time in ns.
_SLOT = np.dtype([("block", "<i8"), ("ready", "<i8"), ("used", "<i8")])
_WAIT_S = 0.002  # seconds until a block that another process reads is looked for again

# Blocks -> the samples of each, as bytes. Raises `Refused`
Fetch = Callable[[list[int]], list[list]]


@dataclass
class BlockCache:
    """Room for `slots` blocks of at most `room` bytes."""

    slots: int
    room: int
    file: SharedFile

    def __post_init__(self) -> None:
        self._table = np.asarray(np.memmap(self.file.file, _SLOT, "r+", shape=self.slots))
        self._owner = 0

    def __reduce__(self) -> tuple:
        return BlockCache, (self.slots, self.room, self.file)

    def sample(self, block: int, number: int, fetch: Fetch) -> bytes:
        """A sample of a block: from its slot, or first from `fetch`, whose errors are raised."""
        while True:
            with self._lock_table():
                slot = int((self._table["block"] == block + 1).argmax())
                slot_block, is_ready, _ = self._table[slot].tolist()
                has_slot = slot_block == block + 1
                if has_slot and is_ready:
                    self._table["used"][slot] = time.monotonic_ns()
                    return self._read_sample(slot, number)
            if has_slot or block in self._requested or not self._fill([block], fetch):
                time.sleep(_WAIT_S)

    def prefetch(self, shards: Mapping[int, int], fetch: Fetch) -> None:
        """Begin to read missing blocks, several of a shard at once. `shards`: block -> its shard,
        in ascending order.
        """
        self._renew_after_fork()
        present = self._requested | set((self._table["block"] - 1).tolist())
        missing = [block for block in shards if block not in present]
        max_blocks = max(1, min(math.ceil(len(missing) / IN_FLIGHT), _MAX_REQUEST // self.room))
        self._requested.update(missing)
        for _, group in groupby(missing, shards.__getitem__):
            blocks = list(group)
            for start in range(0, len(blocks), max_blocks):
                self._pool.submit(self._fill_quietly, blocks[start : start + max_blocks], fetch)

    def _fill_quietly(self, blocks: Sequence[int], fetch: Fetch) -> None:
        try:
            with suppress(Refused):  # raised when a sample of it is wanted
                self._fill(blocks, fetch)
        finally:
            self._requested.difference_update(blocks)

    def _fill(self, blocks: Sequence[int], fetch: Fetch) -> bool:
        """Read those blocks that no process or thread reads or has read; False if there is none, or
        no slot for one.
        """
        slots: dict[int, int] = {}  # of the blocks that are still to be read
        with self._lock_table():
            for block in blocks:
                busy = (self._table["block"] > 0) & (self._table["ready"] == 0)
                if not (self._table["block"] == block + 1).any() and not busy.all():
                    slot = int(np.where(busy, np.iinfo(np.int64).max, self._table["used"]).argmin())
                    self._table[slot] = block + 1, 0, time.monotonic_ns()
                    slots[block] = slot
        if not slots:
            return False
        missing = list(slots)
        try:
            for block, samples in zip(missing, fetch(missing), strict=True):
                self._write(slots[block], samples)
                self._table["ready"][slots.pop(block)] = 1
        except BaseException:
            self._table["block"][list(slots.values())] = 0
            raise
        return True

    def _write(self, slot: int, samples: list) -> None:
        bounds = np.zeros((len(samples), 2), "<i8")  # where each sample begins and ends
        starts: dict[int, int] = {}
        contents = []
        end = bounds.nbytes
        for number, sample in enumerate(samples):
            # Parquet has an image that it repeats as one object.
            start = starts.setdefault(id(sample), end)
            if start == end:
                contents.append(sample)
                end += len(sample)
            bounds[number] = start, start + len(sample)
        if end > self.room:
            raise Refused(
                f"a block of samples has {end:,} bytes, and its shard says at most {self.room:,}"
            )
        os.pwrite(self.file.fileno(), b"".join([bounds.tobytes()] + contents), self._offset(slot))

    def _read_sample(self, slot: int, number: int) -> bytes:
        offset = self._offset(slot)
        bounds = os.pread(self.file.fileno(), _BOUNDS_BYTES, offset + _BOUNDS_BYTES * number)
        start, end = np.frombuffer(bounds, "<i8").tolist()
        return os.pread(self.file.fileno(), end - start, offset + start)

    def _offset(self, slot: int) -> int:
        return _SLOT.itemsize * self.slots + self.room * slot

    @contextmanager
    def _lock_table(self) -> Iterator[None]:
        """No other thread or process of the machine is in such a block."""
        self._renew_after_fork()
        with self._lock:
            fcntl.lockf(self.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN)

    def _renew_after_fork(self) -> None:
        """Threads and locks of this process: a forked one has none of its parent's threads."""
        if self._owner != os.getpid():
            self._owner = os.getpid()
            self._lock = threading.Lock()
            self._requested = set[int]()
            self._pool = ThreadPoolExecutor(IN_FLIGHT, "blocks")


def open_blocks(slots: int, room: int) -> BlockCache:
    """One cache per machine. A collective."""

    def make() -> BinaryIO:
        file = open_unnamed_file()
        file.truncate(_SLOT.itemsize * slots + room * slots)
        return file

    return BlockCache(slots, room, open_shared_file("the cache of blocks", make))
