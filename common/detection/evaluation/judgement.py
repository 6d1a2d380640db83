"""What an evaluation's detections say beyond COCO's numbers: thresholds, calibration and kinds of error.

All at IoU 0.5, over the best 100 detections of each class and image, as COCO's evaluation counts them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from common.detection.data.annotated import Annotated
from common.detection.evaluation.errors import Errors
from common.detection.evaluation.matching import IN_CROWD, Matches, best_f1

BINS = 15  # of scores
_COUNTED = 100  # detections of a class in an image


class AtThreshold(NamedTuple):
    """float64[K], of each class at its threshold; NaN without objects; without a right detection, only recall is known: 0."""

    threshold: np.ndarray  # the score that gives the best F1
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


@dataclass(eq=False)
class Judgement:
    """An evaluation's detections, judged; each property is computed when it is first read."""

    matches: Matches

    @classmethod
    def of(cls, source: Annotated, images: np.ndarray, rows: np.ndarray) -> "Judgement":
        """Of all detections in the images of `source`, in columns as `Detections.columns` returns."""
        order = np.lexsort((-rows[:, 4], rows[:, 5], images))
        starts = np.flatnonzero(np.diff(images[order], prepend=-1) | np.diff(rows[order, 5], prepend=-1).astype(bool))
        ranks = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
        counted = np.sort(order[ranks < _COUNTED])
        return cls(Matches(source, images[counted], rows[counted]))

    def thresholds(self) -> list[float | None]:
        """The score of each class that gives its best F1; None without a right detection."""
        return [_number(value) for value in self.of_classes.threshold]

    def details(self) -> dict:
        """What a report has beside COCO's numbers. `classes` has one dict per class; None stands for what is not defined."""
        columns = self.of_classes._asdict() | {"objects": self.errors.objects}
        return {
            "threshold": self.matches.threshold,
            "classes": [
                {name: _number(column[label]) for name, column in columns.items()}
                for label in range(len(columns["objects"]))
            ],
            "calibration": {
                "ece": self.calibration_error(),
                "ece_above_threshold": self.calibration_error(self.matches.threshold),
                "bins": [dict(zip(("right", "wrong"), counts, strict=True)) for counts in self.confidence.T.tolist()],
            },
            "errors": {
                name: {"count": self.errors.counts[name], "dAP50": cost} for name, cost in self.errors.costs.items()
            },
        }

    @cached_property
    def errors(self) -> Errors:
        return Errors(self.matches)

    @cached_property
    def of_classes(self) -> AtThreshold:
        objects = self.errors.objects
        best = AtThreshold(*np.full((4, len(objects)), np.nan))
        best.recall[objects > 0] = 0
        order = np.lexsort((-self._scores, self.errors.labels))
        order = order[self._judged[order]]
        ends = np.searchsorted(self.errors.labels[order], np.arange(len(objects) + 1))
        for label in np.flatnonzero(objects):
            rows = order[ends[label] : ends[label + 1]]
            at, f1 = best_f1(self._scores[rows], self._right[rows], objects[label])
            if f1:
                right = self._right[rows[: at + 1]].sum()
                values = self._scores[rows[at]], right / (at + 1), right / objects[label], f1
                for column, value in zip(best, values, strict=True):
                    column[label] = value
        return best

    @cached_property
    def confidence(self) -> np.ndarray:
        """int64[2, BINS]: numbers of right and of wrong detections by score, in equal bins of 0..1."""
        parts = (self._right, self._judged & ~self._right)
        return np.stack([np.bincount(self._bins[part], minlength=BINS) for part in parts])

    def calibration_error(self, least: float = 0.0) -> float | None:
        """Expected calibration error of the detections with a score of `least` or more; None if there are none.

        The mean over detections of the difference between mean score and share of right ones in
        their bin of scores.
        Source: Küppers et al. 2020, "Multivariate Confidence Calibration for Object Detection", of
        the score alone.
        """
        chosen = self._judged & (self._scores >= least)
        columns = (self._scores.astype(np.float64), self._right)
        scores, right = (np.bincount(self._bins[chosen], of[chosen], BINS) for of in columns)
        return float(np.abs(scores - right).sum() / chosen.sum()) if chosen.any() else None

    # ---- internals

    @property
    def _scores(self) -> np.ndarray:
        return self.matches.rows[:, 4]

    @property
    def _right(self) -> np.ndarray:
        return self.matches.hits >= 0

    @property
    def _judged(self) -> np.ndarray:
        return self.matches.hits != IN_CROWD

    @cached_property
    def _bins(self) -> np.ndarray:
        return (self._scores.astype(np.float64) * BINS).astype(np.int64).clip(0, BINS - 1)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
