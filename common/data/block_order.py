"""Order of samples of which neighbours are read together, in blocks: as random as it can be while few blocks are in use.

Blocks are permuted, and samples are shuffled within windows of some successive blocks. Each slot of the global batch belongs
to one of a few lanes, and each lane has a part of the permuted blocks to itself. So a machine that trains on some slots of
each batch reads hardly more blocks than these need. All of it is a function of seed and epoch, on any layout.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from common.data.stream import permutation
from common.randomness import key_of, mix

_LANES = 60  # shared by 2 to 6, 10, 12 or 15 machines without a rest


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of samples that are neighbours, of which `pool` are in use at a time."""

    edges: np.ndarray  # int64[n + 1]: block b has the samples [edges[b], edges[b + 1])
    pool: int

    def of(self, samples: np.ndarray) -> np.ndarray:
        """The block of each sample."""
        return np.searchsorted(self.edges, samples, side="right") - 1

    def select(self, rows: np.ndarray) -> "Blocks":
        """The blocks of these samples alone, which are in ascending order."""
        return Blocks(np.unique(np.searchsorted(rows, self.edges)), self.pool)

    def order(self, places: np.ndarray, seed: int, epoch: int, batch: int) -> np.ndarray:
        """The samples at `places` of an epoch, in a stream of batches of `batch`: int64[n] -> int64[n]."""
        count, size = len(self.edges) - 1, int(self.edges[-1])
        if self.pool >= count:
            return permutation(places, size, seed, epoch)
        lanes = min(_LANES, max(1, self.pool), batch)
        slots = -(-batch * np.arange(lanes + 1) // lanes)  # lane l has the slots [slots[l], slots[l + 1])
        begin = epoch * size

        widths, every = np.diff(slots), np.arange(lanes)
        lane = np.searchsorted(slots, (begin + places) % batch, side="right") - 1

        def earlier(position: np.ndarray | int, lane: np.ndarray) -> np.ndarray:
            """How many positions of the stream before this one are of a lane."""
            step, slot = np.divmod(position, batch)
            return step * widths[lane] + np.clip(slot - slots[lane], 0, widths[lane])

        before = earlier(begin, every)
        # Lane l has [firsts[l], firsts[l + 1]) of the samples in permuted blocks.
        firsts = np.cumsum([0, *(earlier(begin + size, every) - before)])
        place = firsts[lane] + earlier(begin + places, lane) - before[lane]

        blocks, starts = _permuted(self, seed, epoch)
        windows = np.append(starts[np.arange(0, count, self.pool / lanes).astype(np.int64)], size)
        window = np.searchsorted(windows, place, side="right") - 1
        low, high = np.maximum(windows[window], firsts[lane]), np.minimum(windows[window + 1], firsts[lane + 1])
        key = key_of("window", seed, epoch)
        for begin, end in {*zip(low.tolist(), high.tolist(), strict=True)}:
            here = low == begin
            place[here] = begin + _shuffled(begin, end, key)[place[here] - begin]
        turn = np.searchsorted(starts, place, side="right") - 1
        return self.edges[blocks[turn]] + place - starts[turn]


@lru_cache(maxsize=4 * _LANES)
def _shuffled(begin: int, end: int, key: int) -> np.ndarray:
    """The numbers below `end - begin` in an order that is the window's own: int64[end - begin]."""
    return np.argsort(mix(np.arange(begin, end), key))


@lru_cache(maxsize=4)
def _permuted(of: Blocks, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The blocks in the order of an epoch, int64[n], and where each begins in the sequence of their samples, int64[n + 1]."""
    count = len(of.edges) - 1
    blocks = permutation(np.arange(count), count, key_of("blocks", seed), epoch)
    return blocks, np.cumsum(np.append(0, np.diff(of.edges)[blocks]))
