"""Handover of batches from data workers to their process: nothing is left behind after any kill.

A batch's arrays are written to memory without a name, which the system frees with the last process that has it open. The
open file is sent through a pair of sockets; everything else goes through the loader's queue. (torch would give the memory a
name in /dev/shm, and each worker a socket in /tmp.)
"""

import errno
import io
import itertools
import mmap
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch.utils.data import get_worker_info

_ALIGNED = 64  # bytes
_NAME = struct.Struct("<qq")  # of a batch: process id of its worker, its number there

_numbers = itertools.count()
_handovers: "weakref.WeakValueDictionary[int, Handover]" = weakref.WeakValueDictionary()


class Handover:
    """The collate function of a loader: sends a batch from a worker's memory to its process unchanged."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._near, self.far = socket.socketpair()  # ends for the process and for its workers
        self._came: dict[bytes, BinaryIO] = {}  # files that have arrived before the queue's message about them
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
        name, sizes = _NAME.pack(os.getpid(), next(_numbers)), [buffer.raw().nbytes for buffer in buffers]
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


def _tensor(content: memoryview, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, stride)


def _unpack(number: int, name: bytes, words: bytes, sizes: Sequence[int]):
    memory, parts, start = _handovers[number].memory(name), [], 0
    for size in sizes:
        parts.append(memory[start : start + size])
        start += size + _ALIGNED - size % _ALIGNED
    return pickle.loads(words, buffers=parts)
