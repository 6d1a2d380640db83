"""Kinds of a detector's errors, and how much AP50 each of them costs.

Source: Bolya et al. 2020, "TIDE: A General Toolbox for Identifying Object Detection Errors" (arXiv:2008.08115).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.detection.evaluation.matching import IN_CROWD, IOU, NEAR, NONE, Matches

# Of a false detection, the first that holds; objects are "missed" if no error of class or localisation explains them.
KINDS = ("localisation", "class", "duplicate", "background", "both", "missed")
_LOCALISATION, _CLASS, _DUPLICATE, _BACKGROUND, _BOTH, _MISSED = range(len(KINDS))
_RECALLS = np.linspace(0, 1, 101)  # as in COCO's evaluation


@dataclass(eq=False)
class Errors:
    """The errors behind an AP50, over detections of any score.

    localisation: overlaps an object of its class, by `NEAR` or more, but by less than `IOU`.
    class: overlaps an object of another class enough.
    duplicate: overlaps an object of its class enough that a better detection shows.
    background: overlaps no object by more than `NEAR`.
    both: any other false detection; class and place are wrong.
    missed: an object that no detection shows, or would show with another class or place.

    Unlike in TIDE's own code, detections in crowd regions are no errors, as in COCO's evaluation,
    and a class without objects is left out of the mean, also where all its objects were corrected
    away.
    """

    matches: Matches

    @cached_property
    def kinds(self) -> np.ndarray:
        """int64[n]: the place in `KINDS` of each false detection; `NONE` for others."""
        (same, other), _ = self.matches.closest
        conditions = [(same >= NEAR) & (same < IOU), other >= IOU, same >= IOU, np.maximum(same, other) <= NEAR]
        kinds = np.select(conditions, [_LOCALISATION, _CLASS, _DUPLICATE, _BACKGROUND], _BOTH)
        return np.where(self.matches.hits == NONE, kinds, NONE)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Numbers of detections, or of objects, with the errors that `costs` names."""
        counts = np.bincount(self.kinds[self.kinds != NONE], minlength=len(KINDS))
        counts[_MISSED] = self.missed.sum()
        special = {
            "false_positives": (self.kinds != NONE).sum(),
            "false_negatives": self.objects.sum() - self.found.sum(),
        }
        return {name: int(count) for name, count in (dict(zip(KINDS, counts, strict=True)) | special).items()}

    @cached_property
    def found(self) -> np.ndarray:
        """bool[M]: objects that a detection of any score shows."""
        return self.matches.marked(self.matches.hits)

    @cached_property
    def missed(self) -> np.ndarray:
        """bool[M]: objects that no detection shows, or would show with another class or place."""
        missed = ~(self.found | self.matches.source.crowd)
        missed[self._meant[self._meant != NONE]] = False
        return missed

    @cached_property
    def ap50(self) -> float | None:
        """Mean over the classes that have objects, in 0..1; None if there is no object. Equal to COCO's."""
        return self._ap()

    @cached_property
    def costs(self) -> dict[str, float | None]:
        """Gain in AP50 if one of `KINDS` alone were corrected, or if there were no false positives, or no false negatives.

        An error of class or localisation becomes a hit if it has the highest score of those at an
        object that no detection shows; all others are removed. Missed objects are removed. The
        gains do not add up: precision is not linear in errors.
        """
        of_objects, labels = self.matches.source.labels, self.labels
        costs, hits = {}, self.matches.hits >= 0
        _, first = np.unique(self._meant[self.ranked], return_index=True)
        best = np.zeros(len(hits), bool)
        best[self.ranked[first]] = True
        best &= self._meant != NONE
        for kind, name in enumerate(KINDS[:_MISSED]):
            of_kind = self.kinds == kind
            corrected = of_kind & best
            new = np.where(corrected, of_objects[self._meant], labels) if len(of_objects) else labels
            costs[name] = self._ap(new, hits | corrected, ~of_kind | corrected)
        costs[KINDS[_MISSED]] = self._ap(objects=self.objects - self._of_classes(self.missed))
        costs["false_positives"] = self._ap(kept=hits)
        costs["false_negatives"] = self._ap(objects=self._of_classes(self.found))
        ap50 = self.ap50
        return {name: None if ap is None or ap50 is None else ap - ap50 for name, ap in costs.items()}

    @cached_property
    def objects(self) -> np.ndarray:
        """int64[K]: objects of each class."""
        return self._of_classes(~self.matches.source.crowd)

    @cached_property
    def labels(self) -> np.ndarray:
        """int64[n]: class of each detection."""
        return self.matches.rows[:, 5].astype(np.int64)

    @cached_property
    def ranked(self) -> np.ndarray:
        """int64: detections outside crowds, best first; of equal ones, in the order of COCO's evaluation."""
        order = np.lexsort((self.matches.source.image_ids[self.matches.images], -self.matches.rows[:, 4]))
        return order[self.matches.hits[order] != IN_CROWD]

    # ---- internals

    @cached_property
    def _meant(self) -> np.ndarray:
        """int64[n]: the object, shown by no detection, that an error of class or localisation would show; else `NONE`."""
        _, (same, other) = self.matches.closest
        meant = np.select([self.kinds == _LOCALISATION, self.kinds == _CLASS], [same, other], NONE)
        return np.where(np.append(self.found, True)[meant], NONE, meant)  # NONE is the last place, too

    def _of_classes(self, chosen: np.ndarray) -> np.ndarray:
        return np.bincount(self.matches.source.labels[chosen], minlength=len(self.matches.source.classes))

    def _ap(self, labels=None, right=None, kept=None, objects=None) -> float | None:
        """AP50 of the `kept` detections bool[n] with these `labels` int64[n], of which the `right` bool[n] show an object."""
        labels = self.labels if labels is None else labels
        right = self.matches.hits >= 0 if right is None else right
        ranked = self.ranked if kept is None else self.ranked[kept[self.ranked]]
        return average_precision(labels[ranked], right[ranked], self.objects if objects is None else objects)


def average_precision(labels: np.ndarray, right: np.ndarray, objects: np.ndarray) -> float | None:
    """AP over 101 recalls, as COCO's, mean over the classes with objects; None if there are none.

    `labels` int64[n] and `right` bool[n] are of detections, best first; `objects` int64[K] counts the objects of each class.
    """
    order = np.argsort(labels, kind="stable")
    ends = np.searchsorted(labels[order], np.arange(len(objects) + 1))
    present = np.flatnonzero(objects)
    total = 0.0
    for label in present:
        hits = right[order[ends[label] : ends[label + 1]]].cumsum()
        precision = hits / np.arange(1, len(hits) + 1)
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        places = np.searchsorted(hits / objects[label], _RECALLS)
        total += precision[places[places < len(hits)]].sum() / len(_RECALLS)
    return float(total / len(present)) if len(present) else None
