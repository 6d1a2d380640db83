"""Matching of detections with objects: hits, misses, false alarms, and thresholds of scores.

All at IoU 0.5 unless said.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from common.detection.data.annotated import Annotated

IOU = 0.5  # minimum overlap of a detection with the object that it shows
NEAR = 0.1  # minimum overlap of a badly placed detection with an object of its class
NONE, IN_CROWD = -1, -2  # instead of an object: none, or a crowd region, which is not judged


class Mistake(NamedTuple):
    """An object that no detection shows, or a detection that shows no object of its class."""

    kind: str  # "missed", or of a detection "double", "class", "place", "nothing"
    image: int
    object: int  # the missed one; or shown by a better one, of another class, or too far away
    detection: int = NONE  # row of the columns of detections
    score: float = 0.0  # missed: of the best detection below the threshold that overlaps enough
    overlap: float = 0.0  # of the detection with the object


@dataclass(eq=False)
class Matches:
    """Detections matched with the objects of a source, in the order of their scores.

    First with objects of their own class, as COCO does at this `iou`; then the others with objects
    of other classes. Each object is shown at most once. Crowd regions are neither objects nor
    background.
    """

    source: Annotated
    images: np.ndarray  # int64[n]: which image each detection is of
    rows: np.ndarray  # float32[n, 6]: left, top, right, bottom, score, class id
    iou: float = IOU

    @classmethod
    def of_counted(cls, source: Annotated, images: np.ndarray, rows: np.ndarray) -> Self:
        """Matches of the best detections of each class and image: `source.max_detections`, as COCO
        counts them.
        """
        order = np.lexsort((-rows[:, 4], rows[:, 5], images))
        starts = np.flatnonzero(
            np.diff(images[order], prepend=-1) | np.diff(rows[order, 5], prepend=-1).astype(bool)
        )
        ranks = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
        counted = np.sort(order[ranks < source.max_detections])
        return cls(source, images[counted], rows[counted])

    @cached_property
    def hits(self) -> np.ndarray:
        """int64[n]: the object of its class that each detection shows; else `NONE` or `IN_CROWD`."""
        return self._assign(
            np.full(len(self.rows), NONE), np.ones(len(self.rows), bool), same_class=True
        )

    @cached_property
    def threshold(self) -> float:
        """The minimum score of the best F1 over all objects; 0.5 if no detection is right."""
        scores, _, right = self._judged
        place, f1 = best_f1(scores, right, self.object_count)
        return float(scores[place]) if f1 else 0.5

    @cached_property
    def classes(self) -> list[dict[str, float | None]]:
        """Of each class: objects, score of the best F1, and precision, recall and F1 from there on."""
        found = []
        objects = np.bincount(
            self.source.labels[~self.source.crowd], minlength=len(self.source.classes)
        )
        for label, count in enumerate(objects.tolist()):
            scores, _, right = (column[self._judged[1] == label] for column in self._judged)
            at, f1 = best_f1(scores, right, count)
            true = int(right[: at + 1].sum())
            row = {
                "threshold": None,
                "precision": None,
                "recall": 0.0 if count else None,
                "f1": None,
                "objects": count,
            }
            if f1:
                row |= {
                    "threshold": float(scores[at]),
                    "f1": f1,
                    "precision": true / (at + 1),
                    "recall": true / count,
                }
            found.append(row)
        return found

    @cached_property
    def good(self) -> np.ndarray:
        """bool[n]: the detections with a score of `threshold` or more."""
        return self.rows[:, 4] >= self.threshold

    @cached_property
    def shown(self) -> np.ndarray:
        """int64[n]: the object of any class that each good detection shows; else `NONE` or `IN_CROWD`."""
        hits = np.where(self.good | (self.hits == IN_CROWD), self.hits, NONE)
        return self._assign(hits, self.good & (hits == NONE), same_class=False)

    @cached_property
    def hit(self) -> np.ndarray:
        """bool[M]: the objects that a good detection of their class shows."""
        return self._marked(self.hits[self.good])

    @cached_property
    def missed(self) -> np.ndarray:
        """bool[M]: the objects that no good detection shows."""
        return ~(self._marked(self.shown) | self.source.crowd)

    @property
    def false_alarm_count(self) -> int:
        return int((self.good & (self.hits == NONE)).sum())

    @property
    def object_count(self) -> int:
        return int((~self.source.crowd).sum())

    def confusion(self) -> np.ndarray:
        """int64[K + 1, K + 1]: classes of objects (rows) and of their detections; background is last."""
        classes = len(self.source.classes)
        judged = (self.shown >= 0) | (self.good & (self.shown == NONE))
        true, seen = np.append(self.source.labels, classes), self.rows[judged, 5].astype(np.int64)
        matrix = np.zeros((classes + 1, classes + 1), np.int64)
        np.add.at(matrix, (true[self.shown[judged]], seen), 1)  # NONE, -1, is the background
        np.add.at(matrix, (self.source.labels[self.missed], classes), 1)
        return matrix

    def misses(self, limit: int) -> list[Mistake]:
        """The missed objects, worst first: by the share of the image that they cover."""
        objects = np.flatnonzero(self.missed)
        owners = np.repeat(np.arange(len(self.source)), np.diff(self.source.offsets))[objects]
        shares = self.source.areas[objects] / self.source.sizes[owners].prod(1, dtype=np.float64)
        worst = np.argsort(-shares, kind="stable")[:limit]
        scores = dict(zip(self.hits.tolist(), self.rows[:, 4].tolist(), strict=True))
        places = zip(owners[worst].tolist(), objects[worst].tolist(), strict=True)
        return [Mistake("missed", image, row, score=scores.get(row, 0.0)) for image, row in places]

    def false_alarms(self, limit: int) -> list[Mistake]:
        """Detections that hit no object of their class, best first; one around each object."""
        alarms: list[Mistake] = []
        for row in self._best_first[(self.good & (self.hits == NONE))[self._best_first]].tolist():
            if len(alarms) == limit:
                break
            alarm = self._explained(row)
            if alarm.object == NONE or alarm.object not in [known.object for known in alarms]:
                alarms.append(alarm)
        return alarms

    def of_image(self, image: int, good: bool = True) -> np.ndarray:
        """int64[m]: the detections of an image, of any score or only good ones; best first."""
        first, end = np.searchsorted(self.images, (image, image + 1), sorter=self._by_image)
        rows = self._by_image[first:end]
        return rows[self.good[rows]] if good else rows

    # ---- internals

    @cached_property
    def _best_first(self) -> np.ndarray:
        return np.argsort(-self.rows[:, 4], kind="stable")

    @cached_property
    def _judged(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores, class ids and bool, True for hits, of detections outside crowd regions, best first."""
        rows = self._best_first[self.hits[self._best_first] != IN_CROWD]
        return self.rows[rows, 4], self.rows[rows, 5].astype(np.int64), self.hits[rows] >= 0

    @cached_property
    def _by_image(self) -> np.ndarray:
        return self._best_first[np.argsort(self.images[self._best_first], kind="stable")]

    def _marked(self, objects: np.ndarray) -> np.ndarray:
        marked = np.zeros(len(self.source.labels), bool)
        marked[objects[objects >= 0]] = True
        return marked

    def _assign(self, shown: np.ndarray, candidates: np.ndarray, same_class: bool) -> np.ndarray:
        """`shown`, with an object for each candidate bool[n] that overlaps a free one enough."""
        shown, taken = shown.copy(), self._marked(shown)
        order = self._by_image[candidates[self._by_image]]
        for rows in np.split(order, np.flatnonzero(np.diff(self.images[order])) + 1):
            objects = self._objects(self.images[rows[0]]) if len(rows) else rows
            if not len(objects):
                continue
            overlaps, crowd = self._overlaps(rows, objects), self.source.crowd[objects]
            fits = (
                self.rows[rows, 5][:, None] == self.source.labels[objects]
                if same_class
                else ~crowd[None]
            )
            overlaps = np.where(fits, overlaps, 0)
            for place in np.flatnonzero((overlaps >= self.iou).any(1)):
                free = np.where(crowd | taken[objects], 0, overlaps[place])
                if free.max() >= self.iou:
                    # Of equal ones the last, as COCO.
                    shown[rows[place]] = objects[np.flatnonzero(free == free.max())[-1]]
                    taken[shown[rows[place]]] = True
                elif (overlaps[place][crowd] >= self.iou).any():
                    shown[rows[place]] = IN_CROWD
        return shown

    def _objects(self, image: int) -> np.ndarray:
        return np.arange(self.source.offsets[image], self.source.offsets[image + 1])

    def _overlaps(self, rows: np.ndarray, objects: np.ndarray) -> np.ndarray:
        """float64[rows, objects]: intersection over union; for crowd regions, over the detection
        alone, as in COCO.

        0 for boxes without an area.
        """
        from faster_coco_eval.core import mask  # imported late: it takes 0.1 s

        found, crowd = (
            self.rows[rows, :4].astype(np.float64),
            self.source.crowd[objects].astype(np.uint8),
        )
        found[:, 2:] -= found[:, :2]
        return np.nan_to_num(
            mask.iou(found, np.asarray(self.source.truth)[objects], crowd.tolist())
        )

    def _explained(self, row: int) -> Mistake:
        """Why a detection is no hit: second, of another class, badly placed, or of nothing."""
        image = int(self.images[row])
        objects = self._objects(image)
        objects = objects[~self.source.crowd[objects]]
        overlaps = self._overlaps(np.array([row]), objects)[0] if len(objects) else np.zeros(0)
        same = self.source.labels[objects] == self.rows[row, 5]
        for kind, fits, least in (
            ("double", same, IOU),
            ("class", ~same, IOU),
            ("place", same, NEAR),
        ):
            near = np.where(fits, overlaps, 0)
            if near.max(initial=0) >= least:
                return Mistake(
                    kind, image, int(objects[near.argmax()]), row, overlap=float(near.max())
                )
        return Mistake("nothing", image, NONE, row)


def best_f1(scores: np.ndarray, right: np.ndarray, objects: int) -> tuple[int, float]:
    """Index in detections, best first, up to which F1 is best, and this F1; 0 if none is right."""
    f1 = 2 * np.cumsum(right) / (np.arange(1, len(right) + 1) + objects)
    f1[:-1][scores[1:] == scores[:-1]] = 0  # equal scores belong together
    return (int(f1.argmax()), float(f1.max())) if f1.any() else (0, 0.0)
