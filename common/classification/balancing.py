"""Class balance: weights of rare classes in the loss and in the stream."""

from pathlib import Path

import numpy as np

from common.errors import Refused
from common.files import SMALL, read_yaml

_POWERS = {"sqrt": 0.5, "balanced": 1.0}


def class_weights(kind: str, labels: np.ndarray, classes: tuple[str, ...]) -> np.ndarray | None:
    """Weights of the classes in the loss, float64[C]; their mean over the training samples is 1.

    `kind` is none, sqrt or balanced (the frequency of a class to the power -1/2 or -1), or a YAML file of
    `class name: weight`. Raises `Refused` for a file that does not give each class one positive weight.
    """
    if kind == "none":
        return None
    counts = _counts(labels, len(classes))
    weights = _read(Path(kind), classes) if kind not in _POWERS else np.maximum(counts, 1.0) ** -_POWERS[kind]
    return weights * counts.sum() / (weights * counts).sum()


def sample_weights(kind: str, labels: np.ndarray, classes: int) -> np.ndarray | None:
    """Relative frequencies of samples, float64[N]; None for `natural` (all the same).

    `sqrt` and `balanced` draw a class with its frequency to the power 1/2 or 0 (Mahajan et al., 2018). Raises `Refused` for
    multi-label data, where a sample may have several classes.
    """
    if kind == "natural":
        return None
    if labels.ndim == 2:
        problem = "a sample of multi-label data has no one class to weigh by"
        raise Refused(f"--sampling {kind}: {problem}; use --class_weights {kind}")
    return _counts(labels, classes)[labels] ** -_POWERS[kind]


def _counts(labels: np.ndarray, classes: int) -> np.ndarray:
    return (labels.sum(0) if labels.ndim == 2 else np.bincount(labels, minlength=classes)).astype(np.float64)


def _read(path: Path, classes: tuple[str, ...]) -> np.ndarray:
    try:
        content = read_yaml(path, SMALL, switches=False)  # names and weights stay text
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        known = "none, sqrt, balanced or a YAML file of `class name: weight`"
        raise Refused(f"--class_weights {path}: {known}, and there is no such file") from None
    except OSError as error:
        raise Refused(f"--class_weights {path}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"--class_weights {path}: not readable as YAML: {error}") from None
    given = content if isinstance(content, dict) else {}
    wrong = sorted(set(classes) ^ given.keys()) + [name for name, weight in given.items() if not _is_weight(weight)]
    if wrong:
        names = ", ".join(wrong[:5])
        raise Refused(f"--class_weights {path}: needs one positive weight a class; missing, unknown or wrong: {names}")
    return np.array([float(given[name]) for name in classes])


def _is_weight(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except (TypeError, ValueError):
        return False
