"""Evaluation of embeddings: recall@1, the same on any layout."""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.classification.batches import Batch
from common.data.source import Source
from common.distributed.collectives import all_or_none, broadcast_object, gather_to_main

_QUERIES = 1024  # compared at once with all images


class EmbeddingEvaluation:
    """Results of one evaluation of `val` by embeddings. It is given every batch once, on any rank, like an `Evaluation`.

    recall_at_1: share of the images whose nearest other image, by cosine, has their class. Images without another one of
        their class don't count (as in Oh Song et al., 2016, arXiv:1511.06452).

    An image that can't be read is not found. The main process compares.
    """

    counts, mistakes, calibration = SimpleNamespace(confusion=None), (), None  # nothing to draw

    def __init__(self, val: Source, device: torch.device | str, thorough: bool = False) -> None:
        self._labels, self._device = val.labels, device
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def update(self, batch: Batch, embeddings: Tensor) -> None:
        """Take the embeddings [B, D] of a batch of the validation set."""
        embeddings = F.normalize(embeddings if embeddings.dtype == torch.float64 else embeddings.float())
        sound = embeddings.isfinite().all(1)
        sound = sound if batch.readable is None else sound & batch.readable
        self._parts.append((batch.positions, embeddings, sound))

    def results(self) -> dict:
        """`recall_at_1`, `count` and `broken`, on every rank. A collective."""
        of_ranks = gather_to_main([torch.cat(columns).cpu().numpy() for columns in zip(*self._parts, strict=True)])
        with all_or_none("comparing embeddings"):
            parts = [part for part in of_ranks or () if part]
            found = self._compared(*map(np.concatenate, zip(*parts, strict=True))) if parts else None
        return broadcast_object(found)

    def details(self) -> dict:
        """Nothing."""
        return {}

    def _compared(self, positions: np.ndarray, embeddings: np.ndarray, sound: np.ndarray) -> dict:
        order = positions.argsort()
        if positions[order].tolist() != [*range(len(self._labels))]:
            raise RuntimeError(f"evaluated {len(order)} images of {len(self._labels)}: each must count exactly once")
        sound = sound[order]
        labels, rows = self._labels[sound], torch.from_numpy(embeddings[order[sound]]).to(self._device)
        hits = 0
        for queries in torch.arange(len(rows), device=rows.device).split(_QUERIES):
            cosines = rows[queries] @ rows.T
            cosines[torch.arange(len(queries)), queries] = -torch.inf  # not with itself
            hits += (labels[cosines.argmax(1).cpu().numpy()] == labels[queries.cpu().numpy()]).sum()
        _, classes, sizes = np.unique(self._labels, return_inverse=True, return_counts=True)
        recall = hits / max(1, (sizes[classes] > 1).sum())
        return {"recall_at_1": recall, "count": len(order), "broken": int((~sound).sum())}
