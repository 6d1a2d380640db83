"""Paired bootstrap: the interval of the difference between two models over the choice of validation images.

Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993 (percentile interval).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

# How often each image counts [R, N] -> the result with these images [R]
Measure = Callable[[np.ndarray], np.ndarray]
LEVEL = 0.95
_SEED = 0
_CELLS = 2**24  # numbers of an array at once


@dataclass(frozen=True)
class Difference:
    """Of two models, evaluated on the same images: results, their difference and its interval."""

    first: float
    second: float
    low: float
    high: float
    # Share of resamples in which the difference is 0 or has the other sign; 1 if there is none.
    sign_changes: float
    resamples: int

    @property
    def value(self) -> float:
        return self.second - self.first

    @property
    def is_larger_than_noise(self) -> bool:
        """True if the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def resampled(images: int, count: int) -> Iterator[np.ndarray]:
    """`count` draws of `images` images with replacement, in parts [r, images]: how often each was
    drawn. Always the same.
    """
    rng = np.random.default_rng(_SEED)
    size = max(1, _CELLS // max(1, images))
    for start in range(0, count, size):
        rows = min(size, count - start)
        yield np.stack(
            [np.bincount(rng.integers(images, size=images), minlength=images) for _ in range(rows)]
        )


def compare(first: Measure, second: Measure, images: int, resamples: int = 1_000) -> Difference:
    """The difference `second` - `first` over the same `images` images, with its 95 % percentile interval."""
    once = np.ones((1, images))
    values = float(first(once)[0]), float(second(once)[0])
    found = np.concatenate(
        [second(weights) - first(weights) for weights in resampled(images, resamples)]
    )
    found = found[~np.isnan(found)]  # without any object, there is no AP
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    changes = float((found * (values[1] - values[0]) <= 0).mean())
    return Difference(*values, float(low), float(high), changes, len(found))
