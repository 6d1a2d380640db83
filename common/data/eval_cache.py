"""Cache of evaluated images: each evaluation of a run shows the same pixels, so they are decoded once.

A data worker keeps the images that it has decoded; the loader gives it the same batches each time. The caches of all workers
and ranks of a machine take a small share of its memory together; images beyond that are decoded each time.
"""

from collections.abc import Callable

import torch
from torch.utils.data import get_worker_info

from common.distributed.environment import available_memory

MEMORY_SHARE = 0.05  # of the memory that is available when a process keeps its first image


class EvalCache:
    """Decoded images by index, of this process alone; `num_ranks` ranks of the machine have such caches."""

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._images: dict[int, torch.Tensor] = {}
        self._free_bytes: int | None = None  # None until the first image

    def get(self, index: int, decode: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The image uint8[3, H, W] at `index`, by `decode` the first time. It must not be written to."""
        image = self._images.get(index)
        if image is None:
            image = decode()
            self._keep(index, image)
        return image

    def _keep(self, index: int, image: torch.Tensor) -> None:
        if self._free_bytes is None:
            worker = get_worker_info()
            num_processes = self._num_ranks * (worker.num_workers if worker else 1)
            self._free_bytes = int(MEMORY_SHARE * available_memory() / num_processes)
        if image.nbytes <= self._free_bytes:
            self._free_bytes -= image.nbytes
            self._images[index] = image.clone()  # not a view of something larger
