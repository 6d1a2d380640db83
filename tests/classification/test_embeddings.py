"""Recall@1 and verification accuracy against plain loops, the same on any number of processes."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.classification.embeddings import EmbeddingEvaluation, pairs
from common.distributed.collectives import rank, world_size


def draw_data(images: int = 60, classes: int = 13) -> tuple[np.ndarray, torch.Tensor]:
    """Labels, one of them only once, and embeddings that know something of them."""
    generator = np.random.default_rng(0)
    labels = np.append(generator.integers(classes - 1, size=images - 1), classes - 1)
    centres = generator.normal(size=(classes, 4))
    noise = generator.normal(size=(images, 4))
    return labels, torch.tensor(centres[labels] + 0.7 * noise)


def evaluate_on_rank(broken: tuple[int, ...] = (), twice: bool = False) -> dict:
    labels, embeddings = draw_data()
    evaluation = EmbeddingEvaluation(SimpleNamespace(labels=labels), "cpu")
    batches = list(torch.arange(len(labels)).split(25))
    if twice:
        batches.append(batches[0])
    for indices in batches[rank() :: world_size()]:
        readable = torch.tensor([int(i) not in broken for i in indices])
        batch = SimpleNamespace(positions=indices, readable=readable)
        evaluation.update(batch, 5 * embeddings[indices])
    return evaluation.results()


def compute_in_loops(broken: tuple[int, ...]) -> tuple[float, float]:
    """Recall@1 and the accuracy of verification."""
    labels, embeddings = draw_data()
    unit = (embeddings / embeddings.norm(dim=1, keepdim=True)).numpy()
    readable = [i for i in range(len(labels)) if i not in broken]
    hits = 0
    for i in readable:
        candidates = [j for j in readable if j != i]
        nearest = max(candidates, key=lambda j: unit[i] @ unit[j])
        hits += labels[nearest] == labels[i]
    num_queries = 0
    for label in labels:
        num_queries += (labels == label).sum() > 1

    # Verification is cross-validated: a fold has every tenth class.
    labels = labels[readable]
    unit = unit[readable]
    first, second = pairs(labels)
    scores = (unit[first] * unit[second]).sum(1)
    same = labels[first] == labels[second]
    folds = np.unique(labels[first], return_inverse=True)[1] % 10
    right = 0
    for score, is_same, fold in zip(scores, same, folds, strict=True):
        threshold = find_threshold(scores[folds != fold], same[folds != fold])
        right += (score >= threshold) == is_same
    return hits / num_queries, right / len(scores)


def find_threshold(scores: np.ndarray, same: np.ndarray) -> float:
    ordered = sorted(set(scores))
    middles = [(low + high) / 2 for low, high in itertools.pairwise(ordered)]
    edges = [ordered[0] - 1] + middles + [ordered[-1] + 1]
    return max(edges, key=lambda edge: ((scores >= edge) == same).sum())


@pytest.mark.parametrize("broken", [(), (3, 20, 41)])
def test_results_are_those_of_plain_loops_on_any_layout(processes, broken: tuple[int, ...]) -> None:
    """Batches of 25, 25 and 10; images that can't be read are missed, and in no pair."""
    recall, accuracy = compute_in_loops(broken)
    assert 0.3 < recall < 0.95
    assert 0.6 < accuracy < 0.95
    for ranks in (1, 2, 3):
        for results in processes.run(evaluate_on_rank, broken, ranks=ranks):
            assert results["recall_at_1"] == pytest.approx(recall, abs=1e-12)
            assert results["verification_accuracy"] == pytest.approx(accuracy, abs=1e-12)
            assert results["count"] == 60
            assert results["broken"] == len(broken)


def test_an_image_counts_once() -> None:
    with pytest.raises(RuntimeError, match="evaluated 85 images of 60"):
        evaluate_on_rank(twice=True)


def test_pairs_are_of_the_same_class_and_of_others() -> None:
    labels, _ = draw_data(500)
    first, second = pairs(labels)
    same = labels[first] == labels[second]
    assert (first != second).all()
    assert same.tolist() == [True] * 499 + [False] * 500
    assert len(np.unique(second[same])) == 499
    assert len(np.unique(second[~same])) > 250
    first_again, second_again = pairs(labels)
    assert np.array_equal(first, first_again)
    assert np.array_equal(second, second_again)


def test_one_class_has_no_verification() -> None:
    evaluation = EmbeddingEvaluation(SimpleNamespace(labels=np.zeros(3, int)), "cpu")
    batch = SimpleNamespace(positions=torch.arange(3), readable=None)
    evaluation.update(batch, torch.randn(3, 4))
    results = evaluation.results()
    assert results["recall_at_1"] == 1
    assert results["verification_accuracy"] is None
