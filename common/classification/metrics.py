"""Metrics of a classifier: fractions in 0..1, exact on any layout of the run.

Everything is counted in integers on the device, without a host sync per batch, and summed exactly
over the ranks.
"""

import copy

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
        self.classes, self.multi_label = classes, multi_label
        # Of each class: images that have it, images predicted to have it, and both.
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("count", "broken", "top1", "top5"), ())
        shapes |= dict.fromkeys(("images", "predicted", "hits"), (classes,))
        if not multi_label and classes <= CONFUSION_CLASSES:
            shapes["confusion"] = (classes, classes)
        self._bins = SCORE_BINS if classes <= CONFUSION_CLASSES else SCORE_BINS // 8
        shapes["scores"] = (2, classes, self._bins)  # of images of other classes, and of the class
        self._counts = {
            name: torch.zeros(shape, dtype=torch.int64, device=device)
            for name, shape in shapes.items()
        }
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
        columns = [column.split(at_once) for column in (logits, labels, readable)]
        return torch.cat([self._update(*part) for part in zip(*columns, strict=True)])

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
        counts, true_logit = self._counts, logits.gather(1, labels[:, None])
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
        # Probability above one half.
        counts, predicted = self._counts, (logits > 0) & readable[:, None]
        sound = readable & ~logits.isnan().any(1)
        for name, decisions in (
            ("hits", predicted & labels),
            ("images", labels),
            ("predicted", predicted),
        ):
            counts[name] += decisions.sum(0)
        counts["top1"] += ((predicted == labels).all(1) & sound).sum()
        self._count_scores(logits.sigmoid(), labels, sound)
        return F.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="none"
        ).mean(1)

    def _count_scores(self, scores: Tensor, labels: Tensor, sound: Tensor) -> None:
        """Count scores in 0..1, float[batch, classes], by class, bin, and whether the image has the class."""
        bins = (scores.nan_to_num(0.0) * self._bins).long().clamp(max=self._bins - 1)
        places = labels.long() * (self.classes * self._bins) + self._rows + bins
        self._counts["scores"].view(-1).index_add_(
            0, places.view(-1), sound.long().repeat_interleave(self.classes)
        )

    def reduce(self) -> "ClassificationCounts":
        """New counts: the sums over all ranks, on every rank and on the CPU. A collective."""
        total = copy.copy(self)
        summed = reduce_counts(
            torch.cat([count.flatten() for count in self._counts.values()]).cpu()
        )
        parts = summed.split([count.numel() for count in self._counts.values()])
        total._counts = {
            name: part.view_as(self._counts[name])
            for name, part in zip(self._counts, parts, strict=True)
        }
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
        hits, of_class, predicted = (
            self._counts[name].tolist() for name in ("hits", "images", "predicted")
        )
        f1 = [
            _share(2 * hit, real + guess)
            for hit, real, guess in zip(hits, of_class, predicted, strict=True)
        ]
        if self.multi_label:
            per_class, named = f1, {"f1": _share(2 * sum(hits), sum(of_class) + sum(predicted))}
            named |= {"f1_macro": _mean(f1), "exact_match": _share(top1, count)}
        else:
            per_class = [_share(hit, real) for hit, real in zip(hits, of_class, strict=True)]
            named = {"top1": _share(top1, count), "top5": _share(top5, count)}
            named |= {"mean_class_accuracy": _mean(per_class), "f1_macro": _mean(f1)}
        named |= {
            "loss": _share(self._loss.item(), count - broken),
            "count": count,
            "broken": broken,
        }
        return named | {"per_class": per_class, "thresholds": self.thresholds()[0]}

    def thresholds(self) -> tuple[list[float | None], list[float | None]]:
        """For each class the threshold with the best F1 of "probability >= threshold", and that F1.

        Of equally good ones the nearest to one half is taken. None for a class that no image has,
        or none finds.
        """
        scores, images = (self._counts[name].cpu() for name in ("scores", "images"))
        distance, at_once = (
            (torch.arange(self._bins) - self._bins // 2).abs(),
            AT_ONCE // self._bins,
        )
        kept: list[tuple[float, float]] = []
        for part, of_class in zip(scores.split(at_once, 1), images.split(at_once), strict=True):
            # Images of other classes, and of the class, with at least the score of each bin.
            others, own = part.flip(2).cumsum(2).flip(2).double()
            f1 = 2 * own / (own + others + of_class[:, None])
            best = f1.nan_to_num(0.0).amax(1, keepdim=True)
            chosen = torch.where(f1 == best, distance, self._bins).argmin(1)
            kept += zip((chosen / self._bins).tolist(), best[:, 0].tolist(), strict=True)
        found = [pair if pair[1] > 0 else (None, None) for pair in kept]
        return [threshold for threshold, _ in found], [f1 for _, f1 in found]

    def per_class(self) -> list[dict]:
        """For each class: images; precision, recall and F1 or None; the best threshold and its F1 or None."""
        columns = (self._counts[name].tolist() for name in ("hits", "predicted", "images"))
        return [
            {
                "images": images,
                "precision": _share(hit, guesses),
                "recall": _share(hit, images),
                "f1": _share(2 * hit, guesses + images),
                "threshold": threshold,
                "f1_at_threshold": f1,
            }
            for hit, guesses, images, threshold, f1 in zip(
                *columns, *self.thresholds(), strict=True
            )
        ]


def _share(part: float, total: float) -> float | None:
    return part / total if total else None


def _mean(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return _share(sum(present), len(present))
