"""Data workers: how they start, end with their process at the latest, and hand over batches.

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
from functools import partial
from multiprocessing.connection import wait
from typing import BinaryIO

import torch
from torch.utils.data import get_worker_info

_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process is sent when its parent ends
_JOIN_TIMEOUT_S = 5.0  # for a killed worker to end, which a dead network drive may prevent
_START_TIMEOUT_S = 30.0  # for a forked process to reach its first line, in milliseconds as a rule

_ALIGNMENT = 64  # bytes
_NAME = struct.Struct("<qq")  # of a batch: process id of its worker, its id there

_ids = itertools.count()
_handovers: "weakref.WeakValueDictionary[int, Handover]" = weakref.WeakValueDictionary()


class _WorkerProcess(multiprocessing.context.ForkProcess):
    """A forked process that runs when `start` returns.

    Before Python 3.12 a forked process can hang for ever, if a thread of torch held a lock of the
    interpreter at that moment. Such a child never reaches its first line, and is replaced.
    """

    _pipe: tuple[int, int]  # a pipe: the end to read from, and the end that the child writes to

    @staticmethod
    def _Popen(process_obj):
        process_obj._pipe = os.pipe()
        try:
            while True:
                child = multiprocessing.context.ForkProcess._Popen(process_obj)
                if wait([process_obj._pipe[0], child.sentinel], _START_TIMEOUT_S):
                    return child
                child.kill()
                child.wait()
                child.close()
        finally:
            for fd in process_obj._pipe:
                os.close(fd)

    def run(self) -> None:
        os.write(self._pipe[1], b"u")
        for fd in self._pipe:
            os.close(fd)
        super().run()


class _WorkerContext(multiprocessing.context.ForkContext):
    Process = _WorkerProcess


def get_context() -> multiprocessing.context.BaseContext | None:
    """The context that data workers are started with; None if torch's own choice does not fork."""
    return _WorkerContext() if multiprocessing.get_start_method() == "fork" else None


def init_worker(socket_fd: int) -> None:
    """Prepare a data worker, as its first call. `socket_fd` is the descriptor of the socket that it needs."""
    exit_with_parent()
    _release_sockets(socket_fd)
    # A signal to the whole process group is meant for the training process, which needs its workers
    # until it has saved.
    for signal_number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)


def exit_with_parent() -> None:
    """Let this process be killed when its parent ends, in whatever way.

    On Linux the system does it. Elsewhere, or if a fork server is the parent, a thread does it, for
    workers of multiprocessing only; it has to wait for C code that does not let other threads run.
    """
    # To Linux, the parent is a thread: if it is not the main thread, it may end earlier, and its
    # workers would end with it.
    if sys.platform == "linux" and threading.main_thread().name == "MainThread":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    # Covers a parent that had ended before prctl was called.
    parent = multiprocessing.parent_process()
    if parent:
        wait_for_parent = partial(_exit_after, parent.sentinel)
        threading.Thread(target=wait_for_parent, name="parent", daemon=True).start()


def _exit_after(sentinel: int) -> None:
    """End this process when the process of `sentinel` has ended."""
    wait([sentinel])
    os._exit(1)


def stop_workers() -> None:
    """Kill the data workers of this process: they have nothing to save. Called in the main thread."""
    # torch's handler would raise for each of them.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(_JOIN_TIMEOUT_S)
    signal.signal(signal.SIGCHLD, handler)


def _release_sockets(kept_fd: int) -> None:
    """Release the inherited sockets except `kept_fd`: otherwise their peers would not see the parent end."""
    null_fd = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the list itself was a file
            fd = int(name)
            if fd not in (0, 1, 2, kept_fd) and stat.S_ISSOCK(os.fstat(fd).st_mode):
                # Replaced, not closed: a new file would get the descriptor, and the socket's owner
                # would close it.
                os.dup2(null_fd, fd, inheritable=False)
    os.close(null_fd)


# ---- handover of batches


class Handover:
    """The collate function of a loader: sends a batch from a worker's memory to its process unchanged."""

    def __init__(self) -> None:
        self.id = next(_ids)
        # `sender` is for the workers.
        self._receiver, self.sender = socket.socketpair()
        # Files that have arrived before the queue's message about them.
        self._received: dict[bytes, BinaryIO] = {}
        _handovers[self.id] = self

    def __call__(self, batch):
        if get_worker_info() and hasattr(os, "memfd_create"):
            return _Parcel(batch, self)
        return batch

    def __getstate__(self) -> dict:  # for a worker that was not forked
        return {"id": self.id, "sender": self.sender}

    def receive(self, name: bytes) -> memoryview:
        """The memory that was sent under this name."""
        while name not in self._received:
            received_name, fds, *_ = socket.recv_fds(
                self._receiver, _NAME.size, 1, socket.MSG_CMSG_CLOEXEC
            )
            if not fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._received[received_name] = open(fds[0], "r+b", buffering=0)
        with self._received.pop(name) as file:
            return memoryview(mmap.mmap(file.fileno(), 0))


class _Parcel:
    """A batch on its way out of a worker."""

    def __init__(self, batch, handover: Handover):
        self._batch = batch
        self._handover = handover

    def __reduce__(self) -> tuple:
        stream = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(self._batch)
        pickled = stream.getvalue()
        if not buffers:
            return pickle.loads, (pickled,)
        name = _NAME.pack(os.getpid(), next(_ids))
        sizes = [buffer.raw().nbytes for buffer in buffers]
        with open(os.memfd_create("batch"), "wb") as file:
            for buffer, size in zip(buffers, sizes, strict=True):
                file.write(buffer.raw())
                file.write(bytes(_measure_padding(size)))
            file.flush()
            socket.send_fds(self._handover.sender, [name], [file.fileno()])
        return _unpack, (self._handover.id, name, pickled, sizes)


def _measure_padding(size: int) -> int:
    """Bytes behind an array of `size` bytes, so that the next one is aligned."""
    return _ALIGNMENT - size % _ALIGNMENT


class _Pickler(pickle.Pickler):
    def reducer_override(self, item):
        """Pickle a tensor's content as a separate buffer, as pickle does with arrays."""
        if not isinstance(item, torch.Tensor) or not item.numel():
            return NotImplemented
        if not (item.dim() == 4 and item.is_contiguous(memory_format=torch.channels_last)):
            item = item.contiguous()
        content = item.as_strided((item.numel(),), (1,)).view(torch.uint8).numpy()
        return _rebuild_tensor, (
            pickle.PickleBuffer(content),
            item.dtype,
            tuple(item.shape),
            item.stride(),
        )


def _rebuild_tensor(
    content: memoryview, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, stride)


def _unpack(handover_id: int, name: bytes, pickled: bytes, sizes: Sequence[int]):
    memory = _handovers[handover_id].receive(name)
    buffers = []
    start = 0
    for size in sizes:
        buffers.append(memory[start : start + size])
        start += size + _measure_padding(size)
    return pickle.loads(pickled, buffers=buffers)
