"""Calibration agrees with its definition and with scikit-learn, and all layouts count the same."""

from unittest.mock import MagicMock

import numpy as np
import pytest
import sklearn.metrics
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from common.classification.batches import Batch
from common.classification.calibration import TEMPERATURES, Calibration
from common.classification.evaluation import Evaluation
from common.data.source import ModelClasses
from common.distributed import collectives
from tests.harness.processes import Processes


def overconfident(count: int = 2003, classes: int = 7, factor: float = 2.5) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from what these logits divided by `factor` say: the best temperature is about `factor`."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64) * 3
    return logits * factor, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


def calibrated(logits: Tensor, labels: Tensor, counted: Tensor | None = None, **options) -> Calibration:
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
    assert (found["nll"], found["nll_after"]) == (pytest.approx(nll(1), rel=1e-6), pytest.approx(nll(best), rel=1e-6))
    exact = minimize_scalar(nll, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-6})
    assert best == pytest.approx(exact.x, rel=0.012) and found["nll_after"] == pytest.approx(exact.fun, rel=1e-4)
    assert 0.03 > found["ece_after"] < found["ece"] > 0.05, "numbers worth comparing"
    assert sum(row["images"] for row in found["bins"]) == len(labels)


def test_float32_with_huge_logits_and_images_that_do_not_count() -> None:
    logits, labels = overconfident(300)
    wanted = calibrated(logits, labels).results()
    more = torch.cat([logits.float(), torch.full((5, 7), float("nan")), 1e30 * torch.ones(5, 7)])
    counted = torch.arange(310) < 300
    found = calibrated(more, torch.cat([labels, labels[:10]]), counted).results()
    assert [found["ece"], found["nll"]] == pytest.approx([wanted["ece"], wanted["nll"]], rel=1e-5)
    sure = calibrated(torch.tensor([[1e38, -1e38]]), torch.tensor([1]), temperatures=TEMPERATURES).results()
    assert sure["ece"] == 1 and np.isfinite(sure["nll"])


def test_without_a_best_temperature_there_is_none() -> None:
    """With every image right, the smaller the temperature the better."""
    found = calibrated(torch.eye(3), torch.arange(3), temperatures=TEMPERATURES).results()
    assert found["temperature"] is found["ece_after"] is found["nll_after"] is None and found["ece"] > 0.4
    nothing = calibrated(torch.eye(3), torch.arange(3), torch.zeros(3, dtype=torch.bool), temperatures=TEMPERATURES)
    assert nothing.results()["ece"] is nothing.results()["nll"] is nothing.results()["temperature"] is None
    one = calibrated(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), temperatures=TEMPERATURES).results()
    assert (one["ece"], one["nll"], one["temperature"]) == (0, 0, None), "of a single class"


def evaluate_a_share(multi_label: bool) -> tuple:
    """Uneven shares, in float32: rank r takes every W-th batch from r on."""
    logits, labels = overconfident(503)
    logits[20] = float("nan")
    logits[30], labels[30] = 10 * logits[30], (logits[30].argmax() + 1) % 7  # the worst mistake, if it could be read
    labels = torch.nn.functional.one_hot(labels, 7).bool() if multi_label else labels
    readable = torch.arange(503) != 30
    names = tuple("abcdefg")
    matched = ModelClasses(names, tuple(range(7)))
    source = MagicMock(classes=names, multi_label=multi_label, __len__=lambda _: 503, model_classes=matched)
    found = Evaluation(source, "cpu")
    for these in torch.arange(503).split(16)[collectives.rank() :: collectives.world_size()]:
        batch = Batch(torch.zeros(len(these)), labels[these], these, readable=readable[these])
        found.update(batch, logits[these].float())
    return found.results(), found.details(), found.mistakes


@pytest.mark.parametrize("multi_label", [False, True])
def test_all_layouts_judge_alike_to_the_last_digit(processes: Processes, multi_label: bool) -> None:
    alone, *more = evaluate_a_share(multi_label)
    loss = alone.pop("loss")  # a sum of floats, which has an order
    assert alone["count"] == 503 and ("calibration" in more[0]) != multi_label
    if not multi_label:
        logits, labels = overconfident(503)
        sound = ~torch.isin(torch.arange(503), torch.tensor([20, 30]))
        assert alone["ece"] == pytest.approx(ece(logits[sound], labels[sound]), abs=1e-4)
        assert more[1] and not {20, 30} & {mistake.index for mistake in more[1]}
    for ranks in (2, 3):
        for results, *others in processes.run(evaluate_a_share, multi_label, ranks=ranks):
            assert np.isclose(results.pop("loss"), loss, rtol=1e-12, equal_nan=True)
            assert (results, others) == (alone, more)
