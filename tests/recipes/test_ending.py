"""`--patience` and `--max_hours` end a run at the same step on any layout, and through kills and
restarts as without them.

Each start counts on from its checkpoint; a run that has ended stays ended until the flag is larger.
"""

import signal
import time
from dataclasses import dataclass

import pytest

from common.run import Observer
from tests.harness.outcomes import Outcome, read
from tests.harness.resumed import assert_same_run, signal_at

# No weight moves, so nothing gets better than the first evaluation.
WORDS = (
    "--model test_vit --image_size 16 --global_batch_size 8 --lr 1e-09 --max_steps 40 "
    "--eval_every 4 --checkpoint_every 3 --log_every 1"
).split()
WHY = "--patience 2: no better top-1 since step 4"


@pytest.fixture(scope="module")
def runs(run_several, stripes) -> dict[str, Outcome]:
    """Runs that end early, again, and with larger flags, on two processes; and one on one process."""
    args = WORDS + ["--data", stripes]
    waiting = args + ["--name", "waiting"]
    timed = args + ["--name", "timed"]
    cases = {
        "waiting": waiting + ["--patience", 2],
        "waiting again": waiting + ["--patience", 2, "--max_steps", 50],
        "waiting longer": waiting + ["--patience", 3],
        "timed": timed + ["--max_hours", 1e-9],
        "timed again": timed + ["--max_hours", 1e-9],
        "timed longer": timed + ["--max_hours", 1, "--max_steps", 6],
        "timed shorter": timed + ["--max_steps", 5],
    }
    return run_several(2, cases) | run_several(1, {"one": args + ["--patience", 3]})


def is_ended(text: str, step: int, why: str) -> bool:
    return f"{step} steps in" in text and f"of training, ended by {why}" in text


def test_a_run_ends_when_its_patience_does(runs) -> None:
    first = runs["waiting"]
    restarted = runs["waiting again"]
    longer = runs["waiting longer"]
    assert {run.outcome for run in (first, restarted, longer)} == {"ok"}
    assert is_ended(first.stdout, 12, WHY)
    assert "the same command with --patience 4 continues this run" in first.stdout
    assert (
        f"this run was ended at step 12 of 40 by {WHY}; a larger --patience takes it further"
        in restarted.stdout
    )
    assert "resuming from step 12 of 40" in longer.stdout
    assert is_ended(longer.stdout, 16, "--patience 3: no better top-1 since step 4")
    rows = longer.rows
    assert [row["step"] for row in rows] == list(range(1, 17)), "each step once"
    assert [row["step"] for row in rows if "eval/top1" in row] == [4, 8, 12, 16]
    assert longer.checkpoint.name == runs["one"].checkpoint.name == "step_00000016"
    assert longer.column("eval/loss") == pytest.approx(runs["one"].column("eval/loss"), rel=1e-4), (
        "on any layout"
    )


def test_a_length_below_the_steps_that_were_made_is_refused(runs) -> None:
    run = runs["timed shorter"]
    assert run.outcome == "refused"
    assert (
        "timed: has made 6 steps, more than the 5 of --max_steps or --epochs; take as" in run.text
    )
    status = run.read("status.json")
    assert (status["status"], status["step"]) == ("finished", 6), "the run stays as it is"


def test_a_run_ends_when_its_hours_are_used_up(runs) -> None:
    first = runs["timed"]
    restarted = runs["timed again"]
    longer = runs["timed longer"]
    assert {run.outcome for run in (first, restarted, longer)} == {"ok"}
    status = first.read("status.json")
    assert status["status"] == "finished" and not status["cause"], (
        "it was trained to its end by the last command"
    )
    assert is_ended(first.stdout, 4, "--max_hours 1e-09"), "no more than three steps later"
    assert (
        "this run was ended at step 4 of 40 by --max_hours 1e-09; a larger --max_hours takes it "
        "further" in restarted.stdout
    )
    assert (
        "resuming from step 4 of 6" in longer.stdout and longer.checkpoint.name == "step_00000006"
    )
    assert [row["step"] for row in longer.rows if "eval/top1" in row] == [4, 6], (
        "an evaluation where it ended"
    )


@dataclass
class HourlySteps(Observer):
    """Lets each step, of one micro-batch, take so many hours of the process's clock, which is put
    forward for that.
    """

    hours: float = 1.0
    kill_at: int = 0

    def on_prepare(self, model, train_set, compute_losses) -> None:
        self.ahead = 0.0  # seconds
        clock = time.perf_counter
        time.perf_counter = lambda: clock() + self.ahead

    def on_micro_batch(self, step, batch) -> None:
        self.ahead += self.hours * 3600

    def on_end_step(self, run, step) -> None:
        signal_at(self.kill_at or -1).on_end_step(run, step)


@pytest.mark.parametrize(
    "flag, kills, steps", [("--patience=2", (5, 10), 12), ("--max_hours=6.5", (5, 7), 8)]
)
def test_a_killed_run_ends_as_an_undisturbed_one(
    forks, stripes, tmp_path, flag, kills, steps
) -> None:
    """Killed between evaluations, after one that was no better; and when some hours were used up."""
    args = WORDS + ["--data", stripes, "--output_dir", tmp_path, flag, "--name"]
    for step in kills:
        died = forks(args + ["killed"], observer=HourlySteps(kill_at=step))
        assert died.code == -signal.SIGKILL, died.stderr
    for name in ("killed", "undisturbed"):
        assert forks(args + [name], observer=HourlySteps()).code == 0
    assert_same_run(tmp_path / "killed", tmp_path / "undisturbed", steps=steps)


def test_the_clock_of_the_main_process_decides_for_all(forks, stripes, tmp_path) -> None:
    args = WORDS + ["--data", stripes, "--max_hours", 6.5]
    args += ["--output_dir", tmp_path, "--name", "run"]
    ranks = forks.start_ranks(2, args, observers={0: HourlySteps(), 1: HourlySteps(hours=1000)})
    ends = [rank.end() for rank in ranks]
    assert [end.code for end in ends] == [0, 0], ends[0].stderr
    assert read(tmp_path / "run/status.json")["step"] == 8
