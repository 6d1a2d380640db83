"""Matching of detections with objects: hits, misses, false alarms, and thresholds of scores.

All at IoU 0.5 unless a docstring names another one.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from common.detection.data.annotated import Annotated

IOU = 0.5  # minimum overlap of a detection with the object that it shows
NEAR_IOU = 0.1  # minimum overlap of a badly placed detection with an object of its class
# Instead of the index of an object: none, or a crowd region, which is not judged.
NO_OBJECT = -1
IN_CROWD = -2


class Mistake(NamedTuple):
    """An object that no detection shows, or a detection that shows no object of its class."""

    kind: str  # "missed", or of a detection "duplicate", "class", "location", "background"
    image: int
    object: int  # the missed one; or shown by a better one, of another class, or too far away
    detection: int = NO_OBJECT  # index of the detection
    score: float = 0.0  # missed: of the best detection below the threshold that overlaps enough
    overlap: float = 0.0  # of the detection with the object


class _Judged(NamedTuple):
    """The n detections outside crowd regions, best first."""

    scores: np.ndarray  # float32[n]
    labels: np.ndarray  # int64[n]
    is_hit: np.ndarray  # bool[n]


@dataclass(eq=False)
class Matches:
    """Detections matched with the objects of a source, in the order of their scores.

    First with objects of their own class, as COCO does at this `iou`; then the others with objects
    of other classes. Each object is shown at most once. Crowd regions are neither objects nor
    background.
    """

    source: Annotated
    images: np.ndarray  # int64[n]: which image each detection is of
    detections: np.ndarray  # float32[n, 6]: left, top, right, bottom, score, class id
    iou: float = IOU

    @classmethod
    def from_best(cls, source: Annotated, images: np.ndarray, detections: np.ndarray) -> Self:
        """Matches of the best `source.max_detections` of each class and image, as COCO counts them."""
        scores = detections[:, 4]
        labels = detections[:, 5]
        order = np.lexsort((-scores, labels, images))
        is_new_image = np.diff(images[order], prepend=-1) != 0
        is_new_label = np.diff(labels[order], prepend=-1) != 0
        starts = np.flatnonzero(is_new_image | is_new_label)
        run_lengths = np.diff(starts, append=len(order))
        ranks = np.arange(len(order)) - np.repeat(starts, run_lengths)
        best = np.sort(order[ranks < source.max_detections])
        return cls(source, images[best], detections[best])

    @cached_property
    def hit_objects(self) -> np.ndarray:
        """int64[n]: the object of its class that each detection shows; else `NO_OBJECT` or `IN_CROWD`."""
        num_detections = len(self.detections)
        unmatched = np.full(num_detections, NO_OBJECT)
        return self._assign(unmatched, np.ones(num_detections, bool), same_class=True)

    @cached_property
    def threshold(self) -> float:
        """The minimum score of the best F1 over all objects; 0.5 if no detection is right."""
        judged = self._judged
        best, f1 = find_best_f1(judged.scores, judged.is_hit, self.num_objects)
        return float(judged.scores[best]) if f1 else 0.5

    @cached_property
    def class_results(self) -> list[dict[str, float | None]]:
        """Of each class: objects, score of the best F1, and precision, recall and F1 from there on."""
        results = []
        num_classes = len(self.source.classes)
        object_labels = self.source.labels[~self.source.crowd]
        object_counts = np.bincount(object_labels, minlength=num_classes)
        for label, num_objects in enumerate(object_counts.tolist()):
            is_of_class = self._judged.labels == label
            scores = self._judged.scores[is_of_class]
            is_hit = self._judged.is_hit[is_of_class]
            best, f1 = find_best_f1(scores, is_hit, num_objects)
            row = {
                "threshold": None,
                "precision": None,
                "recall": 0.0 if num_objects else None,
                "f1": None,
                "objects": num_objects,
            }
            if f1:
                num_hits = int(is_hit[: best + 1].sum())
                row["threshold"] = float(scores[best])
                row["f1"] = f1
                row["precision"] = num_hits / (best + 1)
                row["recall"] = num_hits / num_objects
            results.append(row)
        return results

    @cached_property
    def is_confident(self) -> np.ndarray:
        """bool[n]: the detections with a score of `threshold` or more."""
        return self.detections[:, 4] >= self.threshold

    @cached_property
    def is_false_alarm(self) -> np.ndarray:
        """bool[n]: the confident detections that show no object of their class."""
        return self.is_confident & (self.hit_objects == NO_OBJECT)

    @cached_property
    def matched_objects(self) -> np.ndarray:
        """int64[n]: the object of any class that each confident detection shows.

        Else `NO_OBJECT` or `IN_CROWD`.
        """
        is_kept = self.is_confident | (self.hit_objects == IN_CROWD)
        hits = np.where(is_kept, self.hit_objects, NO_OBJECT)
        return self._assign(hits, self.is_confident & (hits == NO_OBJECT), same_class=False)

    @cached_property
    def is_detected(self) -> np.ndarray:
        """bool[M]: the objects that a confident detection of their class shows."""
        return self._mark_objects(self.hit_objects[self.is_confident])

    @cached_property
    def is_missed(self) -> np.ndarray:
        """bool[M]: the objects that no confident detection shows."""
        return ~(self._mark_objects(self.matched_objects) | self.source.crowd)

    @property
    def num_false_alarms(self) -> int:
        return int(self.is_false_alarm.sum())

    @property
    def num_objects(self) -> int:
        return int((~self.source.crowd).sum())

    def compute_confusion(self) -> np.ndarray:
        """int64[K + 1, K + 1]: classes of objects (rows) and of their detections; background is last."""
        num_classes = len(self.source.classes)
        is_background = self.is_confident & (self.matched_objects == NO_OBJECT)
        is_counted = (self.matched_objects >= 0) | is_background
        # NO_OBJECT, -1, is the background.
        object_labels = np.append(self.source.labels, num_classes)
        true_labels = object_labels[self.matched_objects[is_counted]]
        detected_labels = self.detections[is_counted, 5].astype(np.int64)
        matrix = np.zeros((num_classes + 1, num_classes + 1), np.int64)
        np.add.at(matrix, (true_labels, detected_labels), 1)
        np.add.at(matrix, (self.source.labels[self.is_missed], num_classes), 1)
        return matrix

    def find_misses(self, limit: int) -> list[Mistake]:
        """The missed objects, worst first: by the share of the image that they cover."""
        objects = np.flatnonzero(self.is_missed)
        owners = np.repeat(np.arange(len(self.source)), np.diff(self.source.offsets))[objects]
        image_areas = self.source.sizes[owners].prod(1, dtype=np.float64)
        shares = self.source.areas[objects] / image_areas
        worst = np.argsort(-shares, kind="stable")[:limit]
        scores = self.detections[:, 4].tolist()
        score_by_object = dict(zip(self.hit_objects.tolist(), scores, strict=True))
        misses = []
        for image, index in zip(owners[worst].tolist(), objects[worst].tolist(), strict=True):
            misses.append(Mistake("missed", image, index, score=score_by_object.get(index, 0.0)))
        return misses

    def find_false_alarms(self, limit: int) -> list[Mistake]:
        """Detections that hit no object of their class, best first; at most one around each object."""
        alarms: list[Mistake] = []
        objects = set()
        is_false_alarm = self.is_false_alarm[self._best_first]
        for detection in self._best_first[is_false_alarm].tolist():
            if len(alarms) == limit:
                break
            alarm = self._explain(detection)
            if alarm.object == NO_OBJECT or alarm.object not in objects:
                alarms.append(alarm)
                objects.add(alarm.object)
        return alarms

    def get_detections(self, image: int, only_confident: bool = True) -> np.ndarray:
        """int64[m]: the detections of an image, only confident ones or all; best first."""
        start, end = np.searchsorted(self.images, (image, image + 1), sorter=self._by_image)
        indices = self._by_image[start:end]
        if only_confident:
            return indices[self.is_confident[indices]]
        return indices

    # ---- internals

    @cached_property
    def _best_first(self) -> np.ndarray:
        return np.argsort(-self.detections[:, 4], kind="stable")

    @cached_property
    def _judged(self) -> _Judged:
        indices = self._best_first[self.hit_objects[self._best_first] != IN_CROWD]
        return _Judged(
            scores=self.detections[indices, 4],
            labels=self.detections[indices, 5].astype(np.int64),
            is_hit=self.hit_objects[indices] >= 0,
        )

    @cached_property
    def _by_image(self) -> np.ndarray:
        return self._best_first[np.argsort(self.images[self._best_first], kind="stable")]

    def _mark_objects(self, objects: np.ndarray) -> np.ndarray:
        """bool[M]: True for `objects`, which may contain `NO_OBJECT` and `IN_CROWD`."""
        is_marked = np.zeros(len(self.source.labels), bool)
        is_marked[objects[objects >= 0]] = True
        return is_marked

    def _assign(
        self, matched: np.ndarray, is_candidate: np.ndarray, same_class: bool
    ) -> np.ndarray:
        """`matched`, with an object for each candidate bool[n] that overlaps a free one enough."""
        matched = matched.copy()
        is_taken = self._mark_objects(matched)
        order = self._by_image[is_candidate[self._by_image]]
        starts = np.flatnonzero(np.diff(self.images[order])) + 1
        for indices in np.split(order, starts):
            if not len(indices):
                continue
            objects = self._get_objects(self.images[indices[0]])
            if len(objects):
                self._assign_in_image(matched, is_taken, indices, objects, same_class)
        return matched

    def _assign_in_image(
        self,
        matched: np.ndarray,
        is_taken: np.ndarray,
        indices: np.ndarray,
        objects: np.ndarray,
        same_class: bool,
    ) -> None:
        """Fill `matched` and `is_taken` for the detections `indices`, best first, of an image."""
        overlaps = self._compute_overlaps(indices, objects)
        is_crowd = self.source.crowd[objects]
        if same_class:
            can_match = self.detections[indices, 5][:, None] == self.source.labels[objects]
        else:
            can_match = ~is_crowd[None]
        overlaps = np.where(can_match, overlaps, 0)
        for i in np.flatnonzero((overlaps >= self.iou).any(1)):
            free_overlaps = np.where(is_crowd | is_taken[objects], 0, overlaps[i])
            largest = free_overlaps.max()
            if largest >= self.iou:
                # Of equal ones the last, as COCO.
                best = objects[np.flatnonzero(free_overlaps == largest)[-1]]
                matched[indices[i]] = best
                is_taken[best] = True
            elif (overlaps[i][is_crowd] >= self.iou).any():
                matched[indices[i]] = IN_CROWD

    def _get_objects(self, image: int) -> np.ndarray:
        return np.arange(self.source.offsets[image], self.source.offsets[image + 1])

    def _compute_overlaps(self, indices: np.ndarray, objects: np.ndarray) -> np.ndarray:
        """float64[detections, objects]: intersection over union; 0 for boxes without an area.

        For crowd regions, it is the intersection over the detection alone, as in COCO.
        """
        from faster_coco_eval.core import mask  # imported late: it takes 0.1 s

        boxes = self.detections[indices, :4].astype(np.float64)
        boxes[:, 2:] -= boxes[:, :2]
        true_boxes = np.asarray(self.source.truth)[objects]
        is_crowd = self.source.crowd[objects].astype(np.uint8).tolist()
        return np.nan_to_num(mask.iou(boxes, true_boxes, is_crowd))

    def _explain(self, detection: int) -> Mistake:
        """Why a detection is no hit: second, of another class, badly placed, or of the background."""
        image = int(self.images[detection])
        objects = self._get_objects(image)
        objects = objects[~self.source.crowd[objects]]
        overlaps = np.zeros(0)
        if len(objects):
            overlaps = self._compute_overlaps(np.array([detection]), objects)[0]
        is_same = self.source.labels[objects] == self.detections[detection, 5]
        for kind, can_explain, min_overlap in (
            ("duplicate", is_same, IOU),
            ("class", ~is_same, IOU),
            ("location", is_same, NEAR_IOU),
        ):
            candidates = np.where(can_explain, overlaps, 0)
            overlap = float(candidates.max(initial=0))
            if overlap >= min_overlap:
                nearest = int(objects[candidates.argmax()])
                return Mistake(kind, image, nearest, detection, overlap=overlap)
        return Mistake("background", image, NO_OBJECT, detection)


def find_best_f1(scores: np.ndarray, is_hit: np.ndarray, num_objects: int) -> tuple[int, float]:
    """Index in detections, best first, up to which F1 is best, and this F1; 0 if none is right."""
    num_detections = np.arange(1, len(is_hit) + 1)
    f1 = 2 * np.cumsum(is_hit) / (num_detections + num_objects)
    f1[:-1][scores[1:] == scores[:-1]] = 0  # equal scores belong together
    if not f1.any():
        return 0, 0.0
    return int(f1.argmax()), float(f1.max())
