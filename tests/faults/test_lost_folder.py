"""A run whose folder is removed, renamed or replaced ends with one line, and writes nothing into what stands there then."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from common.checkpoints.store import Checkpoints, verify
from tests.harness.interrupted import Interrupted
from tests.harness.launching import small
from tests.harness.outcomes import Outcome, identical

STEPS = 12
LOST_AT = 7
WORDS = (
    *("--image_size", 16, "--global_batch_size", 8, "--workers", 1, "--max_steps", STEPS),
    *("--log_every", 1, "--checkpoint_every", 2, "--eval_every", 3, "--ema_decay", 0.9),
)
SAID = "was removed, renamed or replaced while this run was at work in it: nothing more is written; put it back"


def words(data: Path, folder: Path, *more: object) -> tuple:
    own = ("--data", data, "--output_dir", folder.parent, "--name", folder.name, "--tracker", "none", *more)
    return (*small([*WORDS, *own]),)


def delete(folder: Path) -> None:
    shutil.rmtree(folder)


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replace(folder: Path) -> None:
    """As a start of the same command leaves it, that has come to its first step."""
    rename(folder)
    folder.mkdir()
    (folder / ".lock").write_text("process 1 on another machine")
    (folder / "status.json").write_text('{"status": "running"}')


def lose_at(step: int, lose: Callable[[Path], None], rank: int) -> None:
    """In a fork: `lose` the run folder once `step` is done; each step that follows is told."""
    from common.launching import launch
    from common.run.run import Run

    launch.REFUSAL_DELAY_S = 0  # no launcher ends the others here
    end_step = Run.end_step

    def end_and_lose(run: Run, grad_norm) -> None:
        done = run.step + 1
        if rank == 0 and done == step:
            run._writer.wait()
            lose(run.path)
        os.write(1, f"ends {done}\n".encode())
        end_step(run, grad_norm)

    Run.end_step = end_and_lose


@pytest.mark.parametrize("lose", [delete, rename, replace])
def test_all_ranks_end_within_two_steps_and_leave_what_stands_there_alone(forks, data, tmp_path, lose):
    folder = tmp_path / "run"
    ends = [
        fork.end()
        for fork in forks.start_ranks(2, *words(data, folder), before=functools.partial(lose_at, LOST_AT, lose))
    ]
    for end in ends:
        assert end.code == 2 and "finished" not in end.stdout, end
        assert f"ends {LOST_AT}\n" in end.stdout and f"ends {LOST_AT + 3}\n" not in end.stdout, end.stdout
    said = ends[0].stderr.partition("cls.py: ")[2]  # before, a library may warn
    assert said.startswith(f"{folder} {SAID}") and said.count("\n") == 1, ends[0].stderr
    assert "Traceback" not in ends[0].stderr, ends[0].stderr
    if lose is replace:
        there = {path.name: path.read_text() for path in folder.iterdir()}
        assert there == {".lock": "process 1 on another machine", "status.json": '{"status": "running"}'}
        shutil.rmtree(folder)
    assert not folder.exists()
    if lose is not delete:
        assert [verify(path).step for path in Checkpoints(tmp_path / "elsewhere/checkpoints").paths()] == [6, 4]
        (tmp_path / "elsewhere").rename(folder)  # as it was told to
        back = forks(*words(data, folder))
        assert back.code == 0 and f"resuming from step 6 of {STEPS}" in back.stdout, back


def test_the_same_command_may_be_started_while_the_first_one_is_still_there(launch, forks, data, tmp_path):
    """Launched, with the folder renamed by somebody else: the second run is as if the first had never been."""
    folder = tmp_path / "run"
    long = words(
        data,
        folder,
        "--tracker",
        "tensorboard",
        "--max_steps",
        100_000,
        "--checkpoint_every",
        5,
        "--eval_every",
        100_000,
    )
    first = Interrupted(launch.start("multi_cpu", "recipes/cls.py", *long), folder).at_step(20)
    rename(folder)
    second = forks(*words(data, folder))
    assert second.code == 0, second
    assert first.gone() != 0
    said = [line for line in first.started.stderr.read_text().splitlines() if SAID in line]
    assert len(said) == 1 and f"cls.py: {folder} " in said[0], first.started.stderr.read_text()
    assert "finished" not in first.started.stdout.read_text()
    assert json.loads((folder / "status.json").read_text())["status"] == "finished"
    alone = tmp_path / "alone"
    assert forks(*words(data, alone)).code == 0
    one, other = (Outcome("ok", "", "", 0.0, path) for path in (folder, alone))
    assert (one.column("train/loss") == other.column("train/loss")).all() and len(one.rows) == STEPS
    assert identical(one.tensors(), other.tensors())
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in alone.iterdir())
