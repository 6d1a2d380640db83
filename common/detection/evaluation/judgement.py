"""What an evaluation's detections say beyond COCO's numbers: thresholds and kinds of error.

All at IoU 0.5, over the best 100 detections of each class and image, as COCO's evaluation counts them.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.detection.data.annotated import Annotated
from common.detection.evaluation.errors import Errors
from common.detection.evaluation.matching import Matches, best_f1

_COUNTED = 100  # detections of a class in an image


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
        return [row["threshold"] for row in self.classes]

    def details(self) -> dict:
        """What a report has beside COCO's numbers. None stands for what is not defined."""
        costs, counts = self.errors.costs, self.errors.counts
        return {
            "threshold": self.matches.threshold,
            "classes": self.classes,
            "errors": {name: {"count": counts[name], "dAP50": cost} for name, cost in costs.items()},
        }

    @cached_property
    def errors(self) -> Errors:
        return Errors(self.matches)

    @cached_property
    def classes(self) -> list[dict[str, float | None]]:
        """Of each class its objects, the score that gives the best F1, and precision, recall and F1 from there on.

        Without a right detection, only recall is known: 0; without objects nothing.
        """
        ranked, found = self.errors.ranked, []
        labels, scores = self.errors.labels[ranked], self.matches.rows[ranked, 4]
        for label, objects in enumerate(self.errors.objects.tolist()):
            row = {
                "threshold": None,
                "precision": None,
                "recall": 0.0 if objects else None,
                "f1": None,
                "objects": objects,
            }
            of_class = np.flatnonzero(labels == label)
            right = self.matches.hits[ranked[of_class]] >= 0
            at, f1 = best_f1(scores[of_class], right, objects)
            if f1:
                count = int(right[: at + 1].sum())
                row |= {"threshold": float(scores[of_class[at]]), "f1": f1}
                row |= {"precision": count / (at + 1), "recall": count / objects}
            found.append(row)
        return found
