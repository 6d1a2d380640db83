"""ElasticSampler: splits a data set over the ranks, and what is left of an epoch over the ranks after a restart."""

import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from compat.horovod import world


class ElasticSampler(Sampler[int]):
    """Indices of this rank's samples; a restart in mid-epoch deals out only those that were not processed yet.

    In step k with b samples per rank, the ranks together take positions [k*b*size, (k+1)*b*size) of the epoch's order.
    So `record_batch` counts positions, and the count is the same on all ranks. The order depends on seed and epoch alone,
    not on the number of ranks. If the rest of an epoch does not divide by the ranks, its first samples are repeated.

    Put the sampler into the `TorchState`, call `record_batch` after each optimizer step, and `set_epoch(epoch + 1)` at the
    end of an epoch: it clears what was recorded.

    Args:
        dataset: has a length, which stays the same.
        shuffle: whether the order is random.
        seed: of the order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with nothing processed. Call it at the end of the one before, never in the middle."""
        self.epoch, self.processed_num, self.processed_indices = epoch, 0, set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed `batch_size` samples, in order. All ranks call it. No communication."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record samples that this rank has processed, in any order; a commit joins those of all ranks."""
        self.processed_indices.update(int(index) for index in indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Indices of this rank's batch number `batch_idx` since the last reset."""
        return list(self)[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": sorted(self.processed_indices),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Deal the rest of the epoch out again, over the ranks that there are now. No communication."""
        self.num_replicas, self.rank = world.size(), world.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = [index for index in order[self.processed_num :] if index not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        rest = self.remaining_indices
        missing = self.total_size - len(rest)
        repeats = -(-missing // len(rest)) if rest else 0  # the rest may be shorter than the number of ranks
        filled = rest + (rest * repeats)[:missing]
        return iter(filled[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
