"""Metrics agree with scikit-learn, and do not depend on how samples are spread over ranks."""

import numpy as np
import pytest
import sklearn.metrics
import torch
import torch.nn.functional as F

from common.classification import metrics
from common.classification.metrics import ClassificationCounts


def draw_samples(count: int = 203, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits on a coarse grid, so that ties are common, and labels."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (count, classes), generator=generator) / 2
    labels = torch.randint(0, classes, (count,), generator=generator)
    return logits, labels


def count_samples(
    logits: torch.Tensor, labels: torch.Tensor, batch_size: int = 16, **options
) -> ClassificationCounts:
    counts = ClassificationCounts(logits.shape[1], "cpu", **options)
    batches = zip(logits.split(batch_size), labels.split(batch_size), strict=True)
    for batch_logits, batch_labels in batches:
        counts.update(batch_logits, batch_labels)
    return counts


def test_single_label_results_agree_with_scikit_learn() -> None:
    logits, labels = draw_samples()
    logits += torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) / 100
    # Class 6 neither occurs nor is predicted.
    labels[labels == 6] = 5
    logits[:, 6] = -9
    counts = count_samples(logits, labels)
    predicted = logits.argmax(1)
    results = counts.results()
    classes = range(7)
    top1 = sklearn.metrics.accuracy_score(labels, predicted)
    top5 = sklearn.metrics.top_k_accuracy_score(labels, logits, k=5, labels=classes)
    mean_class_accuracy = sklearn.metrics.balanced_accuracy_score(labels, predicted)
    f1_macro = sklearn.metrics.f1_score(labels, predicted, average="macro")
    confusion = sklearn.metrics.confusion_matrix(labels, predicted, labels=classes)
    assert results["top1"] == pytest.approx(top1)
    assert results["top5"] == pytest.approx(top5)
    assert results["mean_class_accuracy"] == pytest.approx(mean_class_accuracy)
    assert results["f1_macro"] == pytest.approx(f1_macro)
    assert results["loss"] == pytest.approx(F.cross_entropy(logits.double(), labels).item())
    assert results["count"] == 203
    assert results["broken"] == 0
    assert results["per_class"][6] is None
    assert np.array_equal(counts.confusion, confusion)


def test_multi_label_results_agree_with_scikit_learn() -> None:
    logits, _ = draw_samples()
    labels = torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)) < 0.3
    results = count_samples(logits, labels, multi_label=True).results()
    predicted = logits.sigmoid() > 0.5
    for name, average in (("f1", "micro"), ("f1_macro", "macro"), ("per_class", None)):
        f1 = sklearn.metrics.f1_score(labels, predicted, average=average)
        assert results[name] == pytest.approx(f1)
    exact_match = sklearn.metrics.accuracy_score(labels, predicted)
    assert results["exact_match"] == pytest.approx(exact_match)
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double()).item()
    assert results["loss"] == pytest.approx(loss)


def test_an_image_that_could_not_be_read_is_wrong_and_not_absent() -> None:
    sure = torch.eye(3) * 10
    counts = ClassificationCounts(3, "cpu")
    counts.update(sure, torch.arange(3), readable=torch.tensor([True, True, False]))
    results = counts.results()
    assert results["top1"] == 2 / 3
    assert results["count"] == 3
    assert results["broken"] == 1
    assert results["per_class"] == [1, 1, 0]
    assert results["loss"] == pytest.approx(F.cross_entropy(sure, torch.arange(3)).item())

    counts = ClassificationCounts(2, "cpu", multi_label=True)
    labels = torch.tensor([[True, False], [True, False], [False, False]])
    counts.update(labels * 2.0 - 1, labels, readable=torch.tensor([True, False, False]))
    results = counts.results()
    assert results["exact_match"] == 1 / 3
    assert results["f1"] == 2 / 3
    assert results["broken"] == 2


def test_ties_nans_and_nothing_counted() -> None:
    counts = ClassificationCounts(7, "cpu")
    counts.update(torch.zeros(7, 7), torch.arange(7))
    assert counts.results()["top1"] == 1 / 7
    assert counts.results()["top5"] == 5 / 7
    counts = ClassificationCounts(2, "cpu")
    counts.update(torch.full((2, 2), float("nan")), torch.tensor([0, 1]))
    assert counts.results()["top1"] == 0
    assert np.isnan(counts.results()["loss"])
    results = count_samples(*draw_samples(classes=3)).results()
    assert results["top5"] == 1
    assert results["top1"] < 1
    empty = ClassificationCounts(3, "cpu").results()
    assert empty["top1"] is empty["loss"] is empty["mean_class_accuracy"] is None
    assert empty["count"] == 0


def test_very_many_classes_are_counted_without_the_matrix(monkeypatch) -> None:
    logits, labels = draw_samples()
    at_once = count_samples(logits, labels, batch_size=203)
    monkeypatch.setattr(metrics, "AT_ONCE", metrics.SCORE_BINS)  # 146 rows, and one class
    in_chunks = count_samples(logits, labels, batch_size=203)
    expected = at_once.results()
    expected_loss = pytest.approx(expected["loss"])
    results = in_chunks.results()
    assert results | {"loss": expected_loss} == expected
    for name, count in at_once._counts.items():
        assert torch.equal(in_chunks._counts[name], count)
    monkeypatch.setattr(metrics, "CONFUSION_CLASSES", 6)
    counts = count_samples(logits, labels, batch_size=203)
    coarse = counts.results()
    assert counts.confusion is None
    assert coarse | {"thresholds": results["thresholds"]} == results
    assert {128 * threshold % 1 for threshold in coarse["thresholds"]} == {0}


@pytest.mark.parametrize("multi_label", [False, True])
def test_metrics_of_each_class_agree_with_scikit_learn(multi_label: bool) -> None:
    """Also of a class that nothing shows, one that is never predicted, an image with a NaN, and ties."""
    logits, labels = draw_samples()
    logits[:, 5] = -9
    logits[17] = float("nan")
    labels[labels == 6] = 0
    predicted = torch.where(logits.isnan().any(1), 7, logits.argmax(1))  # a NaN predicts nothing
    if multi_label:
        labels = F.one_hot(labels, 7) | F.one_hot(labels.roll(1), 7)
        predicted = (logits > 0).long()
    expected = sklearn.metrics.precision_recall_fscore_support(
        labels, predicted, labels=range(7), zero_division=np.nan
    )
    table = count_samples(logits, labels, multi_label=multi_label).per_class()
    for key, column in zip(("precision", "recall", "f1", "images"), expected, strict=True):
        actual = np.array([row[key] for row in table], dtype=float)  # None becomes NaN
        np.testing.assert_allclose(actual, column, rtol=1e-12, equal_nan=True, err_msg=key)
    assert table[6]["images"] == 0
    assert table[6]["recall"] is table[6]["threshold"] is None
    assert table[5]["precision"] is None
    assert table[5]["f1"] == 0


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_threshold_has_the_best_f1_of_scikit_learns_curve(multi_label: bool) -> None:
    logits, labels = draw_samples(classes=3)
    labels[labels == 2] = 0
    logits[labels == 1, 1] += 1
    truth = F.one_hot(labels, 3).bool()
    if multi_label:
        scores = logits.sigmoid()
        counts = count_samples(logits, truth, multi_label=True)
    else:
        scores = logits.softmax(1)
        counts = count_samples(logits, labels)
    assert counts.per_class()[2]["threshold"] is None, "of a class that nothing shows"
    steps = np.arange(metrics.SCORE_BINS) / metrics.SCORE_BINS
    for i in (0, 1):
        row = counts.per_class()[i]
        class_scores = scores[:, i].numpy()
        class_truth = truth[:, i].numpy()
        rounded = np.floor(class_scores * metrics.SCORE_BINS) / metrics.SCORE_BINS
        precision, recall, _ = sklearn.metrics.precision_recall_curve(class_truth, rounded)
        best_f1 = (2 * precision * recall / np.maximum(precision + recall, 1e-12)).max()
        assert row["f1_at_threshold"] == pytest.approx(best_f1, rel=1e-12)
        positive = class_scores[:, None] >= steps
        hits = (class_truth[:, None] & positive).sum(0)
        f1 = 2 * hits / (class_truth.sum() + positive.sum(0))
        best_steps = steps[f1 == f1.max()]
        assert row["threshold"] == min(best_steps, key=lambda step: abs(step - 0.5))
        assert f1.max() > f1[metrics.SCORE_BINS // 2], "a choice that matters"


def test_a_perfect_class_keeps_a_threshold_of_one_half() -> None:
    counts = ClassificationCounts(2, "cpu")
    counts.update(torch.eye(2) * 10, torch.arange(2))
    assert counts.thresholds() == ([0.5, 0.5], [1, 1])
    counts.update(torch.eye(2) * 10, torch.arange(2), readable=torch.tensor([True, False]))
    assert counts.thresholds() == ([0.5, 0.5], [1, 2 / 3])
