"""Calibration agrees with its definition and with scikit-learn."""

import numpy as np
import pytest
import sklearn.metrics
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from common.classification.calibration import TEMPERATURES, Calibration


def overconfident(
    count: int = 2003, classes: int = 7, factor: float = 2.5
) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from what these logits divided by `factor` say: the best temperature
    is about `factor`.
    """
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64) * 3
    return logits * factor, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


def calibrated(
    logits: Tensor, labels: Tensor, counted: Tensor | None = None, **options
) -> Calibration:
    calibration = Calibration("cpu", **options)
    counted = torch.ones(len(labels), dtype=torch.bool) if counted is None else counted
    for these in torch.arange(len(labels)).split(100):
        right = logits[these].argmax(1) == labels[these]
        calibration.update(logits[these], labels[these], right, counted[these])
    return calibration


def ece(logits: Tensor, labels: Tensor) -> float:
    """Guo et al., 2017, equation 3, with 15 bins."""
    confidences, predicted = logits.softmax(1).max(1)
    total = 0.0
    for low in range(15):
        inside = (confidences > low / 15) & (confidences <= (low + 1) / 15)
        if inside.any():
            gap = (predicted[inside] == labels[inside]).double().mean() - confidences[inside].mean()
            total += inside.double().mean() * gap.abs()
    return float(total)


def test_ece_and_nll_are_those_of_the_definition() -> None:
    logits, labels = overconfident()
    found = calibrated(logits, labels, temperatures=TEMPERATURES).results()
    best = found["temperature"]

    def nll(temperature: float) -> float:
        return sklearn.metrics.log_loss(labels, (logits / temperature).softmax(1))

    assert found["ece"] == pytest.approx(ece(logits, labels), abs=1e-7)
    assert found["ece_after"] == pytest.approx(ece(logits / best, labels), abs=1e-7)
    assert (found["nll"], found["nll_after"]) == (
        pytest.approx(nll(1), rel=1e-6),
        pytest.approx(nll(best), rel=1e-6),
    )
    exact = minimize_scalar(nll, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-6})
    assert best == pytest.approx(exact.x, rel=0.012) and found["nll_after"] == pytest.approx(
        exact.fun, rel=1e-4
    )
    assert 0.03 > found["ece_after"] < found["ece"] > 0.05, "numbers worth comparing"
    assert sum(row["images"] for row in found["bins"]) == len(labels)


def test_float32_with_huge_logits_and_images_that_do_not_count() -> None:
    logits, labels = overconfident(300)
    wanted = calibrated(logits, labels).results()
    more = torch.cat([logits.float(), torch.full((5, 7), float("nan")), 1e30 * torch.ones(5, 7)])
    counted = torch.arange(310) < 300
    found = calibrated(more, torch.cat([labels, labels[:10]]), counted).results()
    assert [found["ece"], found["nll"]] == pytest.approx([wanted["ece"], wanted["nll"]], rel=1e-5)
    sure = calibrated(
        torch.tensor([[1e38, -1e38]]), torch.tensor([1]), temperatures=TEMPERATURES
    ).results()
    assert sure["ece"] == 1 and np.isfinite(sure["nll"])


def test_without_a_best_temperature_there_is_none() -> None:
    """With every image right, the smaller the temperature the better."""
    found = calibrated(torch.eye(3), torch.arange(3), temperatures=TEMPERATURES).results()
    assert (
        found["temperature"] is found["ece_after"] is found["nll_after"] is None
        and found["ece"] > 0.4
    )
    nothing = calibrated(
        torch.eye(3), torch.arange(3), torch.zeros(3, dtype=torch.bool), temperatures=TEMPERATURES
    )
    assert (
        nothing.results()["ece"]
        is nothing.results()["nll"]
        is nothing.results()["temperature"]
        is None
    )
    one = calibrated(
        torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), temperatures=TEMPERATURES
    ).results()
    assert (one["ece"], one["nll"], one["temperature"]) == (0, 0, None), "of a single class"
