"""COCO's average precision of boxes as a function of how often each image counts, for resampling.

Detections are matched with objects once, image by image. Precision and recall are then sums over
images, so AP over resampled images needs no second matching. Equal to COCO's evaluation of a data
set in which images occur several times. Source of the metric: Lin et al., "Microsoft COCO", 2014.
"""

from dataclasses import dataclass, replace

import numpy as np

from common.detection.evaluation.matching import IN_CROWD, NO_OBJECT, Matches

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
_MAX_CELLS = 2**22  # values of an array at once


@dataclass(frozen=True)
class _ClassDetections:
    """The detections of a class, best first, and its objects."""

    images: np.ndarray  # int64[n] of the detections
    is_hit: np.ndarray  # bool[T, n]: True if a detection shows an object of its class
    # bool[T, n]: True if it shows a crowd region, where detections are not judged.
    is_ignored: np.ndarray
    object_counts: np.ndarray  # int64[N] in each image


class AveragePrecision:
    """Computes the AP with image n counted weights[r, n] times: weights [R, N] -> [R].

    `source` has N annotated images; `images` int64[n] and `rows` float32[n, 6] are the detections
    (left, top, right, bottom, score, class id). NaN where no image with objects counts.
    """

    def __init__(self, source, images: np.ndarray, rows: np.ndarray):
        # Among equal scores, COCO takes the lower image id first.
        id_ranks = np.argsort(np.argsort(source.image_ids))
        best_first = np.lexsort((id_ranks[images], -rows[:, 4]))
        matches = Matches.from_best(source, images[best_first], rows[best_first])
        hits = np.stack([replace(matches, iou=iou).hit_objects for iou in THRESHOLDS.tolist()])
        areas = (matches.detections[:, 2:4] - matches.detections[:, :2]).astype(np.float64).prod(1)
        is_odd = (areas < 0) | (areas > 1e10)  # turned inside out, which COCO ignores
        is_ignored = (hits == IN_CROWD) | ((hits == NO_OBJECT) & is_odd)
        image_of_object = np.repeat(np.arange(len(source)), np.diff(source.offsets))
        self._classes = []
        for class_id in range(len(source.classes)):
            is_detection = matches.detections[:, 5] == class_id
            is_object = (source.labels == class_id) & ~source.crowd
            self._classes.append(
                _ClassDetections(
                    images=matches.images[is_detection],
                    is_hit=hits[:, is_detection] >= 0,
                    is_ignored=is_ignored[:, is_detection],
                    object_counts=np.bincount(image_of_object[is_object], minlength=len(source)),
                )
            )

    def __call__(self, weights: np.ndarray) -> np.ndarray:
        values = self.compute_per_class(weights)
        is_present = ~np.isnan(values)
        num_present = is_present.sum(1)
        means = np.where(is_present, values, 0).sum(1) / np.maximum(num_present, 1)
        return np.where(num_present, means, np.nan)

    def compute_per_class(self, weights: np.ndarray) -> np.ndarray:
        """float64[R, K]: the AP of each class; NaN where it has no object."""
        weights = np.asarray(weights, np.float64)
        return np.stack([_average_class(entry, weights) for entry in self._classes], 1)


def _average_class(entry: _ClassDetections, weights: np.ndarray) -> np.ndarray:
    """float64[R]: the AP of a class."""
    size = max(1, _MAX_CELLS // max(1, len(entry.images)))
    chunks = [np.zeros(0)]
    for start in range(0, len(weights), size):
        chunks.append(_average_chunk(entry, weights[start : start + size]))
    return np.concatenate(chunks)


def _average_chunk(entry: _ClassDetections, weights: np.ndarray) -> np.ndarray:
    num_objects = weights @ entry.object_counts
    total = np.zeros(len(weights))
    detection_weights = weights[:, entry.images]
    num_detections = np.cumsum(detection_weights, 1)
    for is_hit, is_ignored in zip(entry.is_hit, entry.is_ignored, strict=True):
        hits = np.flatnonzero(is_hit)
        if not len(hits):
            continue
        num_judged = num_detections
        if is_ignored.any():
            num_judged = np.cumsum(np.where(is_ignored, 0, detection_weights), 1)
        num_right = np.cumsum(detection_weights[:, hits], 1)
        precision = num_right / (num_judged[:, hits] + np.spacing(1))
        precision = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
        # How many of the 101 recalls are reached with each hit; precision is taken where one is
        # reached first.
        recall = num_right / np.maximum(num_objects, 1)[:, None]
        num_reached = np.searchsorted(RECALLS, recall, side="right")
        newly_reached = np.diff(num_reached, axis=1, prepend=0)
        total += (newly_reached * precision).sum(1) / len(RECALLS)
    return np.where(num_objects > 0, total / len(THRESHOLDS), np.nan)
