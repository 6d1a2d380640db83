"""COCO's average precision of boxes as a function of how often each image counts, for resampling a
validation set.

Detections are matched with objects once, image by image. Precision and recall are then sums over
images, so AP over resampled images needs no second matching. Equal to COCO's evaluation of a data
set in which images occur several times. Source of the metric: Lin et al., "Microsoft COCO", 2014.
"""

from dataclasses import dataclass, replace

import numpy as np

from common.detection.evaluation.matching import IN_CROWD, NO_OBJECT, Matches

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
_CELLS = 2**22  # numbers of an array at once


@dataclass(frozen=True)
class _OfClass:
    images: np.ndarray  # int64[n] of the detections, best first
    hits: np.ndarray  # bool[T, n]: True if a detection shows an object of its class
    # bool[T, n]: True if it shows a crowd region, where detections are not judged.
    ignored: np.ndarray
    objects: np.ndarray  # int64[N] in each image


class AveragePrecision:
    """`AveragePrecision(source, images, rows)(weights [R, N])` gives [R]: AP with image n counted
    weights[r, n] times.

    `source` has N annotated images; `images` int64[n] and `rows` float32[n, 6] are the detections
    (left, top, right, bottom, score, class id). NaN where no image with objects counts.
    """

    def __init__(self, source, images: np.ndarray, rows: np.ndarray):
        places = np.argsort(np.argsort(source.image_ids))
        # Among equal scores, COCO takes the lower id first.
        best_first = np.lexsort((places[images], -rows[:, 4]))
        best = Matches.from_best(source, images[best_first], rows[best_first])
        shown = np.stack([replace(best, iou=iou).hits for iou in THRESHOLDS.tolist()])
        areas = (best.detections[:, 2:4] - best.detections[:, :2]).astype(np.float64).prod(1)
        is_odd = (areas < 0) | (areas > 1e10)  # turned inside out, which COCO ignores
        ignored = (shown == IN_CROWD) | ((shown == NO_OBJECT) & is_odd)
        owners = np.repeat(np.arange(len(source)), np.diff(source.offsets))
        self._classes = []
        for number in range(len(source.classes)):
            of = best.detections[:, 5] == number
            objects = owners[(source.labels == number) & ~source.crowd]
            counts = np.bincount(objects, minlength=len(source))
            self._classes.append(
                _OfClass(best.images[of], shown[:, of] >= 0, ignored[:, of], counts)
            )

    def __call__(self, weights: np.ndarray) -> np.ndarray:
        values = self.per_class(weights)
        present = ~np.isnan(values)
        counted = present.sum(1)
        return np.where(
            counted, np.where(present, values, 0).sum(1) / np.maximum(counted, 1), np.nan
        )

    def per_class(self, weights: np.ndarray) -> np.ndarray:
        """float64[R, K]: the AP of each class; NaN where it has no object."""
        weights = np.asarray(weights, np.float64)
        return np.stack([self._average(of_class, weights) for of_class in self._classes], 1)

    def _average(self, of_class: _OfClass, weights: np.ndarray) -> np.ndarray:
        size = max(1, _CELLS // max(1, len(of_class.images)))
        parts = [
            self._part(of_class, weights[start : start + size])
            for start in range(0, len(weights), size)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _part(self, of_class: _OfClass, weights: np.ndarray) -> np.ndarray:
        objects = weights @ of_class.objects
        total = np.zeros(len(weights))
        of_detections = weights[:, of_class.images]
        judged = np.cumsum(of_detections, 1)
        for hits, ignored in zip(of_class.hits, of_class.ignored, strict=True):
            places = np.flatnonzero(hits)
            if not len(places):
                continue
            seen = (
                judged if not ignored.any() else np.cumsum(np.where(ignored, 0, of_detections), 1)
            )
            right = np.cumsum(of_detections[:, places], 1)
            precision = right / (seen[:, places] + np.spacing(1))
            precision = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
            # How many of the 101 recalls are reached with each hit; precision is taken where one is
            # reached first.
            reached = np.searchsorted(
                RECALLS, right / np.maximum(objects, 1)[:, None], side="right"
            )
            total += (np.diff(reached, axis=1, prepend=0) * precision).sum(1) / len(RECALLS)
        return np.where(objects > 0, total / len(THRESHOLDS), np.nan)
