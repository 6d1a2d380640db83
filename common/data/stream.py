"""Training stream: the endless sequence of samples that a run trains on.

Position `p` belongs to epoch `p // size` and holds the sample `permute(p % size)` of that epoch.
Optimizer step `k` consumes the positions `[k * G, (k + 1) * G)`. Any process computes just the
positions that it needs, so a billion samples cost as much as a thousand, also at a resume.
"""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from common.data.batch_plan import ceil_div
from common.errors import Refused
from common.randomness import key_of, mix, sample_uniform

_U64 = np.uint64
_NUM_ROUNDS = (
    8  # of the Feistel network: at 4 a chi-square test still sees structure, at 8 it does not
)
_CHUNK_SIZE = 1024  # positions, for which a permutation takes little longer than for a few
_MAX_LANES = 60  # shared by 2 to 6, 10, 12 or 15 machines without a remainder


def permute(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Pseudorandom permutation of `[0, size)` for a seed and an epoch: int64[n] -> int64[n].

    A Feistel network on pairs (left, right) of Z_a x Z_b, with a * b barely above `size`. A result
    outside the range is permuted again until it lies inside (cycle walking: a few times at most,
    since a * b - size < a). Source: Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
    """
    a = math.isqrt(size - 1) + 1
    b = ceil_div(size, a)
    result = np.empty(len(index), _U64)
    remaining = np.arange(len(index))
    x = np.asarray(index).astype(_U64)
    while len(remaining):
        left: np.ndarray = x // _U64(b)
        right: np.ndarray = x % _U64(b)
        for i, key in enumerate(_derive_round_keys(seed, epoch)):
            if i % 2:
                right = (right + mix(left, key) % _U64(b)) % _U64(b)
            else:
                left = (left + mix(right, key) % _U64(a)) % _U64(a)
        x = left * _U64(b) + right
        is_inside = x < _U64(size)
        result[remaining[is_inside]] = x[is_inside]
        remaining = remaining[~is_inside]
        x = x[~is_inside]
    return result.astype(np.int64)


@lru_cache(maxsize=4)
def _permute_chunk(chunk: int, size: int, seed: int, epoch: int) -> np.ndarray:
    """`permute` for the positions `[chunk * _CHUNK_SIZE, (chunk + 1) * _CHUNK_SIZE)`."""
    start = chunk * _CHUNK_SIZE
    stop = min(size, start + _CHUNK_SIZE)
    return permute(np.arange(start, stop), size, seed, epoch)


@lru_cache(maxsize=16)
def _derive_round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(key_of("permutation", seed, epoch, i) for i in range(_NUM_ROUNDS))


class _Lanes(NamedTuple):
    """Lanes of a stream: lane `i` has the slots `[slots[i], slots[i + 1])` of each batch."""

    slots: np.ndarray  # int64[num_lanes + 1]
    batch_size: int

    def find(self, positions: np.ndarray) -> np.ndarray:
        """The lane of each position of the stream: int64[n] -> int64[n]."""
        return np.searchsorted(self.slots, positions % self.batch_size, side="right") - 1

    def count_before(self, positions: np.ndarray | int, lanes: np.ndarray) -> np.ndarray:
        """How many positions of the stream before `positions` are of the lane: int64[n]."""
        widths = np.diff(self.slots)[lanes]
        step, slot = np.divmod(positions, self.batch_size)
        return step * widths + np.clip(slot - self.slots[lanes], 0, widths)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of neighbouring samples that are read together, in an order that uses few at a time.

    The order shuffles well while few blocks are held in memory. Blocks are permuted, and samples
    are shuffled within windows of `pool` successive blocks. Each slot of the global batch belongs to
    one of a few lanes, and each lane has a range of the permuted blocks to itself. So a machine
    that trains on some slots of each batch reads hardly more blocks than these need. All of it is a
    function of seed and epoch, on any layout.
    """

    edges: np.ndarray  # int64[n + 1]: block b has the samples [edges[b], edges[b + 1])
    pool: int

    def find(self, samples: np.ndarray) -> np.ndarray:
        """The block of each sample: int64[n] -> int64[n]."""
        return np.searchsorted(self.edges, samples, side="right") - 1

    def select(self, indices: np.ndarray) -> Self:
        """The blocks of these samples alone, in ascending order; some blocks may be empty."""
        return replace(self, edges=np.searchsorted(indices, self.edges))

    def permute(self, positions: np.ndarray, seed: int, epoch: int, batch_size: int) -> np.ndarray:
        """The samples at `positions` of an epoch, of batches of `batch_size`: int64[n] -> int64[n]."""
        num_blocks = len(self.edges) - 1
        size = int(self.edges[-1])
        if self.pool >= num_blocks:
            return permute(positions, size, seed, epoch)
        num_lanes = min(_MAX_LANES, max(1, self.pool), batch_size)
        slots = ceil_div(batch_size * np.arange(num_lanes + 1), num_lanes)
        lanes = _Lanes(slots, batch_size)

        # Blocks in the order of this epoch lie one after another. Of their samples, lane i has
        # [lane_starts[i], lane_starts[i + 1]).
        epoch_start = epoch * size
        all_lanes = np.arange(num_lanes)
        before_epoch = lanes.count_before(epoch_start, all_lanes)
        lane_sizes = lanes.count_before(epoch_start + size, all_lanes) - before_epoch
        lane_starts = np.cumsum(np.append(0, lane_sizes))
        lane = lanes.find(epoch_start + positions)
        num_earlier = lanes.count_before(epoch_start + positions, lane) - before_epoch[lane]
        rank = lane_starts[lane] + num_earlier  # of each sample in the permuted blocks

        # Samples are shuffled within the window of blocks, as far as it is their lane's.
        blocks, block_starts = _permute_blocks(self, seed, epoch)
        first_blocks = np.arange(0, num_blocks, self.pool / num_lanes).astype(np.int64)
        window_edges = np.append(block_starts[first_blocks], size)
        window = np.searchsorted(window_edges, rank, side="right") - 1
        starts = np.maximum(window_edges[window], lane_starts[lane])
        stops = np.minimum(window_edges[window + 1], lane_starts[lane + 1])
        key = key_of("window", seed, epoch)
        for start, stop in set(zip(starts.tolist(), stops.tolist(), strict=True)):
            is_in_window = starts == start
            order = _shuffle_window(start, stop, key)
            rank[is_in_window] = start + order[rank[is_in_window] - start]

        i = np.searchsorted(block_starts, rank, side="right") - 1
        return self.edges[blocks[i]] + rank - block_starts[i]


@lru_cache(maxsize=4 * _MAX_LANES)
def _shuffle_window(start: int, stop: int, key: int) -> np.ndarray:
    """The numbers below `stop - start` in an order of this window alone: int64[stop - start]."""
    return np.argsort(mix(np.arange(start, stop), key))


@lru_cache(maxsize=4)
def _permute_blocks(blocks: Blocks, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The blocks in the order of an epoch, int64[n], and where each starts there, int64[n + 1]."""
    num_blocks = len(blocks.edges) - 1
    order = permute(np.arange(num_blocks), num_blocks, key_of("blocks", seed), epoch)
    sizes = np.diff(blocks.edges)[order]
    return order, np.cumsum(np.append(0, sizes))


@dataclass(frozen=True)
class Stream:
    """The endless stream of training samples of a data set of `size` samples, in global batches.

    With `repeats` > 1 (repeated augmentation: Hoffer et al., "Augment Your Batch", 2020) each
    global batch holds `global_batch_size / repeats` different samples, each `repeats` times. Copies
    stand `global_batch_size / repeats` apart, so that an image is never mixed with itself. An epoch
    is still `size` positions, as in timm and DeiT.

    With `weights` (float[size], the relative frequencies of the samples) an epoch is a systematic
    sample: each sample is drawn its expected number of times, rounded down or up. Source:
    Carpenter, Clifford & Fearnhead, 1999.

    With `blocks` the order of an epoch is that of `Blocks.permute`. With `min_epoch_steps` an epoch of fewer
    steps counts as that many, wherever lengths are in epochs. Raises `Refused` for an empty data
    set and a batch that does not divide into its copies.
    """

    size: int
    global_batch_size: int
    seed: int
    repeats: int = 1
    weights: np.ndarray | None = None
    min_epoch_steps: int = field(default=0, kw_only=True)
    blocks: Blocks | None = field(default=None, kw_only=True)
    _cumulative_weights: np.ndarray = field(init=False, repr=False, compare=False)

    @classmethod
    def from_config(
        cls, config: Any, size: int, weights: np.ndarray | None = None, **options: Any
    ) -> Self:
        """The stream of a run, as its flags say."""
        options["min_epoch_steps"] = config.min_epoch_steps
        return cls(size, config.global_batch_size, config.seed, weights=weights, **options)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise Refused("the training set has 0 samples: nothing to train on")
        if self.global_batch_size % self.repeats:
            multiple = ceil_div(self.global_batch_size, self.repeats) * self.repeats
            raise Refused(
                f"--global_batch_size {self.global_batch_size} does not divide by --repeats "
                f"{self.repeats}: take {multiple}"
            )
        if self.weights is not None:
            cumulative = np.cumsum(self.weights, dtype=np.float64)
            vars(self)["_cumulative_weights"] = cumulative / cumulative[-1]  # the class is frozen

    def get_indices(self, positions: np.ndarray) -> np.ndarray:
        """The samples at `positions`: int64[n] -> int64[n], each in `[0, size)`."""
        draws = positions
        if self.repeats > 1:
            step, slot = np.divmod(positions, self.global_batch_size)
            num_distinct = self.global_batch_size // self.repeats
            draws = step * num_distinct + slot % num_distinct
        epochs, epoch_positions = np.divmod(draws, self.size)
        indices = np.empty(len(draws), np.int64)
        for epoch in set(epochs.tolist()):  # one, or two if a batch straddles epochs
            is_in_epoch = epochs == epoch
            indices[is_in_epoch] = self._get_epoch_indices(epoch_positions[is_in_epoch], epoch)
        return indices

    def _get_epoch_indices(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """The samples at `positions` of an epoch, each in `[0, size)`: int64[n] -> int64[n]."""
        first_chunk = int(positions.min()) // _CHUNK_SIZE
        last_chunk = int(positions.max()) // _CHUNK_SIZE
        if self.blocks:
            num_distinct = self.global_batch_size // self.repeats
            shuffled = self.blocks.permute(positions, self.seed, epoch, num_distinct)
        elif first_chunk == last_chunk:  # small batches share a chunk
            chunk = _permute_chunk(first_chunk, self.size, self.seed, epoch)
            shuffled = chunk[positions - first_chunk * _CHUNK_SIZE]
        else:
            shuffled = permute(positions, self.size, self.seed, epoch)
        if self.weights is None:
            return shuffled
        offset = sample_uniform(np.zeros(1, np.int64), key_of("weighted", self.seed, epoch))[0]
        quantiles = (shuffled + offset) / self.size
        indices = np.searchsorted(self._cumulative_weights, quantiles, side="right")
        return indices.clip(max=self.size - 1)

    def get_positions(self, step: int, span: tuple[int, int]) -> np.ndarray:
        """The positions that `span` of the global batch covers at `step`: int64[high - low]."""
        return step * self.global_batch_size + np.arange(*span, dtype=np.int64)

    def count_epochs(self, num_steps: int) -> float:
        """`num_steps` in passes over the data."""
        return num_steps * self.global_batch_size / self.size

    def count_steps(self, num_epochs: float) -> int:
        """`num_epochs` in steps, rounded up, so that the last sample of the last epoch is seen."""
        steps_per_epoch = Fraction(self.size, self.global_batch_size)
        if self.extends_epochs:
            steps_per_epoch = Fraction(self.min_epoch_steps)
        return math.ceil(
            Fraction(str(num_epochs)) * steps_per_epoch
        )  # exact, of the decimal number

    @property
    def extends_epochs(self) -> bool:
        """True if an epoch counts as `min_epoch_steps`, which are more than its own."""
        return self.min_epoch_steps * self.global_batch_size > self.size

    def ends_epoch(self, step: int) -> bool:
        """True if an epoch ends within the last of `step` steps."""
        if self.extends_epochs:
            return step % self.min_epoch_steps == 0
        epochs_before = (step - 1) * self.global_batch_size // self.size
        return step * self.global_batch_size // self.size > epochs_before
