"""ElasticSampler: splits a data set over the ranks, and what is left of an epoch over the ranks after a restart."""

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from compat.horovod import world


class ElasticSampler(Sampler[int]):
    """Indices of this rank's samples; a restart in mid-epoch deals out only those that were not processed yet.

    In step k with b samples per rank, the ranks together take positions [k*b*size,
    (k+1)*b*size) of the epoch's order. So `record_batch` counts positions, and the count
    is the same on all ranks. The order depends on seed and epoch alone, not on the number
    of ranks. If the rest of an epoch does not divide by the ranks, its first samples are
    repeated.

    Put the sampler into the `TorchState`, call `record_batch` after each optimizer step,
    and `set_epoch(epoch + 1)` at the end of an epoch, which clears what was recorded.

    Args:
        dataset: has a length, which stays the same.
        shuffle: True for a random order.
        seed: of the order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with nothing processed. Call it at the end of the one before, never in the middle."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed `batch_size` samples, in order. All ranks call it. No communication."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the rest of the epoch out again, over the ranks that there are now. No communication."""
        self.num_replicas, self.rank = world.size(), world.rank()
        order = [*range(len(self.dataset))]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        rest = order[self.processed_num :]
        missing = -len(rest) % self.num_replicas
        repeats = -(-missing // len(rest)) if rest else 0  # the rest may be shorter than the number of ranks
        self.indices = (rest + (rest * repeats)[:missing])[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
