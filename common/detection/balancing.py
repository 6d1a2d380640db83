"""Class balance in the stream: images with rare classes are drawn more often."""

import numpy as np

from common.detection.data.annotated import Annotated
from common.errors import Refused


def repeat_weights(source: Annotated, threshold: float) -> np.ndarray | None:
    """Weights of the images for `Stream`, float64[N]; None for a threshold of 0: then all are drawn equally often.

    A class in a share f of the images has the weight max(1, sqrt(threshold / f)). An image has the weight of its rarest
    class, and 1 without objects. Crowd regions do not count. An epoch stays N positions, so common images become rarer.
    Raises `Refused` for scenes that are new at each position. Source: Gupta et al. 2019, "LVIS" (arXiv:1908.03195), where the
    threshold is 0.001.
    """
    if not threshold:
        return None
    if source.fresh:
        raise Refused(
            f"--repeat_threshold {threshold:g}: scenes are made afresh for each position, none can be drawn more often; set 0"
        )
    rows = np.repeat(np.arange(len(source)), np.diff(source.offsets))[~source.crowd]
    labels = source.labels[~source.crowd]
    rows, labels = np.divmod(
        np.unique(rows * len(source.classes) + labels), len(source.classes)
    )  # each class once per image
    share = np.bincount(labels, minlength=len(source.classes)) / len(source)
    of_class = np.maximum(1, np.sqrt(threshold / share.clip(min=1 / len(source))))
    weights = np.ones(len(source))
    np.maximum.at(weights, rows, of_class[labels])
    return weights
