"""Blocks of samples that were read from elsewhere, shared by the processes and data workers of a machine.

Whoever needs a block first reads it, the others wait for it, and the one that was used longest ago gives way. All lie in one
file in memory without a name, which the system frees with the last process.
"""

import ctypes
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any, BinaryIO

import numpy as np

from common.data.cache import shared_file, unnamed_file
from common.errors import Refused

IN_FLIGHT = 8  # blocks that a process reads at once
_SLOT = np.dtype([("block", "<i8"), ("ready", "<i8"), ("used", "<i8")])  # block + 1, or 0 for none; a time in ns
_WAIT = 0.002  # seconds until a block that another process reads is looked for again
_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # of Linux's fallocate

Fetch = Callable[[int], Sequence[bytes]]  # number of a block -> its samples. Raises `Refused`


@dataclass
class BlockCache:
    """Room for `slots` blocks of at most `room` bytes."""

    slots: int
    room: int
    path: str  # by which every process of the machine can open the file
    _file: BinaryIO = field(repr=False)

    def __post_init__(self) -> None:
        self._table = np.asarray(np.memmap(self._file, _SLOT, "r+", shape=self.slots))
        self._owner = 0

    def sample(self, block: int, number: int, fetch: Fetch) -> bytes:
        """A sample of a block: from its slot, or first from `fetch`, whose errors are raised."""
        while True:
            for slot in self._ready_slots(block):
                found = self._sample(slot, number)
                if found is not None and slot in self._ready_slots(block):  # not taken by another block meanwhile
                    self._table["used"][slot] = time.monotonic_ns()
                    return found
            if not self._fill(block, fetch):
                time.sleep(_WAIT)

    def expect(self, blocks: Iterable[int], fetch: Fetch) -> None:
        """Begin to read the blocks that are not there yet."""
        self._own()
        for block in blocks:
            if block not in self._asked and not (self._table["block"] == block + 1).any():
                self._asked.add(block)
                self._pool.submit(self._fill_quietly, block, fetch)

    def _fill_quietly(self, block: int, fetch: Fetch) -> None:
        with suppress(Refused):  # raised when a sample of it is wanted
            self._fill(block, fetch)
        self._asked.discard(block)

    def _fill(self, block: int, fetch: Fetch) -> bool:
        """Read a block into a slot; False if another process or thread does, or if all slots are being filled."""
        with self._alone():
            busy = (self._table["block"] > 0) & (self._table["ready"] == 0)
            if (self._table["block"] == block + 1).any() or busy.all():
                return False
            slot = int(np.where(busy, np.iinfo(np.int64).max, self._table["used"]).argmin())
            self._table["ready"][slot] = 0
            self._table["block"][slot], self._table["used"][slot] = block + 1, time.monotonic_ns()
        try:
            samples = fetch(block)
            ends = np.cumsum([8 * len(samples) + 8, *map(len, samples)], dtype="<i8")
            if ends[-1] > self.room:
                raise Refused(f"a block of samples has {ends[-1]:,} bytes, and its shard says at most {self.room:,}")
            with suppress(OSError, AttributeError):  # frees what a larger block has left
                at, room = ctypes.c_longlong(self._place(slot)), ctypes.c_longlong(self.room)
                ctypes.CDLL(None).fallocate(self._file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, at, room)
            os.pwrite(self._file.fileno(), b"".join([ends.tobytes(), *samples]), self._place(slot))
        except BaseException:
            self._table["block"][slot] = 0
            raise
        self._table["ready"][slot] = 1
        return True

    def _ready_slots(self, block: int) -> list[int]:
        return np.flatnonzero((self._table["block"] == block + 1) & (self._table["ready"] == 1)).tolist()

    def _sample(self, slot: int, number: int) -> bytes | None:
        """A sample in a slot; None if the slot is being written."""
        place = self._place(slot)
        ends = np.frombuffer(os.pread(self._file.fileno(), 16, place + 8 * number), "<i8").tolist()
        if len(ends) < 2 or not 0 < ends[0] <= ends[1] <= self.room:
            return None
        return os.pread(self._file.fileno(), ends[1] - ends[0], place + ends[0])

    def _place(self, slot: int) -> int:
        return _SLOT.itemsize * self.slots + self.room * slot

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process of the machine is in such a block."""
        self._own()
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _own(self) -> None:
        """Threads and locks of this process: a forked one has none of its parent's threads."""
        if self._owner != os.getpid():
            self._owner, self._lock, self._asked = os.getpid(), threading.Lock(), set[int]()
            self._pool = ThreadPoolExecutor(IN_FLIGHT, "blocks")

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name[0] != "_"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state, _file=open(state["path"], "r+b", buffering=0))  # type: ignore[misc]


def open_blocks(slots: int, room: int) -> BlockCache:
    """One cache per machine. A collective."""

    def make() -> BinaryIO:
        file = unnamed_file()
        file.truncate(_SLOT.itemsize * slots + slots * room)
        return file

    file, path = shared_file("the cache of blocks", make)
    return BlockCache(slots, room, path, file)
