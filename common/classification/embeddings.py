"""Evaluation of embeddings: recall@1, and verification accuracy as on LFW."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.classification.batches import Batch
from common.data.source import Source
from common.distributed.collectives import all_or_none, broadcast_object, gather_to_main
from common.randomness import key_of, mix

_FOLDS = 10
_QUERIES = 1024  # compared at once with all images


class EmbeddingEvaluation:
    """Results of one evaluation by embeddings, in place of an `Evaluation`.

    It is given every batch once, on any rank.

    recall_at_1: share of the images whose nearest other image, by cosine, has their class, of those
        that are not alone in it (Oh Song et al., 2016, arXiv:1511.06452).
    verification_accuracy: share of right decisions whether two images have the same class. Each
        image makes two pairs: with the next one of its class, and with one of another class. Pairs
        are in ten folds by the class of their first image; each is decided by the best threshold
        for the nine others (LFW's view 2: Huang et al., 2007).
    threshold: the best for all pairs.

    An image that can't be read is not found, and in no pair.
    """

    def __init__(self, data: Source, device: torch.device | str) -> None:
        self._labels = data.labels
        self._device = device
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def update(self, batch: Batch, embeddings: Tensor) -> None:
        """Add the embeddings [B, D] of a batch."""
        if embeddings.dtype != torch.float64:
            embeddings = embeddings.float()
        embeddings = F.normalize(embeddings)
        sound = embeddings.isfinite().all(1)
        if batch.readable is not None:
            sound = sound & batch.readable
        self._parts.append((batch.positions, embeddings, sound))

    def results(self) -> dict:
        """The numbers above, `count` and `broken`, on every rank. A collective."""
        columns = [torch.cat(column).cpu().numpy() for column in zip(*self._parts, strict=True)]
        columns_by_rank = gather_to_main(columns)
        results = None
        with all_or_none("comparing embeddings"):
            # A rank without a batch has no columns.
            parts = [columns for columns in columns_by_rank or [] if columns]
            if parts:
                positions, embeddings, sound = map(np.concatenate, zip(*parts, strict=True))
                results = self._compare(positions, embeddings, sound)
        return broadcast_object(results)

    def details(self) -> dict:
        """Nothing."""
        return {}

    def draw(self, pictures: Any) -> None:
        """Nothing."""

    def _compare(self, positions: np.ndarray, embeddings: np.ndarray, sound: np.ndarray) -> dict:
        order = positions.argsort()
        if positions[order].tolist() != list(range(len(self._labels))):
            raise RuntimeError(
                f"evaluated {len(order)} images of {len(self._labels)}: each must count exactly "
                "once"
            )
        sound = sound[order]
        labels = self._labels[sound]
        rows = torch.from_numpy(embeddings[order[sound]]).to(self._device)
        num_hits = 0
        for queries, nearest in _find_nearest(rows):
            num_hits += (labels[nearest] == labels[queries]).sum()
        _, class_index, class_sizes = np.unique(
            self._labels, return_inverse=True, return_counts=True
        )
        num_queries = (class_sizes[class_index] > 1).sum()
        first, second = pairs(labels)
        scores = (rows[first] * rows[second]).sum(1).double().cpu().numpy()
        results = {"recall_at_1": num_hits / max(1, num_queries)}
        results |= verify_pairs(scores, labels[first] == labels[second], labels[first])
        return results | {"count": len(order), "broken": int((~sound).sum())}


def _find_nearest(rows: Tensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Indices of some rows, and of the nearest other row of each, until all have been given."""
    for queries in torch.arange(len(rows), device=rows.device).split(_QUERIES):
        cosines = rows[queries] @ rows.T
        cosines[torch.arange(len(queries)), queries] = -torch.inf
        yield queries.cpu().numpy(), cosines.argmax(1).cpu().numpy()


def pairs(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and second images of pairs of the same class, then of others; a function of the labels."""
    num_images = len(labels)
    images = np.arange(num_images)
    # Sorted by class, a class is a run [class_start, class_start + class_size).
    by_class = np.argsort(labels, kind="stable")
    position = np.argsort(by_class)
    _, class_index, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
    class_start = (np.cumsum(class_sizes) - class_sizes)[class_index]
    class_size = class_sizes[class_index]

    # Positive pair: the next image of the same class, cyclically.
    has_positive = class_size > 1
    positive = class_start + (position - class_start + 1) % class_size

    # Negative pair: a random image among all others; indices after the own class are shifted.
    num_negatives = num_images - class_size
    has_negative = num_negatives > 0
    negative = mix(images, key_of("pairs")) % np.maximum(num_negatives, 1).astype(np.uint64)
    negative = negative.astype(np.int64)
    negative = np.where(negative < class_start, negative, negative + class_size)

    first = np.concatenate([images[has_positive], images[has_negative]])
    second = by_class[np.concatenate([positive[has_positive], negative[has_negative]])]
    return first, second


def verify_pairs(
    scores: np.ndarray, same: np.ndarray, classes: np.ndarray
) -> dict[str, float | None]:
    """Accuracy and threshold of pairs with these scores; `classes` make folds."""
    class_index = np.unique(classes, return_inverse=True)[1]
    fold_of_pair = class_index % _FOLDS
    folds = np.unique(fold_of_pair)
    if len(folds) < 2:
        return {"verification_accuracy": None, "threshold": None}
    num_right = 0
    for fold in folds:
        is_tested = fold_of_pair == fold
        threshold = find_threshold(scores[~is_tested], same[~is_tested])
        num_right += ((scores[is_tested] >= threshold) == same[is_tested]).sum()
    return {
        "verification_accuracy": float(num_right / len(scores)),
        "threshold": find_threshold(scores, same),
    }


def find_threshold(scores: np.ndarray, same: np.ndarray) -> float:
    """The lowest best threshold for decisions of "score >= threshold", between two scores."""
    values, value_index = np.unique(scores, return_inverse=True)
    edges = np.concatenate([[values[0] - 1], (values[1:] + values[:-1]) / 2, [values[-1] + 1]])
    # Right decisions that a threshold below a value gains over one above it.
    gain = np.bincount(value_index, np.where(same, 1, -1))
    gain_by_edge = np.append(0, gain[::-1]).cumsum()[::-1]
    return float(edges[gain_by_edge.argmax()])
