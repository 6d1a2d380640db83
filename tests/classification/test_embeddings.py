"""Recall@1 and verification accuracy against plain loops, the same on any number of processes."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.classification.embeddings import EmbeddingEvaluation, pairs
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


def by_hand(broken: tuple[int, ...]) -> tuple[float, float]:
    labels, embeddings = data()
    unit = (embeddings / embeddings.norm(dim=1, keepdim=True)).numpy()
    sound, hits, queries = [row for row in range(len(labels)) if row not in broken], 0, 0
    for row in range(len(labels)):
        queries += (labels == labels[row]).sum() > 1
        if row in sound:
            nearest = max(
                (other for other in sound if other != row),
                key=lambda other: unit[row] @ unit[other],
            )
            hits += labels[nearest] == labels[row]
    mine, right = labels[sound], 0
    first, second = pairs(mine)
    scores = np.array(
        [unit[sound[one]] @ unit[sound[other]] for one, other in zip(first, second, strict=True)]
    )
    names, same = sorted({*mine[first]}), mine[first] == mine[second]
    for place in range(len(scores)):
        fold = names.index(mine[first[place]]) % 10
        others = [names.index(mine[one]) % 10 != fold for one in first]
        right += (scores[place] >= best(scores[others], same[others])) == same[place]
    return hits / queries, right / len(scores)


def best(scores: np.ndarray, same: np.ndarray) -> float:
    ordered = sorted({*scores})
    middles = [(low + high) / 2 for low, high in itertools.pairwise(ordered)]
    edges = [ordered[0] - 1, *middles, ordered[-1] + 1]
    return max(edges, key=lambda edge: ((scores >= edge) == same).sum())


@pytest.mark.parametrize("broken", [(), (3, 20, 41)])
def test_results_are_those_of_plain_loops_on_any_layout(processes, broken: tuple[int, ...]) -> None:
    """Batches of 25, 25 and 10; images that can't be read are missed, and in no pair."""
    recall, accuracy = by_hand(broken)
    assert 0.3 < recall < 0.95 and 0.6 < accuracy < 0.95
    for ranks in (1, 2, 3):
        for results in processes.run(rank_evaluates, broken, ranks=ranks):
            assert results["recall_at_1"] == pytest.approx(recall, abs=1e-12)
            assert results["verification_accuracy"] == pytest.approx(accuracy, abs=1e-12)
            assert (results["count"], results["broken"]) == (60, len(broken))


def test_an_image_counts_once() -> None:
    with pytest.raises(RuntimeError, match="evaluated 85 images of 60"):
        rank_evaluates(twice=True)


def test_pairs_are_of_the_same_class_and_of_others() -> None:
    labels, _ = data(500)
    first, second = pairs(labels)
    same = labels[first] == labels[second]
    assert (first != second).all() and same.tolist() == [True] * 499 + [False] * 500
    assert len(np.unique(second[same])) == 499 and len(np.unique(second[~same])) > 250
    assert all(
        np.array_equal(one, other)
        for one, other in zip((first, second), pairs(labels), strict=True)
    )


def test_one_class_has_no_verification() -> None:
    found = EmbeddingEvaluation(SimpleNamespace(labels=np.zeros(3, int)), "cpu")
    found.update(SimpleNamespace(positions=torch.arange(3), readable=None), torch.randn(3, 4))
    results = found.results()
    assert results["recall_at_1"] == 1 and results["verification_accuracy"] is None
