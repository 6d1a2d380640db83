"""A launched run that is interrupted, in any way and at any step, ends as the same run after a restart."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.harness.interrupted import Interrupted
from tests.harness.outcomes import Outcome, distance, identical

STEPS = 50
EVERYTHING = (
    *("--max_steps", STEPS, "--log_every", 1, "--checkpoint_every", 7, "--eval_every", 25, "--tracker", "none"),
    *("--augment", "rand-m9-mstd0.5", "--random_erasing", 0.3, "--mixup", 0.2, "--drop_path", 0.2),
    *("--ema_decay", 0.99, "--clip", 1.0, "--label_smoothing", 0.1, "--max_micro_batch_size", 8),
)
WORDS = {
    1: (*EVERYTHING, "--global_batch_size", 26, "--drop", 0.2, "--cutmix", 1.0),
    2: (*EVERYTHING, "--global_batch_size", 28, "--drop", 0.2, "--batch_norm", "group", "--norm_batch_size", 4),
    3: (*EVERYTHING, "--global_batch_size", 26, "--drop", 0.2),
}
# What happens to a run, start after start, and the cause that its status then names.
INTERRUPTIONS = {
    1: {"TERM launcher": "the end of its launcher", "TERM rank 0": "SIGTERM", "INT group": "Ctrl-C", "KILL all": ""},
    2: {
        "KILL rank 1": "the loss of another process",
        "USR1 rank 1": "SIGUSR1",
        "TERM launcher": "SIGTERM",
        "KILL all": "",
    },
    3: {
        "KILL rank 0": "the loss of another process",
        "INT group": "Ctrl-C",
        "KILL launcher": "the end of its launcher",
    },
}
# A recipe whose runs named cold_... start as if DDP needed no warm-up.
COLD = """
import sys
from pathlib import Path
from tests.harness.several import load
from common.run import run
cls = load(Path("recipes/cls.py"))
warm_up = run.warm_up
def main():
    run.warm_up = (lambda *_: None) if any(word.startswith("cold") for word in sys.argv) else warm_up
    cls.main()
"""
# A recipe in whose runs named asked... rank 1 alone is sent SIGUSR1, in its fifth step.
ASKED = """
import os, signal, sys
from pathlib import Path
from common.data.loader import Prefetcher
from tests.harness.several import load
cls = load(Path("recipes/cls.py"))
take = Prefetcher.take
def main():
    taken = []
    def take_and_signal(feed):
        taken.append(feed)
        if os.environ["RANK"] == "1" and len(taken) == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        return take(feed)
    Prefetcher.take = take_and_signal if "asked" in sys.argv else take
    cls.main()
"""


@pytest.fixture(scope="module")
def of_three(run_several, tmp_path_factory) -> dict[str, Outcome]:
    """On three processes, each with and without the warm-up: a whole run, and one that goes on from its middle."""
    folder = tmp_path_factory.mktemp("three")
    recipe = folder / "cold.py"
    recipe.write_text(COLD)
    cases = {}
    for name in ("warm", "cold"):
        words = [*WORDS[3], "--output_dir", folder, "--keep_checkpoints", STEPS]
        cases[name] = words
        middle = folder / name / "checkpoints/step_00000028"
        cases[f"{name}_resumed"] = [*words, "--resume", middle]
    return run_several(3, cases, recipe=recipe)


@pytest.fixture(scope="module")
def of_two(run_several, tmp_path_factory) -> dict[str, Outcome]:
    """On two processes: a whole run, one whose numbers explode, and one that is asked to stop."""
    recipe = tmp_path_factory.mktemp("two") / "asked.py"
    recipe.write_text(ASKED)
    nan = [*WORDS[2], "--lr", 1e6, "--checkpoint_every", 1]
    return run_several(2, {"whole": WORDS[2], "nan": nan, "asked": WORDS[2]}, recipe=recipe)


@pytest.fixture
def whole(request, forks, tmp_path):
    """`whole(processes)` is the uninterrupted run that goes with `WORDS[processes]`."""

    def run(processes: int) -> Outcome:
        if processes > 1:
            fixture, name = {2: ("of_two", "whole"), 3: ("of_three", "warm")}[processes]
            return request.getfixturevalue(fixture)[name]
        done = forks(*WORDS[1], "--workers", 0, "--output_dir", tmp_path, "--name", "whole")
        return Outcome("ok", done.stderr, done.stdout, 0.0, tmp_path / "whole")

    return run


def status_of(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def steps_of(outcome: Outcome) -> list[int]:
    return [row["step"] for row in outcome.rows]


def without_pace(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith("perf/")}


def assert_same_run(one: Outcome, other: Outcome) -> None:
    """Losses of every step, evaluations, weights, statistics, optimizer and moving average agree bit for bit."""
    assert steps_of(one) == list(range(1, STEPS + 1)), "a step is missing or there twice"
    for row, expected in zip(one.rows, other.rows, strict=True):
        assert without_pace(row) == without_pace(expected)
    assert one.checkpoint.name == other.checkpoint.name
    for file in ("model", "optimizer", "ema"):
        assert identical(one.tensors(file), other.tensors(file)), file
    exported = [outcome.folder / "best/model.safetensors" for outcome in (one, other)]
    assert exported[0].read_bytes() == exported[1].read_bytes()


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
def test_interrupted_run_is_bit_equal_to_the_uninterrupted(launch, whole, tmp_path, processes):
    """Kills and signals leave no process behind, say how the run stands, and cost no step."""
    folder = tmp_path / "interrupted"
    config, flags = ("cpu", ()) if processes == 1 else ("multi_cpu", ("--num_processes", processes))
    command = ("recipes/cls.py", *WORDS[processes], "--output_dir", tmp_path, "--name", folder.name)
    interruptions = INTERRUPTIONS[processes]
    for number, (interruption, cause) in enumerate(interruptions.items()):
        started = launch.start(config, *command, "--workers", number % 2 * 2, flags=flags, process_group=0)
        run = Interrupted(started, folder).at_step(9 * number + 4)
        code = run.interrupt(interruption).gone()
        asked = processes > 1 and "KILL" not in interruption
        assert code == 75 if asked else code != 0, interruption
        status = status_of(folder)
        if cause:
            assert status["status"] == "resumable" and cause in status["cause"], (interruption, status)
        else:
            assert status["status"] == "running", interruption  # with no process at work: killed
    done = launch(config, *command, "--workers", 0, flags=flags)
    assert done.returncode == 0, done.stderr
    assert status_of(folder)["status"] == "finished"
    assert_same_run(Outcome("ok", "", "", 0.0, folder), whole(processes))


@pytest.mark.long
def test_three_ranks_need_the_warm_up_to_go_on_bit_equal(of_three):
    """DDP sums in another order in its first step, which only a warm-up moves out of the run."""
    for name, equal in (("warm", True), ("cold", False)):
        whole, resumed = of_three[name], of_three[f"{name}_resumed"]
        assert steps_of(resumed) == list(range(29, STEPS + 1))
        assert identical(whole.tensors(), resumed.tensors()) is equal


@pytest.mark.long
def test_run_goes_on_elsewhere_as_if_it_had_been_there(launch, forks, tmp_path):
    """In float64: killed on two processes, then on three, ended on one, against one process all the way."""
    words = (
        *EVERYTHING,
        "--global_batch_size",
        28,
        "--batch_norm",
        "group",
        "--norm_batch_size",
        4,
        "--dtype",
        "float64",
    )
    words += ("--output_dir", tmp_path)
    command = ("recipes/cls.py", *words, "--name", "moved", "--workers", 0)
    for processes, step in ((2, 10), (3, 24)):
        started = launch.start("multi_cpu", *command, flags=("--num_processes", processes), process_group=0)
        Interrupted(started, tmp_path / "moved").at_step(step).interrupt("KILL all").gone()
    done = launch("cpu", *command)
    assert done.returncode == 0, done.stderr
    assert forks(*words, "--name", "whole", "--workers", 0, "--keep_checkpoints", STEPS).code == 0
    one, other = (Outcome("ok", "", "", 0.0, tmp_path / name) for name in ("moved", "whole"))
    assert steps_of(one) == list(range(1, STEPS + 1))
    assert abs(one.column("train/loss") / other.column("train/loss") - 1).max() < 1e-8
    assert other.column("eval/top1")[-1] > 0.3, "it has to learn"
    for file in ("model", "ema", "optimizer"):
        early = load_file(tmp_path / f"whole/checkpoints/step_00000007/{file}.safetensors")
        assert distance(other.tensors(file), one.tensors(file), early) < 1e-8, file


def test_a_loss_that_is_not_finite_ends_all_ranks_at_once(of_two):
    """The step and the positions are named, and no checkpoint of it is there."""
    outcome = of_two["nan"]
    assert outcome.outcome == "refused"
    status = status_of(outcome.folder)
    assert status["status"] == "failed" and status["cause"] == outcome.text
    step = int(outcome.text.removeprefix("step ").split(":")[0])
    assert step <= status["step"] <= step + 2
    assert "positions" in outcome.text
    first = int(outcome.text.partition("positions ")[2].split(",")[0])
    assert 28 * (step - 1) <= first < 28 * step
    assert int(outcome.checkpoint.name.removeprefix("step_")) < step


def test_asking_one_rank_stops_all_within_two_steps(of_two):
    outcome = of_two["asked"]
    assert (outcome.outcome, outcome.text) == ("exit", "75")
    status = status_of(outcome.folder)
    assert (status["status"], status["cause"]) == ("resumable", "SIGUSR1")
    assert 5 <= status["step"] <= 7
    assert outcome.checkpoint.name == f"step_{status['step']:08d}"
    assert steps_of(outcome) == list(range(1, status["step"] + 1))
