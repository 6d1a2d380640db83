"""Evaluation of embeddings: recall@1, and verification accuracy as on LFW."""

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
    """Results of one evaluation by embeddings. It is given every batch once, on any rank, like an
    `Evaluation`.

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
        embeddings = F.normalize(
            embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        )
        sound = embeddings.isfinite().all(1) & (True if batch.readable is None else batch.readable)
        self._parts.append((batch.positions, embeddings, sound))

    def results(self) -> dict:
        """The numbers above, `count` and `broken`, on every rank. A collective."""
        of_ranks = gather_to_main(
            [torch.cat(columns).cpu().numpy() for columns in zip(*self._parts, strict=True)]
        )
        with all_or_none("comparing embeddings"):
            parts = [part for part in of_ranks or () if part]
            found = (
                self._compared(*map(np.concatenate, zip(*parts, strict=True))) if parts else None
            )
        return broadcast_object(found)

    def details(self) -> dict:
        """Nothing."""
        return {}

    def draw(self, pictures: Any) -> None:
        """Nothing."""

    def _compared(self, positions: np.ndarray, embeddings: np.ndarray, sound: np.ndarray) -> dict:
        order = positions.argsort()
        if positions[order].tolist() != [*range(len(self._labels))]:
            raise RuntimeError(
                f"evaluated {len(order)} images of {len(self._labels)}: each must count exactly "
                "once"
            )
        sound = sound[order]
        labels, rows = (
            self._labels[sound],
            torch.from_numpy(embeddings[order[sound]]).to(self._device),
        )
        hits = sum(
            (labels[nearest] == labels[queries]).sum() for queries, nearest in _nearest(rows)
        )
        _, classes, sizes = np.unique(self._labels, return_inverse=True, return_counts=True)
        first, second = pairs(labels)
        scores = (rows[first] * rows[second]).sum(1).double().cpu().numpy()
        verified = verification(scores, labels[first] == labels[second], labels[first])
        return {
            "recall_at_1": hits / max(1, (sizes[classes] > 1).sum()),
            **verified,
            "count": len(order),
            "broken": int((~sound).sum()),
        }


def _nearest(rows: Tensor):
    """Indices of some rows, and of the nearest other row of each, until all have been given."""
    for queries in torch.arange(len(rows), device=rows.device).split(_QUERIES):
        cosines = rows[queries] @ rows.T
        cosines[torch.arange(len(queries)), queries] = -torch.inf
        yield queries.cpu().numpy(), cosines.argmax(1).cpu().numpy()


def pairs(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and second images of pairs of the same class, then of others; a function of the labels."""
    order, images = np.argsort(labels, kind="stable"), np.arange(len(labels))
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    start, size, place = (np.cumsum(sizes) - sizes)[classes], sizes[classes], np.argsort(order)
    others = np.maximum(len(labels) - size, 1)
    drawn = (mix(images, key_of("pairs")) % others.astype(np.uint64)).astype(int)
    drawn += size * (drawn >= start)
    have, lack = size > 1, size < len(labels)
    second = (start + (place - start + 1) % size)[have], drawn[lack]
    return np.concatenate([images[have], images[lack]]), order[np.concatenate(second)]


def verification(
    scores: np.ndarray, same: np.ndarray, classes: np.ndarray
) -> dict[str, float | None]:
    """Accuracy and threshold of pairs with these scores; `classes` make folds."""
    folds, right = np.unique(classes, return_inverse=True)[1] % _FOLDS, 0
    if len(np.unique(folds)) < 2:
        return {"verification_accuracy": None, "threshold": None}
    for fold in np.unique(folds):
        others, own = folds != fold, folds == fold
        right += ((scores[own] >= best_threshold(scores[others], same[others])) == same[own]).sum()
    return {
        "verification_accuracy": float(right / len(scores)),
        "threshold": best_threshold(scores, same),
    }


def best_threshold(scores: np.ndarray, same: np.ndarray) -> float:
    """The lowest best threshold for decisions of "score >= threshold", between two scores."""
    values, places = np.unique(scores, return_inverse=True)
    gain = np.bincount(places, np.where(same, 1, -1))  # in right decisions below a value
    edges = np.concatenate([[values[0] - 1], (values[1:] + values[:-1]) / 2, [values[-1] + 1]])
    return float(edges[np.append(0, gain[::-1]).cumsum()[::-1].argmax()])
