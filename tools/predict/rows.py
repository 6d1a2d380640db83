"""Rows: the predictions for each image, as one line of JSON, lines of CSV, or COCO's results."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.errors import escape_csv_cell

_SIDES = ("left", "top", "right", "bottom")


@dataclass(frozen=True)
class Rows:
    """Turns the batches of a recipe's `predict` into one row per image: its file, and its
    predictions or an error.

    A prediction has class, score and, of a detector, box (left, top, right, bottom in pixels of the
    upright image) and mask (COCO's packed run lengths), best first.
    """

    source: Any  # images.Images or images.Scenes
    thresholds: np.ndarray  # float[classes]: the lowest score of a prediction that is kept
    top: int  # the highest number of predictions of an image; 0: all
    multi_label: bool = False

    def of(self, batch: Any, found: Any) -> Iterator[tuple[int, dict]]:
        """(number of the image, row) for each image of a batch; `found` is what came with it,
        logits or detections.
        """
        # An image's name is its number.
        reasons = dict(text.split(": ", 1) for text in batch.broken)
        if isinstance(found, torch.Tensor):
            scores = found.float().sigmoid() if self.multi_label else found.float().softmax(1)
            parts = [{"scores": of_image} for of_image in scores.cpu().numpy()]
        else:
            parts = [
                {
                    key: np.asarray(value.cpu()) if isinstance(value, torch.Tensor) else value
                    for key, value in one.items()
                }
                for one in found
            ]
        for index, part in zip(batch.positions.tolist(), parts, strict=True):
            row: dict = {"file": self.source.files.name(index)}
            if str(index) in reasons:
                yield index, row | {"error": reasons[str(index)]}
                continue
            if not np.isfinite(part["scores"]).all():
                yield index, row | {"error": "the model's scores are not finite numbers"}
                continue
            if "boxes" in part:
                row["width"], row["height"] = self.source.sizes[index].tolist()
            yield index, row | {"predictions": self._predictions(part)}

    def _predictions(self, part: dict) -> list[dict]:
        scores = part["scores"].astype(np.float32)
        labels = part.get("labels", np.arange(len(scores)))
        kept = np.flatnonzero(scores >= self.thresholds[labels])
        kept = kept[np.argsort(-scores[kept], kind="stable")][: self.top or None]
        found = []
        for place in kept.tolist():
            one = {"class": self.source.classes[labels[place]], "score": short(scores[place])}
            if "boxes" in part:
                one["box"] = [short(side) for side in part["boxes"][place].astype(np.float32)]
            if "rles" in part:
                rle = part["rles"][place]
                one["mask"] = {
                    "size": list(map(int, rle["size"])),
                    "counts": rle["counts"].decode(),
                }
            found.append(one)
        return found


def as_json(value: dict) -> str:
    """One line, in which letters of all scripts are themselves."""
    return json.dumps(value, ensure_ascii=False)


def short(value: np.float32) -> float:
    """The number with as few digits as give the same float32."""
    return float(str(value))


@dataclass(frozen=True)
class Format:
    """A format of the output: its text begins with `head` and ends with `tail`, with `between`
    between images.
    """

    text: Callable[[int, dict], str]  # (number of an image, row) -> its text; "" leaves it out
    head: str = ""
    between: str = ""
    tail: str = ""


def _csv_lines(columns: Sequence[str], row: dict) -> str:
    """One line per prediction, and one for an image without any, so that each image has a line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    for one in row.get("predictions") or [{}]:
        values = {"file": row["file"], "error": row.get("error", "")} | one
        values |= dict(zip(_SIDES, one.get("box", ()), strict=False))
        values |= {"mask": as_json(one["mask"])} if "mask" in one else {}
        writer.writerow({key: escape_csv_cell(value) for key, value in values.items()})
    return text.getvalue()


def _coco_result(image_id: int, category_id: int, one: dict) -> dict:
    """A prediction in the results format of COCO, with the ids that the annotations use."""
    left, top, right, bottom = map(np.float32, one["box"])
    size = [float(right) - float(left), float(bottom) - float(top)]
    result: dict = {
        "image_id": image_id,
        "category_id": category_id,
        "bbox": [float(left), float(top), *size],
    }
    result["score"] = float(np.float32(one["score"]))
    return result | ({"segmentation": one["mask"]} if "mask" in one else {})


def format_of(
    name: str, is_detector: bool, image_ids: Sequence[int], category_ids: dict[str, int]
) -> Format:
    """The format jsonl, csv or coco; ids of images by number, of classes by name."""
    if name == "coco":

        def objects(index: int, row: dict) -> str:
            found = [(category_ids[one["class"]], one) for one in row.get("predictions", ())]
            return ",\n".join(
                as_json(_coco_result(image_ids[index], of_class, one)) for of_class, one in found
            )

        return Format(objects, "[\n", ",\n", "\n]\n")
    if name == "csv":
        columns = ("file", "class", "score", *((*_SIDES, "mask") if is_detector else ()), "error")
        return Format(lambda _, row: _csv_lines(columns, row), ",".join(columns) + "\n")
    return Format(lambda _, row: as_json(row) + "\n")
