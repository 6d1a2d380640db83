"""Evaluation of a classifier: what a recipe's `evaluate` gives its batches to, and a run asks for
results and pictures.
"""

from typing import Any

import torch
from torch import Tensor

from common.classification import plots
from common.classification.batches import Batch, other_class_ids
from common.classification.calibration import TEMPERATURES, Calibration
from common.classification.metrics import ClassificationCounts, Mistake, Mistakes
from common.data.source import Source
from common.errors import Refused


class Evaluation:
    """One evaluation on the images of `data`. It is given every batch once, on any rank.

    A trained model that is evaluated alone (`data.model_classes`) also gets the temperature that
    would correct its confidence, which takes 201 softmaxes of each image.

    Attributes, of all ranks after `results`:
        counts: of right and wrong predictions.
        calibration: None for multi-label data.
        mistakes: the most confident ones; none for multi-label data.
    """

    def __init__(self, data: Source, device: torch.device | str) -> None:
        other_names = (
            [data.model_classes.names[class_id] for class_id in other_class_ids(data)]
            if data.model_classes
            else []
        )
        self._data = data
        self.class_names = (*data.classes, *other_names)
        self.counts = ClassificationCounts(
            len(self.class_names), device, multi_label=data.multi_label
        )
        self.calibration: Calibration | None = None
        if not data.multi_label:
            self.calibration = Calibration(device, TEMPERATURES if data.model_classes else (1.0,))
        self.mistakes: list[Mistake] = []
        self._mistakes = Mistakes()

    @torch.no_grad()
    def update(self, batch: Batch, logits: Tensor) -> None:
        """Count a batch with its logits [B, K]. Raises `Refused` for anything else than a tensor of
        that shape.
        """
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise Refused(
                f"evaluate: the model gave {shape} instead of logits [B, K]; choose them in the "
                "recipe's predict"
            )
        logits = logits if logits.dtype == torch.float64 else logits.float()
        self.counts.update(logits, batch.labels, batch.readable)
        if self.calibration is None:
            return
        confidences, predicted = logits.softmax(1).max(1)
        is_sound = ~confidences.isnan()
        if batch.readable is not None:
            is_sound = is_sound & batch.readable
        self.calibration.update(logits, batch.labels, predicted == batch.labels, is_sound)
        self._mistakes.update(confidences, predicted, batch.labels, batch.positions, is_sound)

    def results(self) -> dict[str, Any]:
        """The metrics of `ClassificationCounts.results`, and `ece`, on every rank. A collective."""
        self.counts = self.counts.reduce()
        self.mistakes = self._mistakes.merge()
        results = self.counts.results(len(self._data))
        if self.calibration is not None:
            self.calibration = self.calibration.reduce()
            results["ece"] = self.calibration.ece()
        return results

    def details(self) -> dict[str, Any]:
        """For a report, after `results`: `classes`, one dict per class, and `calibration`."""
        details: dict[str, Any] = {"classes": self.counts.per_class()}
        if self.calibration is not None:
            details["calibration"] = self.calibration.results()
        return details

    def draw(self, pictures: Any) -> None:
        """Draw what `results` has gathered: `pictures.draw(name, function, *arguments)` calls
        `function(*arguments, path)`.
        """
        if self.counts.confusion is not None:
            pictures.draw("confusion", plots.confusion, self.counts.confusion, self.class_names)
        if self.mistakes:
            pictures.draw("mistakes", plots.mistakes, self._data, self.mistakes, self.class_names)
        if self.calibration is not None:
            pictures.draw("reliability", plots.reliability, self.calibration)
