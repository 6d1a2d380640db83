"""One evaluation of a classifier: counts over its batches, the same on any layout."""

import torch
from torch import Tensor

from common.classification.batches import Batch
from common.classification.calibration import TEMPERATURES, Calibration
from common.classification.metrics import ClassificationCounts, Mistake, Mistakes
from common.data.source import Source


class Evaluation:
    """Results of one evaluation of `val`. It is given every batch once, on any rank.

    `thorough` finds the temperature, too, which computes 201 softmaxes of each image.

    Attributes, of all ranks after `results`:
        counts: of right and wrong predictions.
        calibration: None for images of several labels, whose probabilities do not add up to one.
        mistakes: the most confident ones; none of images of several labels.
    """

    def __init__(self, val: Source, device: torch.device | str, thorough: bool = False):
        self._images, multi_label = len(val), val.multi_label
        self.counts = ClassificationCounts(len(val.classes), device, multi_label=multi_label)
        self.calibration = None if multi_label else Calibration(device, TEMPERATURES if thorough else (1.0,))
        self.mistakes: list[Mistake] = []
        self._mistakes = Mistakes()

    @torch.no_grad()
    def update(self, batch: Batch, logits: Tensor) -> None:
        """Count a batch of the validation set with its logits [B, K]."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        self.counts.update(logits, batch.labels, batch.readable)
        if self.calibration:
            confidences, predicted = logits.softmax(1).max(1)
            sound = (batch.labels >= 0) & ~confidences.isnan()
            sound = sound if batch.readable is None else sound & batch.readable
            self.calibration.update(logits, batch.labels, predicted == batch.labels, sound)
            self._mistakes.update(confidences, predicted, batch.labels, batch.positions, batch.readable)

    def results(self) -> dict:
        """The numbers of `ClassificationCounts.results`, and `ece`, on every rank. A collective."""
        self.counts, self.mistakes = self.counts.reduce(), self._mistakes.merge()
        results = self.counts.results(self._images)
        if self.calibration:
            self.calibration = self.calibration.reduce()
            results["ece"] = self.calibration.ece()
        return results

    def details(self) -> dict:
        """Of a report: `classes`, one dict per class, and `calibration`. After `results`."""
        found = {"classes": self.counts.per_class()}
        return found | {"calibration": self.calibration.results()} if self.calibration else found
