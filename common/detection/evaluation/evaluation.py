"""Evaluation of a detector.

A recipe's `evaluate` gives it batches, and a run gets results and pictures from it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.detection.batches import DetectionBatch
from common.detection.data.annotated import Annotated
from common.detection.data.masks import paste_masks
from common.detection.evaluation import plots
from common.detection.evaluation.metrics import Detections, generate_coco_results
from common.durable import replacing


class Evaluation:
    """One evaluation on the images of `data`. It is given every batch once, on any rank.

    Attributes:
        detections: of all ranks after `results`, on the main process.
    """

    def __init__(self, data: Annotated) -> None:
        self._data = data
        self.detections = Detections()

    def update(self, batch: DetectionBatch, detections: list[dict[str, Tensor]]) -> None:
        """Add the detections of a batch, in pixels of the canvas; see `Detector.detect`."""
        detections = restore_sizes(self._data, batch, detections)
        self.detections.update(batch.positions.tolist(), detections)

    def results(self) -> dict[str, Any]:
        """The numbers of `Detections.results`, on every rank. A collective."""
        results = self.detections.results(self._data)
        if results["count"] != len(self._data):
            raise RuntimeError(
                f"evaluated {results['count']} images of {len(self._data)}: each must count "
                "exactly once"
            )
        return results

    def details(self) -> dict[str, Any]:
        """For a report, after `results`: the score of the best F1, in all and of each class."""
        matches = self.detections.matches
        return {"threshold": matches.threshold, "classes": matches.class_results}

    def write_predictions(self, folder: Path) -> None:
        """Write predictions.json, COCO's results with the ids of the data, after `results`."""
        images, rows = self.detections.to_arrays()
        masks = self.detections.masks[0] if self.detections.masks else ()
        results = generate_coco_results(self._data, images, rows, masks)
        lines = map(json.dumps, results)
        with replacing(folder / "predictions.json") as file:
            file.write(f"[{next(lines, '')}".encode())
            for line in lines:
                file.write(f",\n{line}".encode())
            file.write(b"]")

    def draw(self, pictures: Any) -> None:
        """Draw what `results` has gathered.

        `pictures.draw(name, function, *arguments)` calls `function(*arguments, path)`.
        """
        matches = self.detections.matches
        precision = self.detections.precision
        classes = self._data.classes
        pictures.draw("predictions", plots.draw_predictions, matches)
        pictures.draw("precision_recall", plots.draw_precision_recall, precision, classes)
        pictures.draw("confusion", plots.draw_confusion, matches, classes)
        pictures.draw("misses", plots.draw_mistakes, matches)


def restore_sizes(
    data: Annotated, batch: DetectionBatch, detections: list[dict[str, Tensor]]
) -> list[dict[str, Any]]:
    """Detections of a batch in pixels of the original images instead of the canvas; masks become `rles`."""
    results = []
    for i, index in enumerate(batch.positions.tolist()):
        result: dict[str, Any] = dict(detections[i])
        boxes = result["boxes"]
        original_size = data.sizes[index]
        scale = torch.from_numpy(original_size).to(boxes) / batch.sizes[i].to(boxes)
        boxes = boxes * scale[[0, 1, 0, 1]]
        result["boxes"] = boxes
        if "masks" in result:
            result["rles"] = paste_masks(result.pop("masks"), boxes, original_size)
        results.append(result)
    return results
