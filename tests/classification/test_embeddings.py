"""Recall@1 against plain loops, the same on any number of processes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.classification.embeddings import EmbeddingEvaluation
from common.distributed.collectives import rank, world_size


def data(images: int = 60, classes: int = 13) -> tuple[np.ndarray, torch.Tensor]:
    """Labels, one of them only once, and embeddings that know something of them."""
    generator = np.random.default_rng(0)
    labels = np.append(generator.integers(classes - 1, size=images - 1), classes - 1)
    centres = generator.normal(size=(classes, 4))
    return labels, torch.tensor(centres[labels] + 0.7 * generator.normal(size=(images, 4)))


def rank_evaluates(broken: tuple[int, ...] = (), twice: bool = False) -> dict:
    labels, embeddings = data()
    found = EmbeddingEvaluation(SimpleNamespace(labels=labels), "cpu")
    batches = torch.arange(len(labels)).split(25)
    for rows in [*batches, *batches[:twice]][rank() :: world_size()]:
        readable = torch.tensor([int(row) not in broken for row in rows])
        found.update(SimpleNamespace(positions=rows, readable=readable), 5 * embeddings[rows])
    return found.results()


def by_hand(broken: tuple[int, ...]) -> float:
    labels, embeddings = data()
    unit = (embeddings / embeddings.norm(dim=1, keepdim=True)).numpy()
    sound, hits, queries = [row for row in range(len(labels)) if row not in broken], 0, 0
    for row in range(len(labels)):
        queries += (labels == labels[row]).sum() > 1
        if row in sound:
            nearest = max((other for other in sound if other != row), key=lambda other: unit[row] @ unit[other])
            hits += labels[nearest] == labels[row]
    return hits / queries


@pytest.mark.parametrize("broken", [(), (3, 20, 41)])
def test_results_are_those_of_plain_loops_on_any_layout(processes, broken: tuple[int, ...]) -> None:
    """Batches of 25, 25 and 10; images that can't be read are missed. An image counts once."""
    recall = by_hand(broken)
    assert 0.3 < recall < 0.95
    for ranks in (1, 2, 3):
        for results in processes.run(rank_evaluates, broken, ranks=ranks):
            assert results == {"recall_at_1": pytest.approx(recall, abs=1e-12), "count": 60, "broken": len(broken)}
    with pytest.raises(RuntimeError, match="evaluated 85 images of 60"):
        rank_evaluates(broken, twice=True)
