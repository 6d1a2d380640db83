"""Evaluation of a detector: what a recipe's `evaluate` gives its batches to, and a run asks for
results and pictures.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.detection.batches import DetectionBatch
from common.detection.data.annotated import Annotated
from common.detection.data.masks import encode_logits, pasted
from common.detection.evaluation import plots
from common.detection.evaluation.metrics import Detections, coco_results
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
        self.detections.update(
            batch.positions.tolist(), restore_sizes(self._data, batch, detections)
        )

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
        return {"threshold": matches.threshold, "classes": matches.classes}

    def write_predictions(self, folder: Path) -> None:
        """Write predictions.json, COCO's results with the ids of the data, after `results`."""
        results = coco_results(self._data, *self.detections.columns(), *self.detections.masks)
        lines = map(json.dumps, results)
        with replacing(folder / "predictions.json") as file:
            file.write(f"[{next(lines, '')}".encode())
            for line in lines:
                file.write(f",\n{line}".encode())
            file.write(b"]")

    def draw(self, pictures: Any) -> None:
        """Draw what `results` has gathered: `pictures.draw(name, function, *arguments)` calls
        `function(*arguments, path)`.
        """
        matches = self.detections.matches
        pictures.draw("predictions", plots.predictions, matches)
        pictures.draw(
            "precision_recall",
            plots.precision_recall,
            self.detections.precision,
            self._data.classes,
        )
        pictures.draw("confusion", plots.confusion, matches, self._data.classes)
        pictures.draw("misses", plots.misses, matches)


def restore_sizes(
    data: Annotated, batch: DetectionBatch, detections: list[dict[str, Tensor]]
) -> list[dict[str, Any]]:
    """Detections of a batch in pixels of the original images instead of the canvas; masks become `rles`."""
    images = []
    for i, index in enumerate(batch.positions.tolist()):
        original_size = data.sizes[index]
        of_image: dict[str, Any] = dict(detections[i])
        scale = torch.from_numpy(original_size).to(of_image["boxes"]) / batch.sizes[i].to(
            of_image["boxes"]
        )
        of_image["boxes"] = of_image["boxes"] * scale[[0, 1, 0, 1]]
        if "masks" in of_image:
            of_image["rles"] = pasted(of_image.pop("masks"), of_image["boxes"], original_size)
        if "mask_logits" in of_image:
            of_image["rles"] = encode_logits(of_image.pop("mask_logits"), original_size)
        images.append(of_image)
    return images
