"""All ranks get the same report of every step, one step later, and stop together if a step was not finite."""

import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from common.distributed.collectives import rank, world_size
from common.errors import Refused
from common.run.step_reports import StepReport, StepReports
from common.training.step import StepOutcome
from common.training.update_size import Update
from tests.harness.processes import Processes

NAN = float("nan")
INF = float("inf")


def post_reports(
    state: StepReports,
    step: int,
    losses: list[float],
    norm: float = 1.0,
    stop: bool = False,
    **options,
) -> None:
    """The share of this rank: `losses` of as many positions, which follow those of the ranks before it.

    Under fp16 a norm that is not finite is an overflow, at which the scaler halves its scale; with
    `unseen` it does not.
    """
    if state.scaler and not (math.isfinite(norm) or options.get("unseen")):
        state.scaler.scale(torch.ones(()))
        state.scaler.update(state.scaler.get_scale() / 2)
    first = (step - 1) * state.global_batch_size + rank() * len(losses)
    positions = torch.arange(first, first + len(losses))
    outcome = StepOutcome(
        torch.tensor(losses), positions, options.get("wait", 0.0), options.get("broken", ())
    )
    ended_by = options.get("ended_by", ""), options.get("update"), options.get("lap")
    state.post(step, outcome, torch.tensor(norm), stop, *ended_by)


def read_refusal(state: StepReports) -> str:
    with pytest.raises(Refused) as raised:
        state.settle()
    return str(raised.value)


def fp16(scale: float = 2.0**16) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


HALF = "or look at these samples, or take a bf16 config: beyond 65,504 fp16 is infinite"
NOT_FINITE = {  # losses, gradient norm, under fp16, what is told
    "two losses": (
        [1.0, NAN, 1.0, NAN],
        1.0,
        False,
        "samples at positions 29, 31 is not finite; no checkpoint",
    ),
    "many losses": (
        [NAN] * 100,
        NAN,
        False,
        "positions 700, 701, 702, 703, 704, 705, 706, 707 and 92 more is not",
    ),
    "the gradient": ([1.0, 1.0], INF, False, "the gradient norm is not finite"),
    "the loss under fp16, which no smaller scale mends": ([NAN], NAN, True, HALF),
    "the sum of squares under fp16": ([1.0], INF, True, "the gradient norm is not finite"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", NOT_FINITE)
def test_a_value_that_is_not_finite_stops_the_run_and_is_named(case: str) -> None:
    losses, norm, half, message = NOT_FINITE[case]
    state = StepReports(len(losses), fp16() if half else None)
    post_reports(state, 8, losses, norm, unseen=math.isinf(norm))
    assert state.read() == []
    post_reports(state, 9, [1.0] * len(losses))
    text = read_refusal(state)
    assert text.startswith("step 8: the ") and message in text


def test_a_report_that_did_not_come_in_is_asked_for_again() -> None:
    """What saves a run after the loss of a process settles once more: no checkpoint of a step
    without a report.
    """
    state = StepReports(1)
    post_reports(state, 1, [NAN])
    assert read_refusal(state) == read_refusal(state)


def test_under_fp16_an_overflow_is_a_skipped_step() -> None:
    state = StepReports(1, fp16(8.0))
    state.add({"train/aux": 3.0})
    for step, norm in enumerate((1.0, INF, NAN, 1.0, INF), 1):
        post_reports(
            state,
            step,
            [1.0],
            norm,
            update=Update({}, torch.tensor([4.0, 2.0])) if step == 1 else None,
        )
    reports = state.settle()
    beside = {"weight_norm": 4.0, "update_ratio": 0.5}, {"train/aux": 3.0}
    assert (reports[0].update, reports[0].logged) == beside
    assert [report.skipped for report in reports] == [False, True, True, False, True]
    assert [report.loss_scale for report in reports] == [8.0, 4.0, 2.0, 2.0, 1.0]
    for step in range(6, 15):
        post_reports(state, step, [1.0], INF)
    assert sum(report.skipped for report in state.settle()) == 9, "down to a scale of 2 ** -9"
    post_reports(state, 15, [1.0], INF)
    assert read_refusal(state).startswith("step 15: gradients still overflow in fp16")


# --- on several ranks


def build_healthy_steps() -> list[dict]:
    """The update and the laps are posted with every second step."""
    state = StepReports(2 * world_size())
    reports = []
    for step in range(1, 5):
        values = [100.0 * step + rank(), 1.0]
        broken = (f"{rank()}.png: torn",) * ((step == 2) + (step == 3 and rank() == 1))
        ended_by = "enough" * (step == 3 and rank() == world_size() - 1)
        stop = step == 3 and rank() == world_size() - 1
        own_state = {"stop": stop, "wait": float(rank()), "broken": broken, "ended_by": ended_by}
        update = (
            Update({"lr_head": 0.1 * step}, torch.tensor([4.0, 2.0 * step]))
            if step % 2 == 0
            else None
        )
        lap = SimpleNamespace(seconds=lambda step=step: 10.0 * step + rank())
        post_reports(state, step, values, norm=0.5 * step, update=update, lap=lap, **own_state)
        reports += [asdict(report) for report in state.read()]
        assert len(reports) == step - 1
    return reports + [asdict(report) for report in [*state.settle(), *state.settle()]]


def test_all_ranks_get_the_same_reports_one_step_later_in_order(processes: Processes) -> None:
    ranks = 3
    answers = processes.run(build_healthy_steps, ranks=ranks)
    assert answers == [answers[0]] * ranks
    reports = [StepReport(**report) for report in answers[0]]
    assert [report.step for report in reports] == [1, 2, 3, 4]
    assert [report.ended_by for report in reports] == ["", "", "enough", ""]
    rank_sum = sum(range(ranks))
    for report in reports:
        assert report.loss == pytest.approx(
            (100 * report.step * ranks + rank_sum + ranks) / (2 * ranks)
        )
        assert (report.data_wait, report.grad_norm) == (rank_sum / ranks, 0.5 * report.step)
    # One rank's wish is everyone's.
    assert [report.stop for report in reports] == [False, False, True, False]
    assert reports[1].broken == tuple(f"{rank}.png: torn" for rank in range(ranks))
    assert reports[2].broken == ("1.png: torn",)
    assert reports[0].update == reports[2].update == {}
    assert reports[3].update == {"lr_head": 0.4, "weight_norm": 4.0, "update_ratio": 2.0}
    assert [list(report.ready) for report in reports] == [
        [],
        [30.0, 32.0, 34.0],
        [],
        [70.0, 72.0, 74.0],
    ]


def fail_on_one_rank(half: bool, norm: float) -> tuple[str, int]:
    state = StepReports(2 * world_size(), fp16() if half else None)
    message = ""
    step = 0
    try:
        while not message and step < 10:
            step += 1
            bad = step == 4 and rank() == 1
            # The exchange of names must not cross the refusal.
            broken = (f"{step}",) * (rank() != step % 2)
            post_reports(
                state, step, [1.0, NAN if bad else 1.0], norm if step == 4 else 1.0, broken=broken
            )
            state.read()
    except Refused as refused:
        message = str(refused)
    return message, step


def test_a_bad_loss_of_one_rank_stops_all_within_two_steps(processes: Processes) -> None:
    for half, norm in ((False, 1.0), (True, 1.0), (True, NAN)):
        answers = processes.run(fail_on_one_rank, half, norm, ranks=3)
        assert answers == [answers[0]] * 3
        message, step = answers[0]
        assert message.startswith("step 4: the loss of the samples at positions 21 is not finite")
        assert step == 5


# --- custom numbers


def test_custom_numbers_are_means_over_all_values_of_the_step() -> None:
    state = StepReports(2)
    state.add({"train/a": torch.tensor([1.0, 2.0]), "train/b": 3})
    state.add({"train/a": torch.tensor([6.0], requires_grad=True), "train/empty": torch.zeros(0)})
    post_reports(state, 1, [1.0, 2.0])
    state.add({"train/b": torch.tensor(0.25)})
    post_reports(state, 2, [1.0, 2.0])
    post_reports(state, 3, [1.0, 2.0])
    logged = [report.logged for report in state.settle()]
    assert logged == [{"train/a": 3.0, "train/b": 3.0}, {"train/b": 0.25}, {}]


@pytest.mark.parametrize(
    "value, message",
    [(torch.zeros(2, 3), "has shape [2, 3]; "), ("much", "is 'much'; "), (None, "is ")],
)
def test_an_invalid_custom_number_is_refused_at_once(value: object, message: str) -> None:
    with pytest.raises(Refused) as raised:
        StepReports(1).add({"train/a": value})
    assert str(raised.value).startswith(f"run.log: train/a {message}")


@pytest.mark.parametrize("half, norm", [(False, 1.0), (True, 1.0), (True, INF)])
def test_a_custom_number_that_is_not_finite_stops_the_run(half, norm) -> None:
    state = StepReports(1, fp16() if half else None)
    for step in (1, 2):  # the first time, names travel, too
        state.add({"train/a": torch.tensor([1.0 if step == 1 else NAN])})
        post_reports(state, step, [1.0], norm)
    if norm == INF:
        assert [report.skipped for report in state.settle()] == [True, True]
    else:
        assert (
            read_refusal(state)
            == "step 2: run.log: train/a is not finite; mend it, or log torch.nan_to_num of it"
        )


def log_on_ranks() -> tuple[list[dict], list[str]]:
    """Rank r has r + 1 samples; then one rank leaves a name out, in the first and in a later step."""
    state = StepReports(6)
    reports = []
    for step in range(1, 5):
        values = torch.arange(rank() + 1, dtype=torch.float64) + 10 * rank() + step
        if step != 3:
            state.add({"train/a": values})
        state.add({"train/late": values[:1] if step > 1 else values[:0], "train/rank": rank()})
        post_reports(state, step, [1.0] * (rank() + 1))
        reports += state.read()
    reports += state.settle()
    refusals = []
    for first in (1, 2):
        state = StepReports(6)
        for step in (1, 2):
            if rank() != 1 or step < first:
                state.add({"train/a": 1.0})
            post_reports(state, step, [1.0] * (rank() + 1))
        refusals.append(read_refusal(state))
    return [report.logged for report in reports], refusals


def test_custom_numbers_are_of_all_ranks_and_logged_by_all(processes: Processes) -> None:
    answers = processes.run(log_on_ranks, ranks=3)
    assert answers == [answers[0]] * 3
    reports, refusals = answers[0]
    values = [float(10 * rank + index) for rank in range(3) for index in range(rank + 1)]
    for step, logged in enumerate(reports, 1):
        assert logged["train/rank"] == 1
        assert logged.get("train/a") == (
            None if step == 3 else pytest.approx(sum(values) / 6 + step, abs=1e-12)
        )
        assert logged.get("train/late") == (10 + step if step > 1 else None)
    for step, message in enumerate(refusals, 1):
        assert message.startswith(
            f"step {step}: run.log: train/a came from 2 of 3 processes; log it on all of them"
        )
