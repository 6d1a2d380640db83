"""Class balance: weights of rare classes in the loss and in the stream."""

import numpy as np

from common.errors import Refused

_POWERS = {"sqrt": 0.5, "balanced": 1.0}


def class_weights(kind: str, labels: np.ndarray, num_classes: int) -> np.ndarray | None:
    """Weights of the classes in the loss, float64[C], with mean 1 over the samples.

    `kind` is none, sqrt or balanced.
    """
    if kind == "none":
        return None
    return weigh_counts(kind, _count_labels(labels, num_classes))


def weigh_counts(kind: str, counts: np.ndarray) -> np.ndarray:
    """Weights float64[C] with mean 1 over the samples, of which `counts` [C] are of each class.

    `kind` is sqrt or balanced.
    """
    weights = np.maximum(counts, 1.0) ** -_POWERS[kind]
    return weights * counts.sum() / (weights * counts).sum()


def compute_sample_weights(kind: str, labels: np.ndarray, num_classes: int) -> np.ndarray | None:
    """Relative frequencies of samples, float64[N]; None for `natural` (all the same).

    `sqrt` and `balanced` draw a class with its frequency to the power 1/2 or 0 (Mahajan et al.,
    2018). Raises `Refused` for multi-label data, where a sample may have several classes.
    """
    if kind == "natural":
        return None
    if labels.ndim == 2:
        problem = "a sample of multi-label data has no one class to weigh by"
        raise Refused(f"--sampling {kind}: {problem}; use --class_weights {kind}")
    return _count_labels(labels, num_classes)[labels] ** -_POWERS[kind]


def _count_labels(labels: np.ndarray, num_classes: int) -> np.ndarray:
    if labels.ndim == 2:
        return labels.sum(0).astype(np.float64)
    return np.bincount(labels, minlength=num_classes).astype(np.float64)
