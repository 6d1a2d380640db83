"""Margins are those of a sample's own label, also of mixed images; sums count each sample exactly, in any order."""

import numpy as np
import pytest
import torch

from common.data.batch_plan import BatchPlan
from common.data.stream import Stream
from common.training.audit import Audit, margins

LOGITS = torch.tensor([[4.0, 1.0, 0.0], [4.0, 1.0, 0.0]], dtype=torch.float64)


class Images:
    def name(self, index: int) -> str:
        return f"{index}.png"


def one_hot(labels: list[int], smoothing: float = 0.0) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(labels), 3).double() * (1 - smoothing) + smoothing / 3


@pytest.mark.parametrize("smoothing", [0, 0.1])
def test_a_margin_is_the_own_logit_minus_the_largest_other_one(smoothing: float) -> None:
    found = margins(LOGITS, torch.tensor([0, 2]), one_hot([0, 2], smoothing))
    assert found.tolist() == [[3, -4], [1, 0]]


@pytest.mark.parametrize("smoothing", [0, 0.1])
def test_a_mixed_image_counts_if_most_of_it_is_its_own_and_never_against_its_partner(smoothing: float) -> None:
    targets = one_hot([0, 2], smoothing)
    mixed = 0.7 * targets + 0.3 * targets.flip(0)  # both images are 70 % their own
    assert margins(LOGITS, torch.tensor([0, 2]), mixed)[0].tolist() == [3, -1]  # against class 1
    assert margins(LOGITS, torch.tensor([2, 0]), mixed)[0].isnan().all()  # 30 % their own


def test_of_several_labels_the_decision_that_fits_worst_counts() -> None:
    labels = torch.tensor([[True, False, False], [False, True, True]])
    assert margins(LOGITS, labels, labels.double()).tolist() == [[-1, -4], [1, 0]]
    mixed = 0.7 * labels.double() + 0.3 * labels.double().flip(0)  # the images differ in every class: none is left out
    assert margins(LOGITS, labels, mixed).tolist() == [[-1, -4], [1, 0]]


def audit_of(rows: dict[int, np.ndarray], batch: int, broken: tuple[str, ...] = ()) -> Audit:
    """An audit of 10 samples that has counted the steps of `rows`, and sent them in the order given."""
    audit = Audit(Stream(10, batch, seed=3), BatchPlan(batch, 1, batch), Images())
    for step, of_step in rows.items():
        losses, *judged = torch.from_numpy(of_step)
        audit.take(step, losses, torch.stack(judged), broken)
        audit.confirm(step)
        audit.gather()
    return audit


def test_sums_are_those_of_each_sample_whatever_the_batches_and_their_order() -> None:
    random = np.random.default_rng(0)
    stream = Stream(10, 6, seed=3)
    indices = stream.indices(np.arange(60))
    rows = np.stack([random.random(60) * 5, random.normal(size=60), indices % 3])  # each sample has one other class
    six = audit_of({step + 1: rows[:, 6 * step : 6 * step + 6] for step in range(10)}, 6)
    backwards = audit_of({step + 1: rows[:, 6 * step : 6 * step + 6] for step in range(9, -1, -1)}, 6)
    fifteen = audit_of({step + 1: rows[:, 15 * step : 15 * step + 15] for step in range(4)}, 15)
    for other in (backwards, fifteen):
        assert other.tensors().keys() == six.tensors().keys() == {"seen", "loss", "margin", "other", "lead"}
        assert all(torch.equal(other.tensors()[name], tensor) for name, tensor in six.tensors().items())
    worst = six.suspects(1.0)
    of_sample = [rows[1][indices == index].mean() for index in range(10)]
    assert worst.indices.tolist() == np.argsort(of_sample).tolist() and worst.audited == 10
    assert worst.margins == pytest.approx(sorted(of_sample), abs=1e-6)
    assert worst.others.tolist() == (worst.indices % 3).tolist()
    assert worst.seen.sum() == 60


def test_the_class_of_most_votes_is_suggested() -> None:
    rows = np.zeros((3, 50))
    rows[2] = np.resize([1, 2, 1, 1, 2], (10, 5)).T.ravel()  # a vote of each sample in each epoch
    stream = Stream(10, 10, seed=3)
    of_epochs = {}
    for epoch in range(5):
        of_epochs[epoch + 1] = rows[:, 10 * epoch : 10 * epoch + 10]
        assert sorted(stream.indices(np.arange(10 * epoch, 10 * epoch + 10))) == [*range(10)]
    assert audit_of(of_epochs, 10).suspects(1.0).others.tolist() == [1] * 10


def test_images_that_were_not_read_and_mixed_ones_of_others_are_left_out() -> None:
    rows = np.ones((3, 10))
    rows[1, 4] = np.nan
    indices = Stream(10, 10, seed=3).indices(np.arange(10))
    broken = (f"{indices[7]}.png: is no image",)
    audit = audit_of({1: rows}, 10, broken)
    assert audit.tensors()["seen"][indices].tolist() == [int(place not in (4, 7)) for place in range(10)]
    assert audit.suspects(1.0).audited == 8


def test_steps_that_are_not_known_to_be_finite_do_not_count() -> None:
    audit = Audit(Stream(10, 10, seed=3), BatchPlan(10, 1, 10), Images())
    audit.take(1, torch.ones(10), None, ())
    audit.take(2, torch.ones(10), None, ())
    audit.confirm(1)
    audit.gather()
    assert audit.tensors()["seen"].tolist() == [1] * 10
    assert audit.suspects(0.2).losses.tolist() == [1, 1]


def test_sums_of_other_data_are_refused() -> None:
    audit = audit_of({1: np.ones((3, 10))}, 10)
    other = Audit(Stream(11, 10, seed=3), BatchPlan(10, 1, 10), Images())
    with pytest.raises(ValueError, match="11 samples"):
        other.load(audit.tensors())
    other = Audit(Stream(10, 5, seed=3), BatchPlan(5, 1, 5), Images())
    other.load(audit.tensors())
    assert other.tensors()["seen"].sum() == 10
