"""COCO's average precision of boxes as a function of how often each image counts, for resampling a validation set.

Detections are matched with objects once, image by image. Precision and recall are then sums over images, so AP over
resampled images needs no second matching. Equal to COCO's evaluation of a data set in which images occur several times.
Source of the metric: Lin et al., "Microsoft COCO", 2014.
"""

from dataclasses import dataclass

import numpy as np

from common.detection.evaluation.matching import overlaps_of

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
MOST = 100  # detections of an image and class that count
_CELLS = 2**22  # numbers of an array at once


@dataclass(frozen=True)
class _OfClass:
    images: np.ndarray  # int64[n] of the detections, best first
    hits: np.ndarray  # bool[T, n]: whether a detection shows an object of its class
    ignored: np.ndarray  # bool[T, n]: whether it shows a crowd region, where detections are not judged
    objects: np.ndarray  # int64[N] in each image


class AveragePrecision:
    """`AveragePrecision(source, images, rows)(weights [R, N])` gives [R]: AP with image n counted weights[r, n] times.

    `source` has N annotated images; `images` int64[n] and `rows` float32[n, 6] are the detections (left, top, right, bottom,
    score, class id). NaN where no image with objects counts.
    """

    def __init__(self, source, images: np.ndarray, rows: np.ndarray):
        self.count = len(source)
        order = np.argsort(np.argsort(source.image_ids))  # among equal scores, COCO takes the lower id first
        by_rank = np.lexsort((-rows[:, 4], order[images]))
        images, rows = images[by_rank], rows[by_rank]
        owners = np.repeat(np.arange(self.count), np.diff(source.offsets))
        self._classes = [
            self._of_class(source, owners, np.flatnonzero(source.labels == number), images[of], rows[of])
            for number in range(len(source.classes))
            for of in [rows[:, 5] == number]
        ]

    def __call__(self, weights: np.ndarray) -> np.ndarray:
        values = self.per_class(weights)
        present = ~np.isnan(values)
        counted = present.sum(1)
        return np.where(counted, np.where(present, values, 0).sum(1) / np.maximum(counted, 1), np.nan)

    def per_class(self, weights: np.ndarray) -> np.ndarray:
        """float64[R, K]: the AP of each class; NaN where it has no object."""
        weights = np.asarray(weights, np.float64)
        return np.stack([self._average(of_class, weights) for of_class in self._classes], 1)

    def _of_class(self, source, owners, objects: np.ndarray, images: np.ndarray, rows: np.ndarray) -> _OfClass:
        """The matches of one class; `objects` are its rows in the source's columns, `images` and `rows` its detections."""
        kept = np.arange(len(images)) - _firsts(images) < MOST
        images, rows = images[kept], rows[kept]
        hits, ignored = (np.zeros((len(THRESHOLDS), len(rows)), bool) for _ in range(2))
        places = np.split(objects, np.flatnonzero(np.diff(owners[objects])) + 1) if len(objects) else []
        of_image = {int(owners[place[0]]): place for place in places}
        for place in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(images)) + 1):
            theirs = of_image.get(int(images[place[0]])) if len(place) else None
            if theirs is not None:
                crowd = source.crowd[theirs]
                overlaps = overlaps_of(rows[place], source.truth[theirs], crowd)
                hits[:, place], ignored[:, place] = _match(overlaps, crowd)
        areas = (rows[:, 2:4] - rows[:, :2]).astype(np.float64).prod(1)
        ignored |= ~hits & ((areas < 0) | (areas > 1e10))  # as COCO does with boxes turned inside out
        best_first = np.argsort(-rows[:, 4], kind="stable")
        counts = np.bincount(owners[objects[~source.crowd[objects]]], minlength=self.count)
        return _OfClass(images[best_first], hits[:, best_first], ignored[:, best_first], counts)

    def _average(self, of_class: _OfClass, weights: np.ndarray) -> np.ndarray:
        size = max(1, _CELLS // max(1, len(of_class.images)))
        parts = [self._part(of_class, weights[start : start + size]) for start in range(0, len(weights), size)]
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
            seen = judged if not ignored.any() else np.cumsum(np.where(ignored, 0, of_detections), 1)
            right = np.cumsum(of_detections[:, places], 1)
            precision = right / (seen[:, places] + np.spacing(1))
            precision = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
            # How many of the 101 recalls are reached with each hit; precision is taken where one is reached first.
            reached = np.searchsorted(RECALLS, right / np.maximum(objects, 1)[:, None], side="right")
            total += (np.diff(reached, axis=1, prepend=0) * precision).sum(1) / len(RECALLS)
        return np.where(objects > 0, total / len(THRESHOLDS), np.nan)


def _firsts(images: np.ndarray) -> np.ndarray:
    """int64[n]: where the image of each detection begins; an image's stand together."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(images)) + 1])
    return np.repeat(starts, np.diff([*starts, len(images)]))


def _match(overlaps: np.ndarray, crowd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Greedy matching of one class in one image, best detection first: bool[T, n] hits and detections of crowd regions."""
    hits, ignored = (np.zeros((len(THRESHOLDS), len(overlaps)), bool) for _ in range(2))
    least = np.minimum(THRESHOLDS, 1 - 1e-10)
    plain, crowds = overlaps[:, ~crowd], overlaps[:, crowd].max(1, initial=0)
    free = np.ones((len(THRESHOLDS), plain.shape[1]), bool)
    for row in np.flatnonzero((overlaps >= least[0]).any(1)):
        if plain.shape[1]:
            shares = np.where(free & (plain[row] >= least[:, None]), plain[row], -1)
            best = shares.shape[1] - 1 - shares[:, ::-1].argmax(1)  # of equal ones the last
            found = np.flatnonzero(shares.max(1) >= 0)
            hits[found, row], free[found, best[found]] = True, False
        ignored[:, row] = ~hits[:, row] & (crowds[row] >= least)
    return hits, ignored
