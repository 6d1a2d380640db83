"""Writer: saves checkpoints in the background while training continues.

Training waits only until its tensors are copied. A thread writes the copy; the next checkpoint
waits until it is done. Writing, hashing and syncing release the interpreter's lock.
"""

import threading
import time
from collections.abc import Callable

import torch

from common.checkpoints.state import Tensors
from common.distributed import devices
from common.distributed.sharding import get_full_tensor


class Writer:
    """Copies tensors and writes the copies in the background. Called by the training thread."""

    def __init__(self):
        self._copies: dict[str, Tensors] = {}  # in host memory, reused for every checkpoint
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, files: dict[str, Tensors], write: Callable[[dict[str, Tensors]], None]) -> None:
        """Copy `files`, then call `write` with the copies in a thread.

        First it waits until the checkpoint before is written. The tensors may change as soon as
        this returns: on a GPU, the copy precedes later work in the stream. Tensors in shards are
        gathered one by one, in which all other ranks take part by `join_gather`.
        """
        self.wait()
        copies: dict[str, Tensors] = {}
        for file, tensors in files.items():
            last_copies = self._copies.get(file, {})
            copies[file] = {}
            for name, tensor in tensors.items():
                copies[file][name] = _copy_to_host(
                    get_full_tensor(tensor), buffer=last_copies.get(name)
                )
        self._copies = copies
        copied = devices.record_event()
        # A daemon, so that it never delays the end of the process. For the checkpoint, that is like
        # a kill.
        self._thread = threading.Thread(
            target=self._run, args=(write, copied), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> float:
        """Wait until nothing is being written, and return the seconds waited.

        Raises an error of the writing once.
        """
        start = time.perf_counter()
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._error:
            error = self._error
            self._error = None
            raise error
        return time.perf_counter() - start

    @property
    def failed(self) -> bool:
        """True if writing has failed and `wait` has not raised the error yet."""
        return self._error is not None

    def _run(self, write: Callable[[dict[str, Tensors]], None], copied: torch.Event | None) -> None:
        try:
            if copied:
                copied.synchronize()
            write(self._copies)
        except Exception as error:  # `wait` raises it in the training thread
            self._error = error


def join_gather(files: dict[str, Tensors]) -> None:
    """Gather the tensors that the main process's writer copies."""
    for tensors in files.values():
        for tensor in tensors.values():
            get_full_tensor(tensor)


def _copy_to_host(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """A contiguous copy of the tensor in host memory; reuses `buffer`, the last copy, if it fits."""
    in_stream = devices.has_streams(tensor.device)
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=in_stream)
    return buffer.copy_(tensor.detach(), non_blocking=in_stream)
