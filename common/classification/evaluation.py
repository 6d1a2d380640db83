"""Evaluation of a classifier.

A recipe's `evaluate` gives it batches, and a run gets results and pictures from it.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.classification import plots
from common.classification.batches import Batch, get_other_class_ids
from common.classification.calibration import TEMPERATURES, Calibration
from common.classification.metrics import ClassificationCounts
from common.data.source import Source
from common.distributed.collectives import all_sum
from common.durable import write_csv
from common.errors import Refused
from common.run.progress import name_by_class

_COLUMNS = ("path", "label", "predicted", "score", "loss")  # of predictions.csv


class Evaluation:
    """One evaluation on the images of `data`. It is given every batch once, on any rank.

    A trained model that is evaluated alone (`data.model_classes`) also gets the temperature that
    would correct its confidence, which takes 201 softmaxes of each image.

    Attributes, of all ranks after `results`:
        counts: of right and wrong predictions.
        calibration: None for multi-label data.
        predicted: class ids int32[N], or decisions uint8[N, K] of multi-label data.
        scores: float32[N, 2], the probability of `predicted` (of several decisions, of the least
            certain one) and the loss; NaN for an image that could not be read.
    """

    def __init__(self, data: Source, device: torch.device | str) -> None:
        self._data = data
        self.class_names = tuple(data.classes)
        if data.model_classes:
            model_names = data.model_classes.names
            self.class_names += tuple(model_names[i] for i in get_other_class_ids(data))
        self.counts = ClassificationCounts(
            len(self.class_names), device, multi_label=data.multi_label
        )
        self.calibration: Calibration | None = None
        if not data.multi_label:
            self.calibration = Calibration(device, TEMPERATURES if data.model_classes else (1.0,))
        # 0 for images of other ranks.
        dtype = torch.uint8 if data.multi_label else torch.int32
        self.predicted = torch.zeros(data.labels.shape, dtype=dtype, device=device)
        self.scores = torch.zeros(len(data.labels), 2, device=device)

    @torch.no_grad()
    def update(self, batch: Batch, logits: Tensor) -> None:
        """Count a batch with its logits [B, K].

        Raises `Refused` for anything else than a tensor of that shape.
        """
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise Refused(
                f"evaluate: the model gave {shape} instead of logits [B, K]; choose them in the "
                "recipe's predict"
            )
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = self.counts.update(logits, batch.labels, batch.readable)
        if self.calibration is None:
            predicted = logits > 0
            confidences = logits.abs().sigmoid().amin(1)  # of the least certain decision
        else:
            predicted = logits.argmax(1)  # as counted: softmax may round two logits to the same
            confidences = logits.softmax(1).amax(1)
        is_sound = ~confidences.isnan()
        if batch.readable is not None:
            is_sound = is_sound & batch.readable
        scores = torch.stack([confidences, losses]).where(is_sound, torch.nan)
        self.predicted[batch.positions] = predicted.to(self.predicted)
        self.scores[batch.positions] = scores.T.float()
        if self.calibration is not None:
            self.calibration.update(logits, batch.labels, predicted == batch.labels, is_sound)

    def results(self) -> dict[str, Any]:
        """The metrics of `ClassificationCounts.results`, and `ece`, on every rank. A collective.

        Up to 100 classes have results of their own, `accuracy_class/<name>` or `f1_class/<name>`.
        """
        self.counts = self.counts.reduce()
        results = self.counts.results(len(self._data))
        self.predicted = all_sum(self.predicted).cpu()
        self.scores = all_sum(self.scores).cpu()
        metric = "f1" if self._data.multi_label else "accuracy"
        results |= name_by_class(metric, self._data.classes, results["per_class"])
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

    def write_predictions(self, folder: Path) -> None:
        """Write predictions.csv, a row for each image in the order of the data, after `results`."""
        count = len(self._data)
        # In chunks, so that memory does not hold all names.
        chunks = np.array_split(np.arange(count), count // 2**14 + 1)
        rows = chain.from_iterable(map(self._make_rows, chunks))
        write_csv(folder / "predictions.csv", chain([_COLUMNS], rows))

    def worst(self) -> Iterator[Sequence]:
        """The names of columns, then a row for each of the 100 images with the highest loss.

        It begins with a small picture, and goes on as the row of predictions.csv.
        """
        yield "image", *_COLUMNS
        for index, row in self._find_highest(self.scores[:, 1], 100):
            image = self._data.load_image(index)
            image.thumbnail((128, 128))
            yield image, *row

    def _find_highest(self, values: Tensor, limit: int) -> list[tuple[int, Sequence]]:
        """Index and row of the images with the highest values, highest first; none below 0."""
        order = values.nan_to_num(-1.0).argsort(descending=True, stable=True)[:limit]
        indices = order[values[order] >= 0].numpy()
        return list(zip(indices.tolist(), self._make_rows(indices), strict=True))

    def _make_rows(self, indices: np.ndarray) -> Iterable[Sequence]:
        """Rows of predictions.csv."""
        labels = self._data.labels[indices]
        predicted = self.predicted.numpy()[indices].astype(labels.dtype)
        scores, losses = self.scores.numpy()[indices].astype(float).round(7).T + 0.0  # no -0.0
        return zip(
            map(self._data.get_listed_name, indices.tolist()),
            self._name_classes(labels),
            np.where(np.isnan(scores), "", self._name_classes(predicted)),
            scores.tolist(),
            losses.tolist(),
            strict=True,
        )

    def _name_classes(self, class_ids: np.ndarray) -> np.ndarray:
        """Names of int64[n] classes, or the joined names of bool[n, K] decisions."""
        names = np.array(self.class_names, object)
        if class_ids.ndim == 1:
            return names[class_ids]
        return np.array([";".join(names[row]) for row in class_ids], object)

    def draw(self, pictures: Any) -> None:
        """Draw what `results` has gathered.

        `pictures.draw(name, function, *arguments)` calls `function(*arguments, path)`.
        """
        if self.counts.confusion is not None:
            pictures.draw("confusion", plots.confusion, self.counts.confusion, self.class_names)
        if self.calibration is not None:
            pictures.draw("reliability", plots.draw_reliability, self.calibration)
            is_wrong = torch.from_numpy(self.predicted.numpy() != self._data.labels)
            mistakes = self._find_highest(self.scores[:, 0].where(is_wrong, -1.0), 24)
            if mistakes:
                pictures.draw("mistakes", plots.draw_mistakes, self._data, mistakes)
