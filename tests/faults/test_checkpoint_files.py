"""Damage, a full disk or a forged file costs a run at most the steps since its last good
checkpoint. No file executes code.

A run whose folder is lost writes nothing into the folder that has taken its place. More of this:
tests/checkpoints/test_store.py, tests/recipes/test_cls_resume.py, tests/recipes/test_refusals.py.
"""

import functools
import io
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from common.checkpoints.store import Checkpoints, verify
from common.launching import launch
from tests.harness.disks import disk, mount
from tests.harness.odd_files import Malicious
from tests.harness.outcomes import Outcome, identical, read
from tests.harness.resumed import STEPS, AfterStep, assert_same_run, signal_at

WORDS = (
    f"--image_size 16 --global_batch_size 8 --workers 1 --tracker none --max_steps {STEPS} "
    f"--log_every 1 --checkpoint_every 4 --eval_every {STEPS} --ema_decay 0.9"
).split()


def train(forks, data: Path, folder: Path, observer=None):
    """Run one process in `folder`."""
    argv = WORDS + ["--data", data, "--output_dir", folder.parent, "--name", folder.name]
    return forks(argv, observer=observer)


@pytest.fixture(scope="module")
def whole(forks, data, tmp_path_factory) -> Path:
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended = train(forks, data, folder)
    assert ended.code == 0, ended
    return folder


@pytest.fixture(scope="module")
def killed(forks, data, tmp_path_factory) -> Path:
    """The folder of a run that was killed after nine steps: it has the checkpoints of four and eight."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    ended = train(forks, data, folder, observer=signal_at(9))
    assert ended.code == -signal.SIGKILL, ended
    return folder


# --- a disk that takes no more while training goes on


def fill(run) -> None:
    """Something else takes all of the disk but the space for some rows."""
    with (run.path.parent / "else").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**16)):
            pass
    os.truncate(file.name, os.stat(file.name).st_size - 200_000)


def make_read_only(run) -> None:
    folder = run.path / "checkpoints"
    mount("mount", "--bind", folder, folder)
    mount("mount", "-o", "remount,ro,bind", folder)


FAILURES = {
    "a full disk": (
        fill,
        "No space left on device",
        lambda folder: (folder.parent / "else").unlink(),
    ),
    "a read-only folder": (
        make_read_only,
        "Read-only file system",
        lambda folder: mount("umount", "-l", folder / "checkpoints"),
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_checkpoint_that_can_not_be_written_stops_the_run(forks, data, whole, tmp_path, failure):
    """Within a few steps, in one line; what was there stays, and once it can be written the same
    command goes on.
    """
    act, message, repair = FAILURES[failure]
    with disk(tmp_path / "disk", "24m") as root:
        folder = root / "run"
        ended = train(forks, data, folder, observer=AfterStep(act, 6))
        assert ended.code == 2 and len(ended.stderr.splitlines()) == 1, ended
        assert f"{folder} can't be written (" in ended.stderr and message in ended.stderr, (
            ended.stderr
        )
        assert "make room, and the same command resumes" in ended.stderr
        status = read(folder / "status.json")
        assert status["status"] == "failed" and message in status["cause"], status
        assert 8 <= status["step"] < STEPS, status
        paths = Checkpoints(folder / "checkpoints").list_paths()
        assert [verify(path).step for path in paths] == [4]
        assert not list(folder.rglob(".*.tmp"))
        repair(folder)
        ended = train(forks, data, folder)
        assert ended.code == 0 and "resuming from step 4 of 12" in ended.stdout, ended
        assert_same_run(folder, whole)


# --- a run folder that is removed, renamed or replaced while the run is at work in it

LOST = (
    "was removed, renamed or replaced while this run was at work in it: nothing more is written; "
    "put it back"
)


def replace(folder: Path) -> None:
    """It was renamed, and the same command was started again, which has come to its first step."""
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()
    (folder / ".lock").write_text("process 1 on another machine")
    (folder / "status.json").write_text('{"status": "running"}')


def end_at_once() -> None:
    launch.REFUSAL_DELAY_S = 0  # no launcher ends the others here


def print_step_and_lose(lose: Callable[[Path], None] | None, run) -> None:
    """Each step that is made is told; `lose` the run folder after the sixth."""
    os.write(1, f"done {run.step}\n".encode())
    if lose and run.step == 6:
        lose(run.path)


@pytest.mark.parametrize("lose", [shutil.rmtree, replace])
def test_a_run_that_lost_its_folder_ends_and_leaves_others_alone(forks, data, tmp_path, lose):
    folder = tmp_path / "run"
    argv = WORDS + ["--data", data, "--output_dir", tmp_path, "--name", "run"]
    observers = {
        0: AfterStep(functools.partial(print_step_and_lose, lose)),
        1: AfterStep(functools.partial(print_step_and_lose, None)),
    }
    ranks = forks.start_ranks(2, argv, observers=observers, before=end_at_once)
    ends = [rank.end() for rank in ranks]
    for end in ends:
        assert end.code == 2 and "done 6\n" in end.stdout and "done 9\n" not in end.stdout, end
    message = ends[0].stderr.partition("cls.py: ")[2]  # before, a library may warn
    assert message.startswith(f"{folder} {LOST}") and message.count("\n") == 1, ends[0].stderr
    assert "Traceback" not in ends[0].stderr, ends[0].stderr
    if lose is not replace:
        assert not folder.exists()
        return
    files_left = {path.name: path.read_text() for path in folder.iterdir()}
    assert files_left == {
        ".lock": "process 1 on another machine",
        "status.json": '{"status": "running"}',
    }
    shutil.rmtree(folder)
    (tmp_path / "elsewhere").rename(folder)  # as it was told to
    assert [verify(path).step for path in Checkpoints(folder / "checkpoints").list_paths()] == [4]
    back = train(forks, data, folder)
    assert back.code == 0 and f"resuming from step 4 of {STEPS}" in back.stdout, back


# --- files that were made to execute something


def forge_pickle(marker: Path) -> bytes:
    return pickle.dumps(Malicious(marker))


def forge_torch(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": Malicious(marker)}, buffer)
    return buffer.getvalue()


def forge_yaml(marker: Path) -> bytes:
    return f"!!python/object/apply:os.mkdir [{marker}]\n".encode()


RUN_FILES = "config.yaml environment.json metrics.jsonl summary.json status.json tracker.json log.txt".split()
FORGED = {  # files of a run folder, or of an exported model, and what they were made to be
    "run by pickle": (RUN_FILES, forge_pickle),
    "run by yaml": (RUN_FILES, forge_yaml),
    "config.json": (["config.json"], forge_pickle),
    "results.json": (["results.json"], forge_pickle),
    "model.safetensors": (["model.safetensors"], forge_torch),
}


@pytest.fixture(scope="module")
def forged(run_several, data, whole, killed, tmp_path_factory) -> dict[str, Outcome]:
    """Runs that resume, and evaluations of an exported model, with forged files."""
    folder = tmp_path_factory.mktemp("forged")
    cases = {}
    for name, (files, forge) in FORGED.items():
        if files is RUN_FILES:
            shutil.copytree(killed, folder / name)
            argv = WORDS + ["--output_dir", folder]
        else:
            shutil.copytree(whole / "best", folder / name)
            argv = ["--eval_only", folder / name, "--image_size", 16]
            argv += ["--output_dir", folder / "reports"]
        for file in files:
            (folder / name / file).write_bytes(forge(whole.with_name(f"executed by {name}")))
        cases[name] = argv + ["--data", data]
    return run_several(1, cases)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_of_a_run_or_a_model_never_executes(forged, whole, name):
    """The run resumes from its checkpoint; an exported model is refused, or read without the forged file."""
    outcome = forged[name]
    assert not whole.with_name(f"executed by {name}").exists()
    if name.startswith("run"):
        assert outcome.outcome == "ok" and "resuming from step 8 of 12" in outcome.stdout, outcome
        assert identical(outcome.tensors(), Outcome(folder=whole).tensors())
    else:
        expected = "ok" if name == "results.json" else "refused"
        assert outcome.outcome == expected, outcome
        assert "\n" not in outcome.text, outcome


LOADERS = {
    forge_pickle: pickle.load,
    forge_torch: functools.partial(torch.load, weights_only=False),
    forge_yaml: yaml.unsafe_load,
}


@pytest.mark.parametrize("forge", LOADERS)
def test_the_forged_files_of_these_tests_would_execute(tmp_path, forge):
    LOADERS[forge](io.BytesIO(forge(tmp_path / "executed")))
    assert (tmp_path / "executed").is_dir()
