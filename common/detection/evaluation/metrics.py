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

    def update(self, indices: Sequence[int], found: list[dict[str, Any]]) -> None:
        """Add the detections of images: boxes [n, 4] in pixels of the original, scores [n], labels
        [n], and from a detector of masks rles, n of COCO's packed run lengths.
        """
        for index, of_image in zip(indices, found, strict=True):
            parts = (of_image["boxes"], of_image["scores"][:, None], of_image["labels"][:, None])
            self.rows.append(torch.cat([part.float() for part in parts], 1).cpu().numpy())
            self.images.append(np.full(len(self.rows[-1]), index))
            self.count += 1
            if "rles" in of_image:
                self.masks.append(np.array([rle["counts"] for rle in of_image["rles"]], object))

    def results(self, source: Annotated) -> dict:
        """The twelve COCO numbers in 0..1 (None: no objects), `per_class` AP, and `count`, on every
        rank. A collective.

        Up to 100 classes that occur have `AP_class/<name>`, and masks have the twelve again as
        `mask_AP` and so on. `thresholds` has the score of the best F1 of each class. Source: Lin et
        al., "Microsoft COCO", 2014.
        """
        masks = [np.concatenate(self.masks)] if self.masks else []
        gathered = gather_to_main((np.array([self.count]), *self.columns(), *masks))
        parts = gathered or []
        self.count = sum(int(*count) for count, *_ in parts)
        self.images, self.rows = [part[1] for part in parts], [part[2] for part in parts]
        images, rows = self.columns()
        order = np.argsort(images, kind="stable")
        masks = [column for part in parts for column in part[3:]]
        self.images, self.rows = [images[order]], [rows[order]]  # image by image
        self.masks = [np.concatenate(masks)[order]] if masks else []
        results = None
        with all_or_none("evaluating the detections"):
            self.matches = Matches.of_counted(source, *self.columns())
            if gathered is not None:
                # COCO's evaluation holds ids in float64, which rounds large ones; ranks keep their
                # order.
                image_ids = np.argsort(np.argsort(source.image_ids))
                category_ids = np.arange(len(source.classes)) + 1  # to COCO, 0 is no class
                source = replace(source, image_ids=image_ids, category_ids=category_ids)
                results, self.precision = _evaluate(source, *self.columns())
                results |= {
                    "count": self.count,
                    "thresholds": [row["threshold"] for row in self.matches.classes],
                }
                results |= _evaluate_masks(source, *self.columns(), *self.masks) if masks else {}
        return broadcast_object(results)

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """`images` int64[n] and `rows` float32[n, 6] of all detections."""
        return np.concatenate([_NO_IMAGES, *self.images]), np.concatenate([_NO_ROWS, *self.rows])


def coco_results(
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


_NO_IMAGES, _NO_ROWS = np.zeros(0, np.int64), np.zeros((0, 6), np.float32)


def _evaluate(source: Annotated, images: np.ndarray, rows: np.ndarray) -> tuple[dict, np.ndarray]:
    """The results of boxes, and the precision at IoU 0.5 by class and recall: float64[K, 101]."""
    boxes = rows[:, :4].astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    table = np.column_stack([source.image_ids[images], boxes, rows[:, 4], rows[:, 5] + 1])
    numbers, evaluation = _coco_numbers(_coco(source), table, "bbox", source.max_detections)
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # [thresholds, recalls, classes]
    per_class = np.ma.masked_less(precision, 0).mean((0, 1)).tolist()  # None: no objects
    results = numbers | {"per_class": per_class} | name_by_class("AP", source.classes, per_class)
    return results, precision[0].T.copy()


def _evaluate_masks(
    source: Annotated, images: np.ndarray, rows: np.ndarray, masks: np.ndarray
) -> dict:
    """The twelve numbers with the overlaps and areas of masks."""
    content = _coco(source)
    shapes = (rle for index in range(len(source)) for rle in source.build_rles(index))
    for annotation, rle in zip(content["annotations"], shapes, strict=True):
        annotation["segmentation"] = rle
    found = list(coco_results(source, images, rows, masks))
    for result in found:
        del result["bbox"]  # else its area would count, not the mask's
    numbers, _ = _coco_numbers(content, found, "segm", source.max_detections)
    return {f"mask_{name}": value for name, value in numbers.items()}


def _coco_numbers(
    content: dict, found: Any, kind: str, max_detections: int
) -> tuple[dict[str, Any], Any]:
    """The twelve numbers, and the evaluation that made them, of boxes or masks in COCO's form."""
    from faster_coco_eval import COCO, COCOeval_faster  # imported late: it takes 0.4 s

    truth = COCO(content)
    evaluation = COCOeval_faster(truth, truth.loadRes(found), kind)
    evaluation.params.maxDets = [1, 10, max_detections]
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    numbers = zip(NAMES, evaluation.stats, strict=False)
    return {name: None if value < 0 else float(value) for name, value in numbers}, evaluation


def _coco(source: Annotated) -> dict:
    """The annotations in COCO's form, with class ids from 1: to its evaluation, 0 is no class."""
    owners = np.repeat(source.image_ids, np.diff(source.offsets)).tolist()
    of_objects = (np.asarray(source.truth), source.labels, source.crowd, source.areas)
    columns = zip(owners, *(column.tolist() for column in of_objects), strict=True)
    return {
        "images": [
            {"id": number, "width": width, "height": height}
            for number, (width, height) in zip(
                source.image_ids.tolist(), source.sizes.tolist(), strict=True
            )
        ],
        "categories": [
            {"id": number, "name": name} for number, name in enumerate(source.classes, 1)
        ],
        "annotations": [
            {
                "id": row,
                "image_id": owner,
                "bbox": box,
                "category_id": label + 1,
                "iscrowd": int(crowd),
                "area": area,
            }
            for row, (owner, box, label, crowd, area) in enumerate(columns, 1)
        ],
    }
