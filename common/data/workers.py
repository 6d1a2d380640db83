"""Data workers: their start, their end with their process at the latest, and the handover of their batches.

Nothing is left behind after any kill. A batch's arrays are written to memory without a name, which
the system frees with the last process that has it open. The open file is sent through a pair of
sockets; everything else goes through the loader's queue. (torch would give the memory a name in
/dev/shm, and each worker a socket in /tmp.)
"""

import contextlib
import ctypes
import errno
import io
import itertools
import mmap
import multiprocessing.context
import os
import pickle
import signal
import socket
import stat
import struct
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import BinaryIO

import torch
from torch.utils.data import get_worker_info

_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process is sent when its parent ends
# Seconds to wait for a killed worker to end, which a dead network drive may prevent.
_PATIENCE = 5.0
_UP_S = 30.0  # seconds for a forked process to reach its first line, which takes some milliseconds

_ALIGNED = 64  # bytes
_NAME = struct.Struct("<qq")  # of a batch: process id of its worker, its number there

_numbers = itertools.count()
_handovers: "weakref.WeakValueDictionary[int, Handover]" = weakref.WeakValueDictionary()


class _Worker(multiprocessing.context.ForkProcess):
    """A forked process that runs when `start` returns.

    Before Python 3.12 a forked process can hang for ever, if a thread of torch held a lock of the
    interpreter at that moment. Such a child never reaches its first line, and is replaced.
    """

    _up: tuple[int, int]  # a pipe: the end to read from, and the end that the child writes to

    @staticmethod
    def _Popen(process_obj):
        process_obj._up = os.pipe()
        try:
            while True:
                child = multiprocessing.context.ForkProcess._Popen(process_obj)
                if wait([process_obj._up[0], child.sentinel], _UP_S):
                    return child
                child.kill()
                child.wait()
                child.close()
        finally:
            for end in process_obj._up:
                os.close(end)

    def run(self) -> None:
        os.write(self._up[1], b"u")
        for end in self._up:
            os.close(end)
        super().run()


class _Forks(multiprocessing.context.ForkContext):
    Process = _Worker


def context() -> multiprocessing.context.BaseContext | None:
    """The context that data workers are started with; None if torch's own choice does not fork."""
    return _Forks() if multiprocessing.get_start_method() == "fork" else None


def begin(kept: int) -> None:
    """Prepare a data worker; called first in it. `kept` is the descriptor of the socket that it needs."""
    end_with_parent()
    _let_go_of_sockets(kept)
    # A signal to the whole process group is meant for the training process, which needs its workers
    # until it has saved.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """From now on this process is killed when its parent ends, in whatever way.

    On Linux the system does it. Elsewhere, or if a fork server is the parent, a thread does it, for
    workers of multiprocessing only; it has to wait for C code that does not let other threads run.
    """
    # To Linux, the parent is a thread: if it is not the main thread, it may end earlier, and its
    # workers would end with it.
    if sys.platform == "linux" and threading.main_thread().name == "MainThread":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    # Covers a parent that had ended before prctl was called.
    if parent := multiprocessing.parent_process():
        threading.Thread(
            target=lambda: wait([parent.sentinel]) and os._exit(1), name="parent", daemon=True
        ).start()


def end() -> None:
    """Kill the data workers of this process: they have nothing to save. Called in the main thread."""
    # torch's handler would raise for each of them.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(_PATIENCE)
    signal.signal(signal.SIGCHLD, handler)


def _let_go_of_sockets(kept: int) -> None:
    """Release the inherited sockets except `kept`: otherwise their peers would not see the parent end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the list itself was a file
            number = int(name)
            if number not in (0, 1, 2, kept) and stat.S_ISSOCK(os.fstat(number).st_mode):
                # Replaced, not closed: a new file would get the number, and the socket's owner
                # would close it.
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


# ---- handover of batches


class Handover:
    """The collate function of a loader: sends a batch from a worker's memory to its process unchanged."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._near, self.far = socket.socketpair()  # ends for the process and for its workers
        # Files that have arrived before the queue's message about them.
        self._came: dict[bytes, BinaryIO] = {}
        _handovers[self.number] = self

    def __call__(self, batch):
        return _Parcel(batch, self) if get_worker_info() and hasattr(os, "memfd_create") else batch

    def __getstate__(self) -> dict:  # for a worker that was not forked
        return {"number": self.number, "far": self.far}

    def memory(self, name: bytes) -> memoryview:
        """The memory that was sent under this name."""
        while name not in self._came:
            came, files, *_ = socket.recv_fds(self._near, _NAME.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not files:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._came[came] = open(files[0], "r+b", buffering=0)
        with self._came.pop(name) as file:
            return memoryview(mmap.mmap(file.fileno(), 0))


class _Parcel:
    """A batch on its way out of a worker."""

    def __init__(self, batch, handover: Handover):
        self._batch, self._handover = batch, handover

    def __reduce__(self) -> tuple:
        words = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        _Pickler(words, protocol=5, buffer_callback=buffers.append).dump(self._batch)
        if not buffers:
            return pickle.loads, (words.getvalue(),)
        name, sizes = (
            _NAME.pack(os.getpid(), next(_numbers)),
            [buffer.raw().nbytes for buffer in buffers],
        )
        with open(os.memfd_create("batch"), "wb") as file:
            for buffer, size in zip(buffers, sizes, strict=True):
                file.write(buffer.raw())
                file.write(bytes(_ALIGNED - size % _ALIGNED))
            file.flush()
            socket.send_fds(self._handover.far, [name], [file.fileno()])
        return _unpack, (self._handover.number, name, words.getvalue(), sizes)


class _Pickler(pickle.Pickler):
    def reducer_override(self, item):
        """Pickle a tensor's content as a separate buffer, as pickle does with arrays."""
        if not isinstance(item, torch.Tensor) or not item.numel():
            return NotImplemented
        if not (item.dim() == 4 and item.is_contiguous(memory_format=torch.channels_last)):
            item = item.contiguous()
        content = item.as_strided((item.numel(),), (1,)).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(content), item.dtype, tuple(item.shape), item.stride())


def _tensor(
    content: memoryview, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, stride)


def _unpack(number: int, name: bytes, words: bytes, sizes: Sequence[int]):
    memory, parts, start = _handovers[number].memory(name), [], 0
    for size in sizes:
        parts.append(memory[start : start + size])
        start += size + _ALIGNED - size % _ALIGNED
    return pickle.loads(words, buffers=parts)
