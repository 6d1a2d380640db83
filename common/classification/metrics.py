"""Metrics of a classifier: fractions in 0..1, exact on any layout of the run.

Everything is counted in integers on the device, without a host sync per batch, and summed exactly
over the ranks.
"""

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.distributed import devices
from common.distributed.collectives import reduce_counts, reduce_dict

CONFUSION_CLASSES = 2_000  # limit of the confusion matrix, which then takes 32 MB
# Bins of equal width for the scores of each class; an eighth of them with more classes than
# CONFUSION_CLASSES. A power of two, so that a score lies in bin n or above exactly if it is at
# least n / SCORE_BINS.
SCORE_BINS = 1_024
AT_ONCE = 2**20  # scores that are processed at once, to fit into a processor's cache


class ClassificationCounts:
    """Counts of one evaluation. It is given every sample once, on any rank; then `reduce().results()`.

    An image that is not `readable` counts as wrong, also for its class; only the loss leaves it out.
    """

    def __init__(self, classes: int, device: torch.device | str, multi_label: bool = False):
        self.classes = classes
        self.multi_label = multi_label
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("count", "broken", "top1", "top5"), ())
        # Of each class: images that have it, images predicted to have it, and both.
        shapes |= dict.fromkeys(("images", "predicted", "hits"), (classes,))
        if not multi_label and classes <= CONFUSION_CLASSES:
            shapes["confusion"] = (classes, classes)
        self._bins = SCORE_BINS if classes <= CONFUSION_CLASSES else SCORE_BINS // 8
        shapes["scores"] = (2, classes, self._bins)  # of images of other classes, and of the class
        self._counts = {}
        for name, shape in shapes.items():
            self._counts[name] = torch.zeros(shape, dtype=torch.int64, device=device)
        self._rows = torch.arange(classes, device=device) * self._bins
        self._loss = torch.zeros((), dtype=devices.get_sum_dtype(device), device=device)

    @property
    def confusion(self) -> Tensor | None:
        """int64[classes, classes] of readable images: rows are true classes, columns predicted ones.

        None with more than `CONFUSION_CLASSES` classes or several labels per image.
        """
        return self._counts.get("confusion")

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor, readable: Tensor | None = None) -> Tensor:
        """Count a batch; returns the loss of each image, [B].

        logits float[B, K]; labels int64[B], or multi-label bool[B, K]; readable bool[B].
        """
        if readable is None:
            readable = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
        at_once = max(1, AT_ONCE // self.classes)
        chunks = zip(
            logits.split(at_once), labels.split(at_once), readable.split(at_once), strict=True
        )
        return torch.cat([self._update(*chunk) for chunk in chunks])

    def _update(self, logits: Tensor, labels: Tensor, readable: Tensor) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.multi_label:
            losses = self._update_multi_label(logits, labels.bool(), readable)
        else:
            losses = self._update_single_label(logits, labels, readable)
        self._counts["count"] += len(labels)
        self._counts["broken"] += (~readable).sum()
        self._loss += torch.where(readable, losses, 0).to(self._loss.dtype).sum()
        return losses

    def _update_single_label(self, logits: Tensor, labels: Tensor, readable: Tensor) -> Tensor:
        counts = self._counts
        true_logit = logits.gather(1, labels[:, None])
        predicted = logits.argmax(1)  # the first of equal ones, as below
        first = torch.arange(self.classes, device=logits.device) < labels[:, None]
        ahead = ((logits > true_logit) | ((logits == true_logit) & first)).sum(1)
        sound = readable & ~logits.isnan().any(1)  # nothing is "ahead" of a NaN
        hit = sound & (ahead == 0)
        counts["top1"] += hit.sum()
        counts["top5"] += (sound & (ahead < 5)).sum()
        counts["hits"].index_add_(0, labels, hit.long())
        counts["images"].index_add_(0, labels, torch.ones_like(labels))
        counts["predicted"].index_add_(0, predicted, sound.long())
        if self.confusion is not None:
            self.confusion.view(-1).index_add_(0, labels * self.classes + predicted, sound.long())
        self._count_scores(logits.softmax(1), F.one_hot(labels, self.classes), sound)
        return F.cross_entropy(logits, labels, reduction="none")

    def _update_multi_label(self, logits: Tensor, labels: Tensor, readable: Tensor) -> Tensor:
        counts = self._counts
        predicted = (logits > 0) & readable[:, None]  # a probability above one half
        sound = readable & ~logits.isnan().any(1)
        counts["hits"] += (predicted & labels).sum(0)
        counts["images"] += labels.sum(0)
        counts["predicted"] += predicted.sum(0)
        counts["top1"] += ((predicted == labels).all(1) & sound).sum()
        self._count_scores(logits.sigmoid(), labels, sound)
        targets = labels.to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return losses.mean(1)

    def _count_scores(self, scores: Tensor, labels: Tensor, sound: Tensor) -> None:
        """Count scores in 0..1, float[batch, classes], by class, bin, and whether the image has the class."""
        bins = (scores.nan_to_num(0.0) * self._bins).long().clamp(max=self._bins - 1)
        indices = labels.long() * (self.classes * self._bins) + self._rows + bins
        ones = sound.long().repeat_interleave(self.classes)
        self._counts["scores"].view(-1).index_add_(0, indices.view(-1), ones)

    def reduce(self) -> "ClassificationCounts":
        """New counts: the sums over all ranks, on every rank and on the CPU. A collective."""
        total = copy.copy(self)
        # One message for all counts.
        flat = torch.cat([count.flatten() for count in self._counts.values()])
        chunks = reduce_counts(flat.cpu()).split([count.numel() for count in self._counts.values()])
        total._counts = {}
        for (name, count), chunk in zip(self._counts.items(), chunks, strict=True):
            total._counts[name] = chunk.view_as(count)
        total._loss = torch.tensor(reduce_dict({"loss": self._loss})["loss"], dtype=torch.float64)
        return total

    def results(
        self, images: int | None = None
    ) -> dict[str, float | int | list[float | None] | None]:
        """Fractions, or None if there is nothing to divide by.

        One label per image: top1, top5 (the best of min(5, classes)), mean_class_accuracy (over
        classes that occur), f1_macro. Several labels: f1 (over all decisions), f1_macro,
        exact_match. f1_macro is the mean over classes that are true or predicted anywhere. Always:
        loss (mean over readable images), count, broken, per_class (accuracy or F1; None: absent),
        thresholds. Raises `RuntimeError` unless `images`, if given, is the number that was counted.
        """
        count, broken, top1, top5 = (
            self._counts[name].item() for name in ("count", "broken", "top1", "top5")
        )
        if images not in (None, count):
            raise RuntimeError(
                f"evaluated {count} images of {images}: each must count exactly once"
            )
        rows = self._list_classes()
        f1 = [_share(2 * row.hits, row.images + row.predicted) for row in rows]
        results: dict[str, float | int | list[float | None] | None]
        if self.multi_label:
            per_class = f1
            num_hits = sum(row.hits for row in rows)
            num_decisions = sum(row.images + row.predicted for row in rows)
            results = {
                "f1": _share(2 * num_hits, num_decisions),
                "f1_macro": _mean(f1),
                "exact_match": _share(top1, count),
            }
        else:
            per_class = [_share(row.hits, row.images) for row in rows]
            results = {
                "top1": _share(top1, count),
                "top5": _share(top5, count),
                "mean_class_accuracy": _mean(per_class),
                "f1_macro": _mean(f1),
            }
        results["loss"] = _share(self._loss.item(), count - broken)
        results["count"] = count
        results["broken"] = broken
        results["per_class"] = per_class
        results["thresholds"] = self.thresholds()[0]
        return results

    def _list_classes(self) -> list["_ClassCounts"]:
        columns = [self._counts[name].tolist() for name in _ClassCounts._fields]
        return [_ClassCounts(*row) for row in zip(*columns, strict=True)]

    def thresholds(self) -> tuple[list[float | None], list[float | None]]:
        """For each class the threshold with the best F1 of "probability >= threshold", and that F1.

        Of equally good ones the nearest to one half is taken. None for a class that no image has,
        or none finds.
        """
        scores = self._counts["scores"].cpu()
        images = self._counts["images"].cpu()
        distance = (torch.arange(self._bins) - self._bins // 2).abs()
        at_once = AT_ONCE // self._bins
        thresholds: list[float | None] = []
        best_f1: list[float | None] = []
        for chunk, num_images in zip(scores.split(at_once, 1), images.split(at_once), strict=True):
            # Images of other classes, and of the class, with at least the score of each bin.
            false_positives, hits = chunk.flip(2).cumsum(2).flip(2).double()
            f1 = 2 * hits / (hits + false_positives + num_images[:, None])
            best = f1.nan_to_num(0.0).amax(1, keepdim=True)
            bins = torch.where(f1 == best, distance, self._bins).argmin(1)
            for threshold, value in zip(
                (bins / self._bins).tolist(), best[:, 0].tolist(), strict=True
            ):
                thresholds.append(threshold if value > 0 else None)
                best_f1.append(value if value > 0 else None)
        return thresholds, best_f1

    def per_class(self) -> list[dict]:
        """For each class: images; precision, recall and F1 or None; the best threshold and its F1 or None."""
        details = []
        for row, threshold, f1 in zip(self._list_classes(), *self.thresholds(), strict=True):
            details.append(
                {
                    "images": row.images,
                    "precision": _share(row.hits, row.predicted),
                    "recall": _share(row.hits, row.images),
                    "f1": _share(2 * row.hits, row.predicted + row.images),
                    "threshold": threshold,
                    "f1_at_threshold": f1,
                }
            )
        return details


class _ClassCounts(NamedTuple):
    """Of one class: images that have it, images predicted to have it, and both."""

    images: int
    predicted: int
    hits: int


def _share(part: float, total: float) -> float | None:
    return part / total if total else None


def _mean(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return _share(sum(present), len(present))
