"""Calibration agrees with its definition and with scikit-learn."""

import numpy as np
import pytest
import sklearn.metrics
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from common.classification.calibration import TEMPERATURES, Calibration


def draw_overconfident(
    count: int = 2003, classes: int = 7, factor: float = 2.5
) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from what these logits divided by `factor` say: the best temperature
    is about `factor`.
    """
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64) * 3
    return logits * factor, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


def calibrate(
    logits: Tensor, labels: Tensor, counted: Tensor | None = None, **options
) -> Calibration:
    calibration = Calibration("cpu", **options)
    if counted is None:
        counted = torch.ones(len(labels), dtype=torch.bool)
    for indices in torch.arange(len(labels)).split(100):
        right = logits[indices].argmax(1) == labels[indices]
        calibration.update(logits[indices], labels[indices], right, counted[indices])
    return calibration


def compute_ece(logits: Tensor, labels: Tensor) -> float:
    """Guo et al., 2017, equation 3, with 15 bins."""
    confidences, predicted = logits.softmax(1).max(1)
    total = 0.0
    for low in range(15):
        inside = (confidences > low / 15) & (confidences <= (low + 1) / 15)
        if inside.any():
            accuracy = (predicted[inside] == labels[inside]).double().mean()
            gap = accuracy - confidences[inside].mean()
            total += inside.double().mean() * gap.abs()
    return float(total)


def test_ece_and_nll_are_those_of_the_definition() -> None:
    logits, labels = draw_overconfident()
    results = calibrate(logits, labels, temperatures=TEMPERATURES).results()
    best = results["temperature"]

    def compute_nll(temperature: float) -> float:
        return sklearn.metrics.log_loss(labels, (logits / temperature).softmax(1))

    assert results["ece"] == pytest.approx(compute_ece(logits, labels), abs=1e-7)
    assert results["ece_after"] == pytest.approx(compute_ece(logits / best, labels), abs=1e-7)
    assert results["nll"] == pytest.approx(compute_nll(1), rel=1e-6)
    assert results["nll_after"] == pytest.approx(compute_nll(best), rel=1e-6)
    exact = minimize_scalar(
        compute_nll, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-6}
    )
    assert best == pytest.approx(exact.x, rel=0.012)
    assert results["nll_after"] == pytest.approx(exact.fun, rel=1e-4)
    assert 0.03 > results["ece_after"] < results["ece"] > 0.05, "numbers worth comparing"
    assert sum(row["images"] for row in results["bins"]) == len(labels)


def test_float32_with_huge_logits_and_images_that_do_not_count() -> None:
    logits, labels = draw_overconfident(300)
    expected = calibrate(logits, labels).results()
    nans = torch.full((5, 7), float("nan"))
    huge = 1e30 * torch.ones(5, 7)
    more_logits = torch.cat([logits.float(), nans, huge])
    more_labels = torch.cat([labels, labels[:10]])
    results = calibrate(more_logits, more_labels, torch.arange(310) < 300).results()
    for name in ("ece", "nll"):
        assert results[name] == pytest.approx(expected[name], rel=1e-5)
    sure = torch.tensor([[1e38, -1e38]])
    results = calibrate(sure, torch.tensor([1]), temperatures=TEMPERATURES).results()
    assert results["ece"] == 1
    assert np.isfinite(results["nll"])


def test_without_a_best_temperature_there_is_none() -> None:
    """With every image right, the smaller the temperature the better."""
    logits = torch.eye(3)
    labels = torch.arange(3)
    results = calibrate(logits, labels, temperatures=TEMPERATURES).results()
    assert results["temperature"] is results["ece_after"] is results["nll_after"] is None
    assert results["ece"] > 0.4
    nothing_counted = torch.zeros(3, dtype=torch.bool)
    results = calibrate(logits, labels, nothing_counted, temperatures=TEMPERATURES).results()
    assert results["ece"] is results["nll"] is results["temperature"] is None
    logits = torch.zeros(2, 1)
    labels = torch.zeros(2, dtype=torch.int64)
    results = calibrate(logits, labels, temperatures=TEMPERATURES).results()
    assert results["ece"] == 0
    assert results["nll"] == 0
    assert results["temperature"] is None, "of a single class"
