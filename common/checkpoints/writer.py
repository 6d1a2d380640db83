"""How is a checkpoint written while training goes on?

Training stops for the copy out of the model alone. A thread writes the copy, one checkpoint at a time: the next one waits
for it. Writing, hashing and syncing leave the interpreter to the other threads.
"""

import threading
import time
from collections.abc import Callable

import torch

from common.checkpoints.state import Tensors


class Writer:
    """Copies tensors and writes the copies beside the training; its methods are for the training thread."""

    def __init__(self):
        self._copies: dict[str, Tensors] = {}  # in host memory, filled anew for every checkpoint
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, files: dict[str, Tensors], write: Callable[[dict[str, Tensors]], None]) -> None:
        """Copy `files`, then let a thread call `write` with the copies; first `wait` for what is being written.

        When this returns, the tensors may change: on CUDA the copy stands in the stream before all that comes next.
        """
        self.wait()
        self._copies = {
            file: {name: _copy(tensor, self._copies.get(file, {}).get(name)) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }
        copied = torch.cuda.Event() if torch.cuda.is_available() else None
        if copied:
            copied.record()
        # A daemon: an interpreter that is made to end at once does not wait for it. To the checkpoint that is a kill.
        self._thread = threading.Thread(target=self._run, args=(write, copied), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> float:
        """Return when nothing is being written, with the seconds that this took. Raises what writing raised, once."""
        began = time.perf_counter()
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error:
            raise error
        return time.perf_counter() - began

    @property
    def failed(self) -> bool:
        """Whether writing failed, and nobody has been told by `wait` yet."""
        return self._error is not None

    def _run(self, write: Callable[[dict[str, Tensors]], None], copied: torch.cuda.Event | None) -> None:
        try:
            if copied:
                copied.synchronize()
            write(self._copies)
        except Exception as error:  # to be raised where training waits
            self._error = error


def _copy(tensor: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """The tensor's content in contiguous host memory of its own: that of the last copy, where it fits."""
    if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return kept.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
