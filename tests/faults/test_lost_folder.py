"""A run whose folder is removed, renamed or replaced ends with one line, and writes nothing into what stands there then."""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from common.checkpoints.store import Checkpoints, verify
from tests.harness.launching import small

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


def replace(folder: Path) -> None:
    """It was renamed, and the same command was started again, which has come to its first step."""
    folder.rename(folder.with_name("elsewhere"))
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


@pytest.mark.parametrize("lose", [delete, replace])
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
    if lose is delete:
        assert not folder.exists()
    else:
        there = {path.name: path.read_text() for path in folder.iterdir()}
        assert there == {".lock": "process 1 on another machine", "status.json": '{"status": "running"}'}
        shutil.rmtree(folder)
        assert [verify(path).step for path in Checkpoints(tmp_path / "elsewhere/checkpoints").paths()] == [6, 4]
        (tmp_path / "elsewhere").rename(folder)  # as it was told to
        back = forks(*words(data, folder))
        assert back.code == 0 and f"resuming from step 6 of {STEPS}" in back.stdout, back
