"""Evaluation of a segmenter: what a recipe's `evaluate` gives its batches to, and a run asks for
results and pictures.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from common.config.origin import format_names
from common.data.source import sample_evenly
from common.distributed.collectives import all_sum, gather_to_main, reduce_counts
from common.durable import write_csv
from common.errors import Refused
from common.run.progress import name_by_class
from common.segmentation import plots
from common.segmentation.batches import SegmentationBatch
from common.segmentation.masks import IGNORED
from common.segmentation.source import Masked

_CHUNK = 2**26  # logits that are resized at a time
_NUM_WORST = 24  # images
_COLUMNS = ("path", "pixel_accuracy", "loss", "labelled_pixels")  # of predictions.csv


class Evaluation:
    """One evaluation on the images of `data`. It is given every batch once, on any rank.

    Predictions are compared at the size of the images. All metrics follow from one confusion matrix
    of int64 counts, so they are equal on every layout.

    Attributes, of all ranks after `results`:
        confusion: int64[K, C + 1] pixels, classes of the data by predictions: the C classes of the
            model, those of the data first, then "not read".
        scores: float64[N, 3] of each image: right pixels, sum of the loss over its labelled pixels
            (NaN if it could not be read), and their number.
    """

    def __init__(self, data: Masked, device: torch.device | str) -> None:
        self._data = data
        names = list(data.classes)
        if data.model_classes is not None:
            names += [
                data.model_classes.names[class_id] for class_id in data.model_classes.absent_ids
            ]
        self.class_names = names
        shape = (len(data.classes), len(names) + 1)
        self.confusion = torch.zeros(shape, dtype=torch.int64, device=device)
        self.scores = torch.zeros(len(data), 3, dtype=torch.float64, device=device)
        self._num_images = torch.zeros(1, dtype=torch.int64)
        self._shown_indices = set(sample_evenly(len(data), plots.NUM_COLUMNS).tolist())
        self._worst: list[int] = []  # see `_find_worst`
        # Predictions int16[H, W] by image index; after `results`, of all ranks on the main process.
        self.shown: dict[int, np.ndarray] = {}

    @torch.no_grad()
    def update(self, batch: SegmentationBatch, logits: Tensor) -> None:
        """Count a batch with its logits [B, C, h, w], h x w cells of the canvas. Raises `Refused`
        for anything else.
        """
        num_outputs = len(self.class_names)
        if not isinstance(logits, Tensor) or logits.ndim != 4 or logits.shape[1] != num_outputs:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise Refused(
                f"evaluate: the model gave {shape} instead of logits [B, {num_outputs}, h, w]; choose "
                "them in the recipe's predict"
            )
        self._num_images += len(logits)
        for i, index in enumerate(batch.positions.tolist()):
            width, height = batch.sizes[i].tolist()
            labels = batch.labels[i].long()
            if not width:
                self._count(index, labels, torch.full_like(labels, num_outputs), torch.nan)
                continue
            canvas_size = tuple(batch.images.shape[2:])
            predicted, losses = compare_pixels(logits[i], labels, canvas_size, (height, width))
            self._count(index, labels, predicted, losses.double().sum())
            self._select_shown(sorted(self._worst + [index]))
            if index in self._shown_indices.union(self._worst):
                self.shown[index] = predicted.short().cpu().numpy()

    def _select_shown(self, indices: Sequence[int]) -> None:
        """Keep predictions of the worst of the images at these ascending indices, and the evenly spaced."""
        self._worst = self._find_worst(np.array(indices))
        kept = self._shown_indices.union(self._worst)
        self.shown = {index: self.shown[index] for index in self.shown if index in kept}

    def _find_worst(self, indices: np.ndarray) -> list[int]:
        """Of the images at these ascending indices, up to 24 with the fewest right pixels, worst first.

        Images without a label, without an error, and those that could not be read, are left out.
        """
        num_right, loss, num_labelled = self.scores[indices].cpu().numpy().T
        wrong_shares = 1 - num_right / np.maximum(num_labelled, 1)
        wrong_shares[np.isnan(loss) | (num_labelled == 0)] = 0
        order = np.argsort(-wrong_shares, kind="stable")[:_NUM_WORST]
        return indices[order[wrong_shares[order] > 0]].tolist()

    def _count(self, index: int, labels: Tensor, predicted: Tensor, loss: Tensor | float) -> None:
        confusion = count_confusion(labels, predicted, *self.confusion.shape)
        self.confusion += confusion
        self.scores[index, 0] = confusion.diagonal().sum()
        self.scores[index, 1] = loss
        self.scores[index, 2] = confusion.sum()

    def results(self) -> dict[str, Any]:
        """The metrics over all images, on every rank. A collective.

        mIoU and mean_class_accuracy are means over the classes that have labelled pixels, `classes`
        says how many these are; `per_class` is the IoU, None for the others.
        """
        self.confusion = reduce_counts(self.confusion).cpu()
        num_images = int(reduce_counts(self._num_images))
        if num_images != len(self._data):
            raise RuntimeError(
                f"evaluated {num_images} images of {len(self._data)}: each must count exactly once"
            )
        self.scores = all_sum(self.scores).cpu()  # 0 for images of other ranks
        self._select_shown(range(num_images))
        indices = np.array(list(self.shown), np.int64)
        gathered = gather_to_main([indices] + list(self.shown.values()))
        if gathered is not None:
            self.shown = {}
            for indices, *predictions in gathered:
                self.shown |= dict(zip(indices.tolist(), predictions, strict=True))
        results = compute_metrics(self.confusion.numpy())
        is_read = ~self.scores[:, 1].isnan()
        _, loss, num_labelled = self.scores[is_read].sum(0).tolist()
        results["loss"] = loss / num_labelled if num_labelled else None
        results["count"] = num_images
        return results | name_by_class("IoU", self._data.classes, results["per_class"])

    def list_notes(self) -> list[str]:
        """Lines for the log, after `results`: which classes have no pixel, so that no mean has them."""
        num_labelled = self.confusion.numpy().sum(axis=1)
        names = []
        for name, count in zip(self._data.classes, num_labelled, strict=True):
            if not count:
                names.append(name)
        if not names:
            return []
        return [
            f"{len(names):,} of {len(num_labelled):,} classes have no labelled pixel in the images to "
            f"evaluate on, and are left out of mIoU: {format_names(names)}"
        ]

    def details(self) -> dict[str, Any]:
        """For a report, after `results`: per class its labelled and its right pixels."""
        confusion = self.confusion.numpy()
        rows = []
        for class_id, row in enumerate(confusion):
            rows.append({"pixels": int(row.sum()), "right": int(row[class_id])})
        return {"pixels": rows}

    def write_predictions(self, folder: Path) -> None:
        """Write predictions.csv, a row for each image in the order of the data, after `results`."""
        rows = map(self._make_row, range(len(self._data)))
        write_csv(folder / "predictions.csv", chain([_COLUMNS], rows))

    def worst(self) -> Iterator[Sequence]:
        """The names of columns, then a row for each of up to 24 images with the fewest right pixels.

        It begins with a small picture of image, truth, prediction and differences, and goes on as
        the row of predictions.csv.
        """
        yield "image", *_COLUMNS
        for index, comparison in plots.compare_predictions(self._data, self.shown, self._worst):
            picture = Image.fromarray(np.concatenate(comparison.make_panels(), axis=1))
            picture.thumbnail((512, 128))
            yield picture, *self._make_row(index)

    def _make_row(self, index: int) -> Sequence:
        """The row of predictions.csv."""
        num_right, loss, num_labelled = self.scores[index].tolist()
        accuracy: float | str = ""
        mean_loss: float | str = ""
        if num_labelled:
            accuracy = round(num_right / num_labelled, 7)
            mean_loss = "" if math.isnan(loss) else round(loss / num_labelled, 7)
        return self._data.get_listed_name(index), accuracy, mean_loss, int(num_labelled)

    def draw(self, pictures: Any) -> None:
        """Draw what `results` has gathered: `pictures.draw(name, function, *arguments)` calls
        `function(*arguments, path)`.
        """
        shown = (self._data, self.shown)
        pictures.draw("predictions", plots.draw_predictions, *shown, sorted(self._shown_indices))
        pictures.draw("confusion", plots.draw_confusion, self.confusion.numpy(), self.class_names)
        if self._worst:
            pictures.draw("worst", plots.draw_worst, *shown, self._worst, self.class_names)


def predict_pixels(batch: SegmentationBatch, logits: Tensor) -> list[Tensor]:
    """The predicted class id of each pixel of each image at its own size, int64[H, W], of logits
    [B, C, h, w] of a batch without labels.
    """
    predictions = []
    canvas_height, canvas_width = batch.images.shape[2:]
    canvas_size = (canvas_height, canvas_width)
    for labels, size, image_logits in zip(batch.labels, batch.sizes.tolist(), logits, strict=True):
        width, height = size
        # An image that could not be read has the size 0.
        shown_size = (height, width) if width else canvas_size
        predicted, _ = compare_pixels(image_logits, labels.long(), canvas_size, shown_size)
        predictions.append(predicted)
    return predictions


def compare_pixels(
    logits: Tensor,
    labels: Tensor,
    canvas_size: Sequence[int],
    shown_size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """The predicted class id of each pixel of an image, int64[H, W], and its cross-entropy with
    `labels` int64[H, W], 0 where there is no label.

    `logits` [C, h, w] are of its canvas, where the image has `shown_size` (height, width). They are
    resized to the canvas, cut, and resized to the size of the image, some classes at a time.
    """
    size = tuple(labels.shape)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    best = torch.full(size, -torch.inf, dtype=dtype, device=logits.device)
    log_sum = best.clone()
    at_label = torch.zeros_like(best)
    predicted = torch.zeros_like(labels)
    num_pixels = max(labels.numel(), int(np.prod(canvas_size)))
    chunk_size = max(1, _CHUNK // num_pixels)
    for start in range(0, len(logits), chunk_size):
        chunk = logits[None, start : start + chunk_size].to(dtype)
        chunk = F.interpolate(chunk, tuple(canvas_size), mode="bilinear")
        chunk = chunk[:, :, : shown_size[0], : shown_size[1]]
        if shown_size != size:
            chunk = F.interpolate(chunk, size, mode="bilinear")
        chunk = chunk[0]
        values, ids = chunk.max(0)
        is_better = values > best
        best = torch.where(is_better, values, best)
        predicted = torch.where(is_better, ids + start, predicted)
        log_sum = torch.logaddexp(log_sum, chunk.logsumexp(0))
        is_here = (labels >= start) & (labels < start + len(chunk))
        row_ids = (labels - start).clamp(0, len(chunk) - 1)
        of_label = chunk.gather(0, row_ids[None])[0]
        at_label = torch.where(is_here, of_label, at_label)
    losses = torch.where(labels != IGNORED, log_sum - at_label, 0.0)
    return predicted, losses


def count_confusion(labels: Tensor, predicted: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """int64[num_rows, num_columns] labelled pixels of an image, by label and by prediction."""
    is_labelled = labels != IGNORED
    cells = labels[is_labelled] * num_columns + predicted[is_labelled]
    return cells.bincount(minlength=num_rows * num_columns).reshape(num_rows, num_columns)


def compute_metrics(confusion: np.ndarray) -> dict[str, Any]:
    """mIoU, pixel and mean class accuracy of int64[K, C] pixels, K classes by C >= K predictions.

    Classes without a pixel are left out of the means; without any, all are None.
    """
    num_classes = len(confusion)
    num_labelled = confusion.sum(axis=1)
    num_predicted = confusion[:, :num_classes].sum(axis=0)
    num_right = confusion.diagonal()
    unions = num_labelled + num_predicted - num_right
    per_class: list[float | None] = []
    ious = []
    accuracies = []
    for right, labelled, union in zip(num_right, num_labelled, unions, strict=True):
        if not labelled:
            per_class.append(None)
            continue
        ious.append(float(right / union))
        accuracies.append(float(right / labelled))
        per_class.append(ious[-1])
    total = int(num_labelled.sum())
    return {
        "mIoU": float(np.mean(ious)) if ious else None,
        "pixel_accuracy": int(num_right.sum()) / total if total else None,
        "mean_class_accuracy": float(np.mean(accuracies)) if accuracies else None,
        "classes": len(ious),
        "per_class": per_class,
    }
