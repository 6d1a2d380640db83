"""Which image stands at which position: rare classes more often, similar shapes in one step, with less padding."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.data.stream import Stream
from common.detection.balancing import repeat_weights
from common.detection.data.annotated import Annotated
from common.randomness import key_of, uniforms


def build_stream(config: Any, source: Annotated) -> Stream:
    """The stream of a run, as --repeat_threshold and --group_window say."""
    weights = repeat_weights(source, config.repeat_threshold)
    if not config.group_window:
        return Stream.of(config, len(source), weights)
    aspects = source.sizes[:, 0] / source.sizes[:, 1]
    return GroupedStream.of(config, len(source), weights, aspects=aspects, window=config.group_window)


@dataclass(frozen=True)
class GroupedStream(Stream):
    """A stream whose images are reordered within windows of `window` global batches, so that batches hold similar shapes.

    Images stay in their epoch: it still holds each exactly once, or as often as the stream's weights say. Random access
    stays, at the cost of a window's indices. Which batch of a window gets which shapes is random, so that the order of the
    steps does not depend on shapes.
    """

    aspects: np.ndarray = field(kw_only=True)  # float[size]: width / height of each image
    window: int = field(default=16, kw_only=True)

    def indices(self, positions: np.ndarray) -> np.ndarray:
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
        indices = super().indices(positions)
        epochs, batches = positions // self.size, positions // self.global_batch_size
        arranged = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            narrow_to_wide = indices[here][np.argsort(self.aspects[indices[here]], kind="stable")]
            draws = uniforms(batches[here], key_of(self.seed, "grouping"))  # the same for all places of a batch
            arranged[here[np.argsort(draws, kind="stable")]] = narrow_to_wide
        return arranged
