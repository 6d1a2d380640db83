"""Metrics agree with scikit-learn, and do not depend on how samples are spread over ranks."""

import numpy as np
import pytest
import sklearn.metrics
import torch
import torch.nn.functional as F

from common.classification import metrics
from common.classification.metrics import ClassificationCounts


def samples(count: int = 203, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits on a coarse grid, so that ties are common, and labels."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (count, classes), generator=generator) / 2
    return logits, torch.randint(0, classes, (count,), generator=generator)


def counted(
    logits: torch.Tensor, labels: torch.Tensor, batch: int = 16, **options
) -> ClassificationCounts:
    counts = ClassificationCounts(logits.shape[1], "cpu", **options)
    for these, those in zip(logits.split(batch), labels.split(batch), strict=True):
        counts.update(these, those)
    return counts


def test_single_label_results_agree_with_scikit_learn() -> None:
    logits, labels = samples()
    logits += torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) / 100
    labels[labels == 6], logits[:, 6] = 5, -9  # class 6 neither occurs nor is predicted
    counts, predicted = counted(logits, labels), logits.argmax(1)
    results = counts.results()
    every = range(7)
    assert results["top1"] == pytest.approx(sklearn.metrics.accuracy_score(labels, predicted))
    assert results["top5"] == pytest.approx(
        sklearn.metrics.top_k_accuracy_score(labels, logits, k=5, labels=every)
    )
    assert results["mean_class_accuracy"] == pytest.approx(
        sklearn.metrics.balanced_accuracy_score(labels, predicted)
    )
    assert results["f1_macro"] == pytest.approx(
        sklearn.metrics.f1_score(labels, predicted, average="macro")
    )
    assert results["loss"] == pytest.approx(F.cross_entropy(logits.double(), labels).item())
    assert (results["count"], results["broken"]) == (203, 0)
    assert results["per_class"][6] is None
    assert np.array_equal(
        counts.confusion, sklearn.metrics.confusion_matrix(labels, predicted, labels=every)
    )


def test_multi_label_results_agree_with_scikit_learn() -> None:
    logits, _ = samples()
    labels = torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)) < 0.3
    results, predicted = counted(logits, labels, multi_label=True).results(), logits.sigmoid() > 0.5
    for name, average in (("f1", "micro"), ("f1_macro", "macro"), ("per_class", None)):
        assert results[name] == pytest.approx(
            sklearn.metrics.f1_score(labels, predicted, average=average)
        )
    assert results["exact_match"] == pytest.approx(
        sklearn.metrics.accuracy_score(labels, predicted)
    )
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double()).item()
    assert results["loss"] == pytest.approx(loss)


def test_an_image_that_could_not_be_read_is_wrong_and_not_absent() -> None:
    sure = torch.eye(3) * 10
    counts = ClassificationCounts(3, "cpu")
    counts.update(sure, torch.arange(3), readable=torch.tensor([True, True, False]))
    results = counts.results()
    assert (results["top1"], results["count"], results["broken"]) == (2 / 3, 3, 1)
    assert results["per_class"] == [1, 1, 0]
    assert results["loss"] == pytest.approx(F.cross_entropy(sure, torch.arange(3)).item())

    counts = ClassificationCounts(2, "cpu", multi_label=True)
    labels = torch.tensor([[True, False], [True, False], [False, False]])
    counts.update(labels * 2.0 - 1, labels, readable=torch.tensor([True, False, False]))
    results = counts.results()
    assert (results["exact_match"], results["f1"], results["broken"]) == (1 / 3, 2 / 3, 2)


def test_ties_nans_and_nothing_counted() -> None:
    counts = ClassificationCounts(7, "cpu")
    counts.update(torch.zeros(7, 7), torch.arange(7))
    assert (counts.results()["top1"], counts.results()["top5"]) == (1 / 7, 5 / 7)
    counts = ClassificationCounts(2, "cpu")
    counts.update(torch.full((2, 2), float("nan")), torch.tensor([0, 1]))
    assert counts.results()["top1"] == 0 and np.isnan(counts.results()["loss"])
    results = counted(*samples(classes=3)).results()
    assert results["top5"] == 1 and results["top1"] < 1
    nothing = ClassificationCounts(3, "cpu").results()
    assert (nothing["top1"], nothing["loss"], nothing["mean_class_accuracy"], nothing["count"]) == (
        None,
    ) * 3 + (0,)


def test_very_many_classes_are_counted_without_the_matrix(monkeypatch) -> None:
    fine = counted(*samples(), batch=203)
    monkeypatch.setattr(metrics, "AT_ONCE", metrics.SCORE_BINS)  # 146 rows, and one class
    parts = counted(*samples(), batch=203)
    assert parts.results() | {"loss": pytest.approx(fine.results()["loss"])} == fine.results()
    assert all(torch.equal(parts._counts[name], count) for name, count in fine._counts.items())
    monkeypatch.setattr(metrics, "CONFUSION_CLASSES", 6)
    counts = counted(*samples(), batch=203)
    coarse = counts.results()
    assert (
        counts.confusion is None
        and coarse | {"thresholds": parts.results()["thresholds"]} == parts.results()
    )
    assert {128 * threshold % 1 for threshold in coarse["thresholds"]} == {0}


@pytest.mark.parametrize("multi_label", [False, True])
def test_metrics_of_each_class_agree_with_scikit_learn(multi_label: bool) -> None:
    """Also of a class that nothing shows, one that is never predicted, an image with a NaN, and ties."""
    logits, labels = samples()
    logits[:, 5], logits[17] = -9, float("nan")
    labels[labels == 6] = 0
    predicted = torch.where(logits.isnan().any(1), 7, logits.argmax(1))  # a NaN predicts nothing
    if multi_label:
        labels, predicted = F.one_hot(labels, 7) | F.one_hot(labels.roll(1), 7), (logits > 0).long()
    wanted = sklearn.metrics.precision_recall_fscore_support(
        labels, predicted, labels=range(7), zero_division=np.nan
    )
    found = counted(logits, labels, multi_label=multi_label).per_class()
    for key, column in zip(("precision", "recall", "f1", "images"), wanted, strict=True):
        here = [np.nan if row[key] is None else row[key] for row in found]
        np.testing.assert_allclose(here, column, rtol=1e-12, equal_nan=True, err_msg=key)
    assert found[6]["images"] == 0 and found[6]["recall"] is found[6]["threshold"] is None
    assert found[5]["precision"] is None and found[5]["f1"] == 0


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_threshold_has_the_best_f1_of_scikit_learns_curve(multi_label: bool) -> None:
    logits, labels = samples(classes=3)
    labels[labels == 2] = 0
    logits[labels == 1, 1] += 1
    scores = logits.sigmoid() if multi_label else logits.softmax(1)
    truth = F.one_hot(labels, 3).bool()
    counts = counted(logits, truth if multi_label else labels, multi_label=multi_label)
    assert counts.per_class()[2]["threshold"] is None, "of a class that nothing shows"
    steps = np.arange(metrics.SCORE_BINS) / metrics.SCORE_BINS
    for place in (0, 1):
        row = counts.per_class()[place]
        rounded = np.floor(scores[:, place].numpy() * metrics.SCORE_BINS) / metrics.SCORE_BINS
        precision, recall, _ = sklearn.metrics.precision_recall_curve(truth[:, place], rounded)
        best = (2 * precision * recall / np.maximum(precision + recall, 1e-12)).max()
        assert row["f1_at_threshold"] == pytest.approx(best, rel=1e-12)
        true, taken = truth[:, place].numpy()[:, None], scores[:, place].numpy()[:, None] >= steps
        every = 2 * (true & taken).sum(0) / (true.sum() + taken.sum(0))
        assert row["threshold"] == min(
            steps[every == every.max()], key=lambda step: abs(step - 0.5)
        )
        assert every.max() > every[metrics.SCORE_BINS // 2], "a choice that matters"


def test_a_perfect_class_keeps_a_threshold_of_one_half() -> None:
    counts = ClassificationCounts(2, "cpu")
    counts.update(torch.eye(2) * 10, torch.arange(2))
    assert counts.thresholds() == ([0.5, 0.5], [1, 1])
    counts.update(torch.eye(2) * 10, torch.arange(2), readable=torch.tensor([True, False]))
    assert counts.thresholds() == ([0.5, 0.5], [1, 2 / 3])
