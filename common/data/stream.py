"""Training stream: the endless sequence of samples that a run trains on.

Position `p` belongs to epoch `p // size` and holds the sample `permutation(p % size)` of that
epoch. Optimizer step `k` consumes the positions `[k * G, (k + 1) * G)`. Any process computes just
the positions that it needs, so a billion samples cost as much as a thousand, also at a resume.
"""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Self

import numpy as np

from common.errors import Refused
from common.randomness import key_of, mix, uniforms

_U64 = np.uint64
_ROUNDS = 8  # of the Feistel network: at 4 a chi-square test still sees structure, at 8 it does not
_BLOCK = 1024  # places, for which a permutation takes little longer than for a few
_LANES = 60  # shared by 2 to 6, 10, 12 or 15 machines without a rest


def permutation(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Pseudorandom permutation of `[0, size)` for a seed and an epoch: int64[n] -> int64[n].

    A Feistel network on pairs (left, right) of Z_a x Z_b, with a * b barely above `size`. A result
    outside the range is permuted again until it lies inside (cycle walking: a few times at most,
    since a * b - size < a). Source: Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    result = np.empty(len(index), _U64)
    todo, x = np.arange(len(index)), np.asarray(index).astype(_U64)
    while len(todo):
        left: np.ndarray = x // _U64(b)
        right: np.ndarray = x % _U64(b)
        for turn, key in enumerate(_round_keys(seed, epoch)):
            if turn % 2:
                right = (right + mix(left, key) % _U64(b)) % _U64(b)
            else:
                left = (left + mix(right, key) % _U64(a)) % _U64(a)
        x = left * _U64(b) + right
        inside = x < _U64(size)
        result[todo[inside]] = x[inside]
        todo, x = todo[~inside], x[~inside]
    return result.astype(np.int64)


@lru_cache(maxsize=4)
def _block(number: int, size: int, seed: int, epoch: int) -> np.ndarray:
    return permutation(
        np.arange(number * _BLOCK, min(size, (number + 1) * _BLOCK)), size, seed, epoch
    )


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(key_of("permutation", seed, epoch, turn) for turn in range(_ROUNDS))


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of samples that are neighbours and are read together: an order as random as it can be
    with few blocks in use.

    Blocks are permuted, and samples are shuffled within windows of `pool` successive blocks. Each
    slot of the global batch belongs to one of a few lanes, and each lane has a part of the permuted
    blocks to itself. So a machine that trains on some slots of each batch reads hardly more blocks
    than these need. All of it is a function of seed and epoch, on any layout.
    """

    edges: np.ndarray  # int64[n + 1]: block b has the samples [edges[b], edges[b + 1])
    pool: int

    def of(self, samples: np.ndarray) -> np.ndarray:
        """The block of each sample."""
        return np.searchsorted(self.edges, samples, side="right") - 1

    def select(self, rows: np.ndarray) -> Self:
        """The blocks of these samples alone, which are in ascending order; some blocks may be empty."""
        return replace(self, edges=np.searchsorted(rows, self.edges))

    def order(self, places: np.ndarray, seed: int, epoch: int, batch: int) -> np.ndarray:
        """The samples at `places` of an epoch, in a stream of batches of `batch`: int64[n] -> int64[n]."""
        count, size = len(self.edges) - 1, int(self.edges[-1])
        if self.pool >= count:
            return permutation(places, size, seed, epoch)
        lanes = min(_LANES, max(1, self.pool), batch)
        # Lane l has the slots [slots[l], slots[l + 1])
        slots = -(-batch * np.arange(lanes + 1) // lanes)
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
        low, high = (
            np.maximum(windows[window], firsts[lane]),
            np.minimum(windows[window + 1], firsts[lane + 1]),
        )
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
    """The blocks in the order of an epoch, int64[n], and where each begins in that order, int64[n + 1]."""
    count = len(of.edges) - 1
    blocks = permutation(np.arange(count), count, key_of("blocks", seed), epoch)
    return blocks, np.cumsum(np.append(0, np.diff(of.edges)[blocks]))


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

    With `blocks` the order of an epoch is `Blocks.order`. With `min_epoch_steps` an epoch of fewer
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
    _edges: np.ndarray = field(init=False, repr=False, compare=False)

    @classmethod
    def of(cls, config: Any, size: int, weights: np.ndarray | None = None, **options: Any) -> Self:
        """The stream of a run, as its flags say."""
        options["min_epoch_steps"] = config.min_epoch_steps
        return cls(size, config.global_batch_size, config.seed, weights=weights, **options)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise Refused("the training set has 0 samples: nothing to train on")
        if self.global_batch_size % self.repeats:
            raise Refused(
                f"--global_batch_size {self.global_batch_size} does not divide by --repeats "
                f"{self.repeats}: take {-(-self.global_batch_size // self.repeats) * self.repeats}"
            )
        if self.weights is not None:
            edges = np.cumsum(self.weights, dtype=np.float64)
            vars(self)["_edges"] = edges / edges[-1]  # the class is frozen

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """The samples at `positions`: int64[n] -> int64[n], each in `[0, size)`."""
        numbers = positions
        if self.repeats > 1:
            step, place = np.divmod(positions, self.global_batch_size)
            distinct = self.global_batch_size // self.repeats
            numbers = step * distinct + place % distinct
        epochs, places = np.divmod(numbers, self.size)
        result = np.empty(len(numbers), np.int64)
        for epoch in set(epochs.tolist()):  # one, or two if a batch straddles epochs
            here = epochs == epoch
            result[here] = self._sample(places[here], epoch)
        return result

    def _sample(self, places: np.ndarray, epoch: int) -> np.ndarray:
        first, last = int(places.min()) // _BLOCK, int(places.max()) // _BLOCK
        if self.blocks:
            shuffled = self.blocks.order(
                places, self.seed, epoch, self.global_batch_size // self.repeats
            )
        elif first == last:  # small batches share a block
            shuffled = _block(first, self.size, self.seed, epoch)[places - first * _BLOCK]
        else:
            shuffled = permutation(places, self.size, self.seed, epoch)
        if self.weights is None:
            return shuffled
        offset = uniforms(np.zeros(1, np.int64), key_of("weighted", self.seed, epoch))[0]
        return np.searchsorted(self._edges, (shuffled + offset) / self.size, side="right").clip(
            max=self.size - 1
        )

    def positions(self, step: int, span: tuple[int, int]) -> np.ndarray:
        """The positions that `span` of the global batch covers at `step`: int64[high - low]."""
        return step * self.global_batch_size + np.arange(*span, dtype=np.int64)

    def epoch(self, step: int) -> float:
        """`step` steps in passes over the data."""
        return step * self.global_batch_size / self.size

    def steps(self, epochs: float) -> int:
        """`epochs` in steps, rounded up, so that the last sample of the last epoch is seen."""
        length = (
            self.min_epoch_steps
            if self.extends_epochs
            else Fraction(self.size, self.global_batch_size)
        )
        return math.ceil(Fraction(str(epochs)) * length)  # exact, of the decimal number

    @property
    def extends_epochs(self) -> bool:
        """True if an epoch counts as `min_epoch_steps`, which are more than its own."""
        return self.min_epoch_steps * self.global_batch_size > self.size

    def ends_epoch(self, step: int) -> bool:
        """True if an epoch ends within the last of `step` steps."""
        if self.extends_epochs:
            return step % self.min_epoch_steps == 0
        return (
            step * self.global_batch_size // self.size
            > (step - 1) * self.global_batch_size // self.size
        )
