"""Order of the images: rare classes more often, similar shapes in one step, with less padding."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.data.stream import Stream
from common.detection.data.annotated import Annotated
from common.errors import Refused
from common.randomness import key_of, sample_uniform


def build_stream(config: Any, source: Annotated) -> Stream:
    """The stream of a run, as --repeat_threshold and --group_window say."""
    weights = compute_repeat_weights(source, config.repeat_threshold)
    if not config.group_window:
        return Stream.from_config(config, len(source), weights, blocks=source.blocks)
    aspects = source.sizes[:, 0] / source.sizes[:, 1]
    options = {"aspects": aspects, "window": config.group_window, "blocks": source.blocks}
    return GroupedStream.from_config(config, len(source), weights, **options)


def compute_repeat_weights(source: Annotated, threshold: float) -> np.ndarray | None:
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
    num_images = len(source)
    num_classes = len(source.classes)
    owners = np.repeat(np.arange(num_images), np.diff(source.offsets))[~source.crowd]
    labels = source.labels[~source.crowd]
    pairs = np.unique(owners * num_classes + labels)  # each class once per image
    owners, labels = np.divmod(pairs, num_classes)
    share_by_class = np.bincount(labels, minlength=num_classes) / num_images
    share_by_class = share_by_class.clip(min=1 / num_images)
    weight_by_class = np.maximum(1, np.sqrt(threshold / share_by_class))
    weights = np.ones(num_images)
    np.maximum.at(weights, owners, weight_by_class[labels])
    return weights


@dataclass(frozen=True)
class GroupedStream(Stream):
    """A stream reordered within `window` global batches, so that batches hold similar shapes.

    Images stay in their epoch. Which batch of a window gets which shapes is random.
    """

    aspects: np.ndarray = field(kw_only=True)  # float[size]: width / height of each image
    window: int = field(default=16, kw_only=True)

    def get_indices(self, positions: np.ndarray) -> np.ndarray:
        indices = np.empty(len(positions), np.int64)
        window_size = self.window * self.global_batch_size
        windows = positions // window_size
        for window in np.unique(windows).tolist():
            start = window * window_size
            is_in_window = windows == window
            window_indices = self._sort_window(start, window_size)
            indices[is_in_window] = window_indices[positions[is_in_window] - start]
        return indices

    def _sort_window(self, start: int, window_size: int) -> np.ndarray:
        """The samples of a window, in batches of similar shapes: int64[window_size]."""
        positions = np.arange(start, start + window_size)
        indices = super().get_indices(positions)
        epochs = positions // self.size
        batches = positions // self.global_batch_size
        result = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            slots = np.flatnonzero(epochs == epoch)
            epoch_indices = indices[slots]
            by_aspect = np.argsort(self.aspects[epoch_indices], kind="stable")
            # The same for all of a batch.
            draws = sample_uniform(batches[slots], key_of(self.seed, "grouping"))
            slots_by_draw = slots[np.argsort(draws, kind="stable")]
            result[slots_by_draw] = epoch_indices[by_aspect]
        return result
