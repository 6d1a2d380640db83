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
_MAX_CELLS = 2**24  # values of an array at once


@dataclass(frozen=True)
class Difference:
    """The results of two models on the same images, their difference and its interval."""

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


def draw_resamples(num_images: int, num_resamples: int) -> Iterator[np.ndarray]:
    """Draw images with replacement; the draws are always the same.

    Yields int64[r, num_images], how often each image was drawn, for some resamples at a time.
    """
    rng = np.random.default_rng(_SEED)
    size = max(1, _MAX_CELLS // max(1, num_images))
    for start in range(0, num_resamples, size):
        counts = []
        for _ in range(min(size, num_resamples - start)):
            indices = rng.integers(num_images, size=num_images)
            counts.append(np.bincount(indices, minlength=num_images))
        yield np.stack(counts)


def compare(first: Measure, second: Measure, num_images: int, resamples: int = 1_000) -> Difference:
    """Compare two models on the same images: `second` - `first`, with its 95 % percentile interval."""
    once = np.ones((1, num_images))
    first_value = float(first(once)[0])
    second_value = float(second(once)[0])
    chunks = []
    for weights in draw_resamples(num_images, resamples):
        chunks.append(second(weights) - first(weights))
    differences = np.concatenate(chunks)
    differences = differences[~np.isnan(differences)]  # without any object, there is no AP
    low, high = np.quantile(differences, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    has_other_sign = differences * (second_value - first_value) <= 0
    return Difference(
        first=first_value,
        second=second_value,
        low=float(low),
        high=float(high),
        sign_changes=float(has_other_sign.mean()),
        resamples=len(differences),
    )
