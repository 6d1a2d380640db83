"""COCO's metrics: average precision and recall over a whole validation set."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from common.detection.data.annotated import Annotated
from common.detection.evaluation.matching import Matches
from common.distributed.collectives import all_or_none, broadcast_object, gather_to_main
from common.run.progress import name_by_class

# The twelve numbers of COCO's evaluation, in its order: average precision, then average recall.
NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")


@dataclass
class Detections:
    """Detections of this rank; after `results` the main process has all, the others none."""

    # int64: image of the source that each row belongs to.
    images: list[np.ndarray] = field(default_factory=list)
    # float32[n, 6]: left, top, right, bottom, score, class id.
    rows: list[np.ndarray] = field(default_factory=list)
    count: int = 0  # images that were evaluated, with or without detections
    # object[n]: packed run lengths; of a detector of masks.
    masks: list[np.ndarray] = field(default_factory=list)
    # float64[K, 101] at IoU 0.5 and recalls 0 .. 1; -1: no objects.
    precision: np.ndarray | None = None
    matches: Matches = field(init=False)  # of these detections with the objects, after `results`

    def update(self, indices: Sequence[int], detections: list[dict[str, Any]]) -> None:
        """Add the detections of images.

        Of each image boxes [n, 4] in pixels of the original, scores [n], labels [n], and from a
        detector of masks rles, n of COCO's packed run lengths.
        """
        for index, image_detections in zip(indices, detections, strict=True):
            boxes = image_detections["boxes"].float()
            scores = image_detections["scores"][:, None].float()
            labels = image_detections["labels"][:, None].float()
            rows = torch.cat([boxes, scores, labels], dim=1).cpu().numpy()
            self.rows.append(rows)
            self.images.append(np.full(len(rows), index))
            self.count += 1
            if "rles" in image_detections:
                counts = [rle["counts"] for rle in image_detections["rles"]]
                self.masks.append(np.array(counts, object))

    def results(self, source: Annotated) -> dict:
        """The metrics on every rank. A collective.

        They are the twelve COCO numbers in 0..1 (None: no objects), `per_class` AP, and `count`.
        Up to 100 classes that occur have `AP_class/<name>`, and masks have the twelve again as
        `mask_AP` and so on. `thresholds` has the score of the best F1 of each class. Source: Lin et
        al., "Microsoft COCO", 2014.
        """
        is_main = self._gather()
        results = None
        with all_or_none("evaluating the detections"):
            images, rows = self.to_arrays()
            self.matches = Matches.from_best(source, images, rows)
            if is_main:
                results = self._evaluate(source)
        return broadcast_object(results)

    def _gather(self) -> bool:
        """Gather the detections of all ranks, sorted by image. True on the main process. A collective."""
        images, rows = self.to_arrays()
        arrays = [np.array([self.count]), images, rows]
        if self.masks:
            arrays.append(np.concatenate(self.masks))
        arrays_by_rank = gather_to_main(arrays)
        self.count = 0
        self.images = []
        self.rows = []
        self.masks = []
        for (count,), images, rows, *masks in arrays_by_rank or []:
            self.count += int(count)
            self.images.append(images)
            self.rows.append(rows)
            self.masks += masks
        images, rows = self.to_arrays()
        order = np.argsort(images, kind="stable")
        self.images = [images[order]]
        self.rows = [rows[order]]
        if self.masks:
            self.masks = [np.concatenate(self.masks)[order]]
        return arrays_by_rank is not None

    def _evaluate(self, source: Annotated) -> dict:
        # COCO's evaluation holds ids in float64, which rounds large ones; ranks keep their order.
        image_ids = np.argsort(np.argsort(source.image_ids))
        category_ids = np.arange(len(source.classes)) + 1  # to COCO, 0 is no class
        source = replace(source, image_ids=image_ids, category_ids=category_ids)
        images, rows = self.to_arrays()
        results, self.precision = _evaluate_boxes(source, images, rows)
        results["count"] = self.count
        results["thresholds"] = [row["threshold"] for row in self.matches.class_results]
        if self.masks:
            results |= _evaluate_masks(source, images, rows, self.masks[0])
        return results

    def to_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """`images` int64[n] and `rows` float32[n, 6] of all detections."""
        images = [np.zeros(0, np.int64)] + self.images
        rows = [np.zeros((0, 6), np.float32)] + self.rows
        return np.concatenate(images), np.concatenate(rows)


def generate_coco_results(
    source: Annotated, images: np.ndarray, rows: np.ndarray, masks: Iterable[bytes] = ()
) -> Iterator[dict[str, Any]]:
    """Detections as COCO's results, with the ids of `source`; see `Detections`."""
    for image, row, packed in zip_longest(images, rows, masks):
        left, top, right, bottom, score, class_id = row.tolist()
        result = {
            "image_id": int(source.image_ids[image]),
            "category_id": int(source.category_ids[int(class_id)]),
            "bbox": [left, top, right - left, bottom - top],
            "score": score,
        }
        if packed is not None:
            size = source.sizes[image, ::-1].tolist()
            result["segmentation"] = {"size": size, "counts": packed.decode()}
        yield result


def _evaluate_boxes(
    source: Annotated, images: np.ndarray, rows: np.ndarray
) -> tuple[dict, np.ndarray]:
    """The results of boxes, and the precision at IoU 0.5 by class and recall: float64[K, 101]."""
    boxes = rows[:, :4].astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    columns = (source.image_ids[images], boxes, rows[:, 4], rows[:, 5] + 1)
    results, evaluation = _run_coco(
        build_coco_annotations(source), np.column_stack(columns), "bbox", source.max_detections
    )
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # [thresholds, recalls, classes]
    per_class = np.ma.masked_less(precision, 0).mean((0, 1)).tolist()  # None: no objects
    results["per_class"] = per_class
    results |= name_by_class("AP", source.classes, per_class)
    return results, precision[0].T.copy()


def _evaluate_masks(
    source: Annotated, images: np.ndarray, rows: np.ndarray, masks: np.ndarray
) -> dict:
    """The twelve numbers with the overlaps and areas of masks."""
    content = build_coco_annotations(source)
    rles = []
    for index in range(len(source)):
        rles += source.build_rles(index)
    for annotation, rle in zip(content["annotations"], rles, strict=True):
        annotation["segmentation"] = rle
    detections = list(generate_coco_results(source, images, rows, masks))
    for detection in detections:
        del detection["bbox"]  # else its area would count, not the mask's
    results, _ = _run_coco(content, detections, "segm", source.max_detections)
    return {f"mask_{name}": value for name, value in results.items()}


def _run_coco(
    annotations: dict, detections: Any, kind: str, max_detections: int
) -> tuple[dict[str, Any], Any]:
    """The twelve numbers, and COCO's evaluation itself, of boxes ("bbox") or masks ("segm")."""
    from faster_coco_eval import COCO, COCOeval_faster  # imported late: it takes 0.4 s

    truth = COCO(annotations)
    evaluation = COCOeval_faster(truth, truth.loadRes(detections), kind)
    evaluation.params.maxDets = [1, 10, max_detections]
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    results: dict[str, Any] = {}
    for name, value in zip(NAMES, evaluation.stats, strict=False):
        results[name] = None if value < 0 else float(value)
    return results, evaluation


def build_coco_annotations(source: Annotated) -> dict:
    """The annotations in COCO's form, with class ids from 1: to its evaluation, 0 is no class."""
    images = []
    for image_id, size in zip(source.image_ids.tolist(), source.sizes.tolist(), strict=True):
        width, height = size
        images.append({"id": image_id, "width": width, "height": height})
    categories = [{"id": i, "name": name} for i, name in enumerate(source.classes, start=1)]
    columns = zip(
        np.repeat(source.image_ids, np.diff(source.offsets)).tolist(),
        np.asarray(source.truth).tolist(),
        source.labels.tolist(),
        source.crowd.tolist(),
        source.areas.tolist(),
        strict=True,
    )
    annotations = []
    for i, (image_id, box, label, is_crowd, area) in enumerate(columns, start=1):
        annotation = {
            "id": i,
            "image_id": image_id,
            "bbox": box,
            "category_id": label + 1,
            "iscrowd": int(is_crowd),
            "area": area,
        }
        annotations.append(annotation)
    return {"images": images, "categories": categories, "annotations": annotations}
