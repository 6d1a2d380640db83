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
class RowBuilder:
    """Turns the outputs of a recipe's `predict` into one row per image.

    A row has the image's file, and its predictions or an error. A prediction has class, score and,
    of a detector, box (left, top, right, bottom in pixels of the upright image) and mask (COCO's
    packed run lengths), best first.
    """

    source: Any  # images.Images or images.Scenes
    thresholds: np.ndarray  # float[classes]: the lowest score of a prediction that is kept
    top: int  # the highest number of predictions of an image; 0: all
    multi_label: bool = False

    def build(self, batch: Any, outputs: Any) -> Iterator[tuple[int, dict]]:
        """Yield (index of the image, row) for each image of a batch.

        `outputs` are the model's: logits [B, K], or detections of each image.
        """
        # An image's name is its index.
        errors = dict(text.split(": ", 1) for text in batch.broken)
        outputs_per_image = self._split_outputs(outputs)
        for index, image_outputs in zip(batch.positions.tolist(), outputs_per_image, strict=True):
            row: dict = {"file": self.source.files.get_name(index)}
            if str(index) in errors:
                yield index, row | {"error": errors[str(index)]}
                continue
            if not np.isfinite(image_outputs["scores"]).all():
                yield index, row | {"error": "the model's scores are not finite numbers"}
                continue
            if "boxes" in image_outputs:
                row["width"], row["height"] = self.source.sizes[index].tolist()
            yield index, row | {"predictions": self._list_predictions(image_outputs)}

    def _split_outputs(self, outputs: Any) -> list[dict]:
        """The scores of each image, or its detections, as arrays."""
        if isinstance(outputs, torch.Tensor):
            logits = outputs.float()
            scores = logits.sigmoid() if self.multi_label else logits.softmax(1)
            return [{"scores": image_scores} for image_scores in scores.cpu().numpy()]
        per_image = []
        for detections in outputs:
            arrays = {}
            for key, value in detections.items():
                is_tensor = isinstance(value, torch.Tensor)
                arrays[key] = np.asarray(value.cpu()) if is_tensor else value
            per_image.append(arrays)
        return per_image

    def _list_predictions(self, outputs: dict) -> list[dict]:
        scores = outputs["scores"].astype(np.float32)
        labels = outputs.get("labels", np.arange(len(scores)))
        indices = np.flatnonzero(scores >= self.thresholds[labels])
        best_first = np.argsort(-scores[indices], kind="stable")
        predictions = []
        for i in indices[best_first][: self.top or None].tolist():
            prediction = {
                "class": self.source.classes[labels[i]],
                "score": shorten_float(scores[i]),
            }
            if "boxes" in outputs:
                box = outputs["boxes"][i].astype(np.float32)
                prediction["box"] = [shorten_float(side) for side in box]
            if "rles" in outputs:
                rle = outputs["rles"][i]
                height, width = rle["size"]
                counts = rle["counts"].decode()
                prediction["mask"] = {"size": [int(height), int(width)], "counts": counts}
            predictions.append(prediction)
        return predictions


def format_json(value: dict) -> str:
    """One line, in which letters of all scripts are themselves."""
    return json.dumps(value, ensure_ascii=False)


def shorten_float(value: np.float32) -> float:
    """The number with as few digits as give the same float32."""
    return float(str(value))


@dataclass(frozen=True)
class Format:
    """A format of the output: texts of images, with `separator` between them, `head` and `tail`."""

    format_row: Callable[[int, dict], str]  # (index of an image, row) -> its text; "" leaves it out
    head: str = ""
    separator: str = ""
    tail: str = ""


def _format_csv(columns: Sequence[str], row: dict) -> str:
    """One line per prediction, and one for an image without any, so that each image has a line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    for prediction in row.get("predictions") or [{}]:
        values = {"file": row["file"], "error": row.get("error", "")} | prediction
        if "box" in prediction:
            values |= dict(zip(_SIDES, prediction["box"], strict=True))
        if "mask" in prediction:
            values["mask"] = format_json(prediction["mask"])
        writer.writerow({key: escape_csv_cell(value) for key, value in values.items()})
    return text.getvalue()


def _build_coco_result(image_id: int, category_id: int, prediction: dict) -> dict:
    """A prediction in the results format of COCO, with the ids that the annotations use."""
    left, top, right, bottom = (float(np.float32(side)) for side in prediction["box"])
    result: dict = {
        "image_id": image_id,
        "category_id": category_id,
        "bbox": [left, top, right - left, bottom - top],
        "score": float(np.float32(prediction["score"])),
    }
    if "mask" in prediction:
        result["segmentation"] = prediction["mask"]
    return result


def build_format(
    name: str, task: str, image_ids: Sequence[int], category_ids: dict[str, int]
) -> Format:
    """Build the format jsonl, csv or coco; ids of images by index, of classes by name."""
    if name == "coco":

        def format_coco(index: int, row: dict) -> str:
            texts = []
            for prediction in row.get("predictions", ()):
                category_id = category_ids[prediction["class"]]
                result = _build_coco_result(image_ids[index], category_id, prediction)
                texts.append(format_json(result))
            return ",\n".join(texts)

        return Format(format_coco, head="[\n", separator=",\n", tail="\n]\n")
    if name == "csv":
        columns = ["file", "class", "share" if task == "segmentation" else "score"]
        if task == "detection":
            columns += [*_SIDES, "mask"]
        columns.append("error")
        head = ",".join(columns) + "\n"
        return Format(lambda index, row: _format_csv(columns, row), head=head)
    return Format(lambda index, row: format_json(row) + "\n")
