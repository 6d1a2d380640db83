"""A launched run that is interrupted in any way, at any step, ends as the same run after a restart."""

import os
import signal
import threading
from functools import partial

import pytest

from tests.harness.interrupted import Interrupted
from tests.harness.outcomes import Outcome
from tests.harness.resumed import after_step, assert_same_run, read
from tests.harness.shards import draw_noise, write_tars

STEPS = 40
WORDS = (
    *("--max_steps", STEPS, "--log_every", 1, "--checkpoint_every", 7, "--eval_every", 25),
    *("--augment", "rand-m9-mstd0.5", "--random_erasing", 0.3, "--mixup", 0.2, "--drop_path", 0.2, "--drop", 0.2),
    *("--ema_decay", 0.99, "--clip", 1.0, "--label_smoothing", 0.1, "--max_micro_batch_size", 8),
    *("--global_batch_size", 28, "--batch_norm", "group", "--norm_batch_size", 4),
)
# What happens to a run, start after start, and the cause that its status then names.
INTERRUPTIONS = {
    1: {"TERM launcher": "the end of its launcher", "TERM rank 0": "SIGTERM", "INT group": "Ctrl-C", "KILL all": ""},
    2: {
        "KILL rank 1": "the loss of another process",
        "TERM launcher": "SIGTERM",
        "HUP group": "SIGHUP",
        "KILL launcher": "the end of its launcher",
    },
    3: {"KILL rank 0": "the loss of another process", "INT group": "Ctrl-C", "USR1 rank 1": "SIGUSR1", "KILL all": ""},
}


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
def test_interrupted_run_is_bit_equal_to_the_uninterrupted(launch, run_several, tmp_path, processes) -> None:
    """Kills and signals leave no process behind, say how the run stands, and cost no step.

    The last start is a fork.
    """
    folder = tmp_path / "interrupted"
    config, flags = ("cpu", ()) if processes == 1 else ("multi_cpu", ("--num_processes", processes))
    command = (*WORDS, "--output_dir", tmp_path)
    for number, (interruption, cause) in enumerate(INTERRUPTIONS[processes].items()):
        words = (*command, "--name", folder.name, "--workers", number % 2 * 2)
        started = launch.start(config, "recipes/cls.py", *words, flags=flags, process_group=0)
        code = Interrupted(started, folder).at_step(5 * number + 4).interrupt(interruption).gone()
        asked = processes > 1 and "KILL" not in interruption
        assert code == 75 if asked else code != 0, interruption
        assert not asked or "Traceback" not in started.stderr.read_text(), "it was asked to stop"
        status = read(folder, "status.json")
        if cause:
            assert status["status"] == "resumable" and cause in status["cause"], (interruption, status)
        else:
            assert status["status"] == "running", interruption  # with no process at work: killed
    ended = run_several(processes, {folder.name: command, "whole": command})
    assert [run.outcome for run in ended.values()] == ["ok", "ok"], ended
    assert_same_run(folder, tmp_path / "whole", STEPS)


def ask_the_second(rank: int) -> None:
    """In a fork: SIGHUP to this rank alone, in its fifth step."""
    if rank == 1:
        after_step(lambda run: os.kill(os.getpid(), signal.SIGHUP), 5, once_written=False)


def test_asking_one_rank_stops_all_within_two_steps(forks, tmp_path) -> None:
    ranks = forks.start_ranks(2, *WORDS, "--output_dir", tmp_path, "--name", "asked", before=ask_the_second)
    assert [rank.end().code for rank in ranks] == [75, 75]
    run = Outcome(folder=tmp_path / "asked")
    status = run.read("status.json")
    assert (status["status"], status["cause"]) == ("resumable", "SIGHUP") and 5 <= status["step"] <= 7
    assert run.checkpoint.name == f"step_{status['step']:08d}"
    assert run.column("step").tolist() == [*range(1, status["step"] + 1)]


def hang_when(phase: str) -> None:
    """In a fork: SIGTERM to the run itself as `phase` begins, which then does not end."""
    from common.data import loader
    from common.run import ending, run
    from common.shards import entries

    ending.GRACE_S = 0.1

    def hang(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()

    if phase == "an index of shards":
        entries._read_shard = hang
    elif phase == "an evaluation":
        evaluate = run.Run.evaluate
        run.Run.evaluate = lambda self, _, *rest, **options: evaluate(self, hang, *rest, **options)
    elif phase == "the wait for data":
        after_step(lambda _: setattr(loader.Prefetcher, "__next__", hang), 5)


PHASES = {"an index of shards": 0, "the wait for data": 5, "an evaluation": 6}


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_ends_whatever_does_not_end_by_itself(forks, tmp_path, phase) -> None:
    """Steps that were made are saved, and an evaluation that was ended is made after the next step."""
    step = PHASES[phase]
    words = (
        "--output_dir",
        tmp_path,
        "--name",
        "stopped",
        "--max_steps",
        9,
        "--eval_every",
        6,
        "--checkpoint_every",
        9,
    )
    write_tars(draw_noise(tmp_path / "files", (30, 30), side=8), tmp_path / "tars", "train")
    data = ("--data", tmp_path / "tars", "--image_size", 32) if not step else ()
    ended = forks(*words, *data, before=partial(hang_when, phase))
    assert ended.code == 75 and "Traceback" not in ended.stderr, ended.stderr
    assert "stopped by SIGTERM " + (f"at step {step}" if step else "before the first step") in ended.stdout
    run = Outcome(folder=tmp_path / "stopped")
    if not step:
        assert not run.folder.exists()
        return
    assert run.checkpoint.name == f"step_{step:08d}" and run.read("status.json")["status"] == "resumable"
    assert forks(*words).code == 0
    evaluated = [row["step"] for row in run.rows if "eval/top1" in row]
    assert evaluated == ([7, 9] if phase == "an evaluation" else [6, 9])


def hang_on_the_second(rank: int) -> None:
    """In a fork: the second rank waits for data for ever after the fifth step, and the others for it; all get SIGTERM."""
    if rank == 1:
        hang_when("the wait for data")
    else:
        from common.run import ending

        ending.GRACE_S = 0.1
        after_step(lambda _: os.kill(os.getpid(), signal.SIGTERM), 5)


def test_the_main_process_saves_although_another_hangs(forks, tmp_path) -> None:
    words = ("--output_dir", tmp_path, "--name", "stopped", "--max_steps", 9, "--checkpoint_every", 9)
    ranks = forks.start_ranks(2, *words, before=hang_on_the_second)
    assert [rank.end().code for rank in ranks][1] == 75
    run = Outcome(folder=tmp_path / "stopped")
    assert run.checkpoint.name == "step_00000005" and run.read("status.json")["status"] == "resumable"
