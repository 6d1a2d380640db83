"""Order of the images: rare classes more often, similar shapes in one step, with less padding."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.data.stream import Stream
from common.detection.data.annotated import Annotated
from common.errors import Refused
from common.randomness import key_of, uniforms


def build_stream(config: Any, source: Annotated) -> Stream:
    """The stream of a run, as --repeat_threshold and --group_window say."""
    weights = repeat_weights(source, config.repeat_threshold)
    if not config.group_window:
        return Stream.from_config(config, len(source), weights, blocks=source.blocks)
    aspects = source.sizes[:, 0] / source.sizes[:, 1]
    options = {"aspects": aspects, "window": config.group_window, "blocks": source.blocks}
    return GroupedStream.from_config(config, len(source), weights, **options)


def repeat_weights(source: Annotated, threshold: float) -> np.ndarray | None:
    """Weights of the images for `Stream`, float64[N]; None for a threshold of 0: all equally often.

    A class in a share f of the images has the weight max(1, sqrt(threshold / f)), an image the
    weight of its rarest class, and 1 without objects. Crowd regions do not count. An epoch stays N
    positions. Raises `Refused` for scenes that are new at each position. Source: Gupta et al. 2019,
    "LVIS" (arXiv:1908.03195), where the threshold is 0.001.
    """
    if not threshold:
        return None
    if source.fresh:
        raise Refused(
            f"--repeat_threshold {threshold:g}: scenes are made afresh for each position, none "
            "can be drawn more often; set 0"
        )
    rows = np.repeat(np.arange(len(source)), np.diff(source.offsets))[~source.crowd]
    labels = source.labels[~source.crowd]
    once = np.unique(rows * len(source.classes) + labels)  # each class once per image
    rows, labels = np.divmod(once, len(source.classes))
    share = np.bincount(labels, minlength=len(source.classes)) / len(source)
    of_class = np.maximum(1, np.sqrt(threshold / share.clip(min=1 / len(source))))
    weights = np.ones(len(source))
    np.maximum.at(weights, rows, of_class[labels])
    return weights


@dataclass(frozen=True)
class GroupedStream(Stream):
    """A stream reordered within `window` global batches, so that batches hold similar shapes.

    Images stay in their epoch. Which batch of a window gets which shapes is random.
    """

    aspects: np.ndarray = field(kw_only=True)  # float[size]: width / height of each image
    window: int = field(default=16, kw_only=True)

    def get_indices(self, positions: np.ndarray) -> np.ndarray:
        result = np.empty(len(positions), np.int64)
        span = self.window * self.global_batch_size
        windows = positions // span
        for window in np.unique(windows).tolist():
            here = windows == window
            result[here] = self._arranged(window * span, span)[positions[here] - window * span]
        return result

    def _arranged(self, start: int, count: int) -> np.ndarray:
        """The samples of a window: int64[count]."""
        positions = np.arange(start, start + count)
        indices = super().get_indices(positions)
        epochs, batches = positions // self.size, positions // self.global_batch_size
        arranged = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            narrow_to_wide = indices[here][np.argsort(self.aspects[indices[here]], kind="stable")]
            # The same for all of a batch.
            draws = uniforms(batches[here], key_of(self.seed, "grouping"))
            arranged[here[np.argsort(draws, kind="stable")]] = narrow_to_wide
        return arranged
