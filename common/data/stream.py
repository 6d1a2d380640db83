"""Training stream: the endless sequence of samples that a run trains on.

Position `p` belongs to epoch `p // size` and holds the sample `permutation(p % size)` of that epoch. Optimizer step `k`
consumes the positions `[k * G, (k + 1) * G)`. Any process computes just the positions that it needs: there is no list to
shuffle and no iterator to fast-forward on resume, and a billion samples cost as much as a thousand.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from common.errors import Refused
from common.randomness import key_of, mix, uniforms

if TYPE_CHECKING:  # which imports this module
    from common.data.block_order import Blocks

_U64 = np.uint64
_ROUNDS = 8  # of the Feistel network: at 4 a chi-square test still sees structure, at 8 it does not
_BLOCK = 1024  # places, for which a permutation takes little longer than for a few


def permutation(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Pseudorandom permutation of `[0, size)` for a seed and an epoch: int64[n] -> int64[n].

    A Feistel network on pairs (left, right) of Z_a x Z_b, with a * b barely above `size`. A result outside the range is
    permuted again until it lies inside (cycle walking: a few times at most, since a * b - size < a).
    Source: Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    result = np.empty(len(index), _U64)
    todo, x = np.arange(len(index)), np.asarray(index).astype(_U64)
    while len(todo):
        left, right = x // _U64(b), x % _U64(b)
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
    return permutation(np.arange(number * _BLOCK, min(size, (number + 1) * _BLOCK)), size, seed, epoch)


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(key_of("permutation", seed, epoch, turn) for turn in range(_ROUNDS))


@dataclass(frozen=True)
class Stream:
    """The endless stream of training samples of a data set of `size` samples, in global batches.

    With `repeats` > 1 (repeated augmentation: Hoffer et al., "Augment Your Batch", 2020) each global batch holds
    `global_batch_size / repeats` different samples, each `repeats` times. Copies stand `global_batch_size / repeats` apart,
    so that an image is never mixed with itself. An epoch is still `size` positions, as in timm and DeiT.

    With `weights` (float[size], the relative frequencies of the samples) an epoch is a systematic sample: each sample is
    drawn its expected number of times, rounded down or up. Source: Carpenter, Clifford & Fearnhead, 1999.

    With `blocks` the order of an epoch is `Blocks.order`, by which samples that are neighbours are read together.

    With `min_epoch_steps` an epoch of fewer steps counts as that many, wherever lengths are in epochs; samples and their
    order stay the same. Raises `Refused` for an empty data set and for a batch that does not divide into its copies.
    """

    size: int
    global_batch_size: int
    seed: int
    repeats: int = 1
    weights: np.ndarray | None = None
    min_epoch_steps: int = field(default=0, kw_only=True)
    blocks: "Blocks | None" = field(default=None, kw_only=True)

    @classmethod
    def of(cls, config: Any, size: int, weights: np.ndarray | None = None, **options: Any) -> Self:
        """The stream of a run, as its flags say."""
        copies = getattr(config, "repeats", 1)
        options["min_epoch_steps"] = config.min_epoch_steps
        return cls(size, config.global_batch_size, config.seed, copies, weights, **options)

    def __post_init__(self):
        if self.size < 1:
            raise Refused("the training set has 0 samples: nothing to train on")
        if self.global_batch_size % self.repeats:
            raise Refused(
                f"--global_batch_size {self.global_batch_size} does not divide by --repeats {self.repeats}: "
                f"take {-(-self.global_batch_size // self.repeats) * self.repeats}"
            )
        if self.weights is not None:
            edges = np.cumsum(self.weights, dtype=np.float64)
            object.__setattr__(self, "_edges", edges / edges[-1])

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
            shuffled = self.blocks.order(places, self.seed, epoch, self.global_batch_size // self.repeats)
        elif first == last:  # small batches share a block
            shuffled = _block(first, self.size, self.seed, epoch)[places - first * _BLOCK]
        else:
            shuffled = permutation(places, self.size, self.seed, epoch)
        if self.weights is None:
            return shuffled
        offset = uniforms(np.zeros(1, np.int64), key_of("weighted", self.seed, epoch))[0]
        return np.searchsorted(self._edges, (shuffled + offset) / self.size, side="right").clip(max=self.size - 1)

    def positions(self, step: int, span: tuple[int, int]) -> np.ndarray:
        """The positions that `span` of the global batch covers at `step`: int64[high - low]."""
        return step * self.global_batch_size + np.arange(*span, dtype=np.int64)

    def epoch(self, step: int) -> float:
        """`step` steps in passes over the data."""
        return step * self.global_batch_size / self.size

    def steps(self, epochs: float) -> int:
        """`epochs` in steps, rounded up, so that the last sample of the last epoch is seen."""
        length = self.min_epoch_steps if self.extends_epochs else Fraction(self.size, self.global_batch_size)
        return math.ceil(Fraction(str(epochs)) * length)  # exact, of the decimal number

    @property
    def extends_epochs(self) -> bool:
        """True if an epoch counts as `min_epoch_steps`, which are more than its own."""
        return self.min_epoch_steps * self.global_batch_size > self.size

    def ends_epoch(self, step: int) -> bool:
        """True if an epoch ends within the last of `step` steps."""
        if self.extends_epochs:
            return step % self.min_epoch_steps == 0
        return step * self.global_batch_size // self.size > (step - 1) * self.global_batch_size // self.size
