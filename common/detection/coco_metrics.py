"""How well are the objects of a whole set found?"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from common.collectives import broadcast_object, gather_to_main, together
from common.detection.annotated import Annotated

# The twelve numbers of the COCO evaluation, in its order: average precision, then average recall.
NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
MOST = 100  # detections of an image that count


@dataclass
class Detections:
    """What was found in the images that this rank looked at, in columns on the host."""

    images: list[np.ndarray] = field(default_factory=list)  # int64: which image of the source each row is of
    rows: list[np.ndarray] = field(default_factory=list)  # float32[n, 6]: left, top, right, bottom, score, class id
    seen: list[int] = field(default_factory=list)  # images looked at, also those without a detection

    def update(self, indices: Sequence[int], found: list[dict[str, torch.Tensor]]) -> None:
        """Add the detections of images: boxes [n, 4] in pixels of the original, scores [n] and labels [n] of each."""
        for index, of_image in zip(indices, found, strict=True):
            parts = (of_image["boxes"], of_image["scores"][:, None], of_image["labels"][:, None])
            rows = torch.cat([part.float() for part in parts], 1).cpu().numpy()
            best = np.argsort(-rows[:, 4], kind="stable")[:MOST]
            self.rows.append(rows[best])
            self.images.append(np.full(len(best), index))
            self.seen.append(int(index))

    def results(self, source: Annotated) -> dict:
        """The twelve COCO numbers in 0..1 (None: nothing to find), `per_class` AP, and `count`; a collective, for every rank.

        The main process evaluates all ranks' detections, each image once. Source: Lin et al., "Microsoft COCO", 2014.
        """
        empty = (np.zeros(0, np.int64), np.zeros((0, 6), np.float32))
        columns = (
            np.concatenate([first, *parts]) for first, parts in zip(empty, (self.images, self.rows), strict=True)
        )
        gathered = gather_to_main((*columns, np.array(self.seen, np.int64)))
        with together("evaluating the detections"):
            results = _evaluate(source, *_each_image_once(gathered)) if gathered is not None else None
        return broadcast_object(results)


def _each_image_once(gathered: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, np.ndarray, int]:
    """All ranks' rows, without those of images that a rank before has looked at too, and how many images there are."""
    images, rows, seen = [], [], np.zeros(0, np.int64)
    for theirs, their_rows, their_seen in gathered:
        new = ~np.isin(theirs, seen)
        images.append(theirs[new])
        rows.append(their_rows[new])
        seen = np.union1d(seen, their_seen)
    return np.concatenate(images), np.concatenate(rows), len(seen)


def _evaluate(source: Annotated, images: np.ndarray, rows: np.ndarray, count: int) -> dict:
    from faster_coco_eval import COCO, COCOeval_faster  # late: 0.4 s

    truth = COCO(_coco(source))
    boxes = rows[:, :4].astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    order = np.argsort(images, kind="stable")
    table = np.column_stack([source.image_ids[images], boxes, rows[:, 4], rows[:, 5] + 1])[order]
    evaluation = COCOeval_faster(truth, truth.loadRes(table), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # [thresholds, recalls, classes] of all areas
    per_class = [_mean(precision[:, :, number]) for number in range(len(source.classes))]
    numbers = [None if value < 0 else float(value) for value in evaluation.stats[: len(NAMES)]]
    return dict(zip(NAMES, numbers, strict=True)) | {"count": count, "per_class": per_class}


def _coco(source: Annotated) -> dict:
    """The annotations in COCO's form, with class ids from 1: its evaluation takes 0 for no class."""
    owners = np.repeat(source.image_ids, np.diff(source.offsets)).tolist()
    boxes = source.boxes.astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    columns = zip(
        owners, boxes.tolist(), source.labels.tolist(), source.crowd.tolist(), source.areas.tolist(), strict=True
    )
    return {
        "images": [
            {"id": number, "width": width, "height": height}
            for number, (width, height) in zip(source.image_ids.tolist(), source.sizes.tolist(), strict=True)
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(source.classes, 1)],
        "annotations": [
            {"id": row, "image_id": owner, "bbox": box, "category_id": label + 1, "iscrowd": int(crowd), "area": area}
            for row, (owner, box, label, crowd, area) in enumerate(columns, 1)
        ],
    }


def _mean(values: np.ndarray) -> float | None:
    present = values[values > -1]
    return float(present.mean()) if len(present) else None
