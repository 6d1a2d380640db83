"""After a power loss at any moment, each promised file is whole, old or new, and a restarted run resumes.

The file that holds the file system has all that has reached the disk; bytes that were only written,
not synced, are not in it.
"""

import contextlib
import functools
import json
import os
import random
import shutil
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file

from common.checkpoints.store import Checkpoints, verify
from tests.harness import forked
from tests.harness.disks import Ext4, after_power_loss, ext4
from tests.harness.outcomes import has_best, read, seal
from tests.harness.resumed import assert_same_run
from tests.recipes.copied import copy

STEPS = 6
WORDS = (
    f"--image_size 16 --global_batch_size 8 --workers 1 --max_steps {STEPS} --log_every 1 "
    "--checkpoint_every 2 --eval_every 1 --ema_decay 0.5 --keep_checkpoints 1"
).split()
TEXTS = (
    "config.yaml",
    "environment.json",
    "summary.json",
    "status.json",
    "tracker.json",
    "micro_batch.json",
)


def build_argv(data: Path, folder: Path) -> list:
    argv = WORDS + ["--data", data, "--output_dir", folder.parent, "--name", folder.name]
    return argv + ["--tracker", "none"]


# Each evaluation is the best so far, so that `best/` changes with each checkpoint.
IMPROVING = """
@@ main
-                default_metric = "f1" if val_data.multi_label else "top1"
-                run.evaluate(evaluate, config.best_metric or default_metric)
+                improving = lambda *args: evaluate(*args).results() | {"top1": run.step / 1000}
+                run.evaluate(improving, best_metric="top1")
"""


@pytest.fixture(scope="module")
def improving(tmp_path_factory) -> Path:
    return copy(tmp_path_factory.mktemp("recipe") / "cls.py", IMPROVING)


@pytest.fixture(scope="module")
def whole(forks, improving, data, tmp_path_factory) -> Path:
    """The folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(forks, data, folder, recipe=improving)
    return folder


def photograph_before_operations(disk: Ext4, album: Path, commits: bool, times: int) -> None:
    """In a fork: a photograph of the disk before each file operation of the run, the first `times`
    times that it comes.

    With `commits` all names reach the disk just before: as when a file system's own commit comes at
    that moment.
    """
    photograph = {}
    seen = Counter()
    count = 0
    turn = threading.Lock()
    owner = os.getpid()
    canary = os.open(disk.folder / "canary", os.O_WRONLY | os.O_CREAT)
    fsync = os.fsync

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event not in forked.FILE_OPERATIONS or os.getpid() != owner:
            return
        run = str(disk.folder / "run")
        path = str(arguments[0])
        if not path.startswith(run):
            return
        operation = forked.strip_numbers(event, path.removeprefix(run))
        seen[operation] += 1
        if seen[operation] > times or not turn.acquire(blocking=False):
            return  # the other thread photographs
        try:
            if commits:
                os.pwrite(canary, os.urandom(8), 0)
                fsync(canary)
            if photograph.get("writes") == disk.writes():
                return
            count += 1
            saved_step = 0  # the step of the newest checkpoint that the run has said is there
            with contextlib.suppress(OSError, ValueError):
                saved_step = read(disk.folder / "run/status.json")["step"]
            photograph["writes"] = disk.photograph(album / f"{count:04d}.image")
            (album / f"{count:04d}.json").write_text(
                json.dumps({"before": operation, "made": saved_step})
            )
        finally:
            turn.release()

    os.fsync = forked.audit_fsync
    sys.addaudithook(hook)


def assert_promises(recorded: dict, run_folder: Path) -> int:
    """No file is torn, and every file that was reported as saved exists. Returns the step that the
    next start resumes from.
    """
    for name in TEXTS:
        if (run_folder / name).exists():
            content = yaml.safe_load((run_folder / name).read_text())
            assert content and isinstance(content, dict), f"{name} is empty"
    for picture in run_folder.glob("pictures/*.png"):
        Image.open(picture).load()
    if (run_folder / "best").exists():
        assert load_file(run_folder / "best/model.safetensors")
        assert read(run_folder / "best/config.json")
        assert read(run_folder / "best/results.json")
    checkpoints = [verify(path) for path in Checkpoints(run_folder / "checkpoints").list_paths()]
    newest = checkpoints[0].step if checkpoints else 0
    assert newest >= recorded["made"], "a checkpoint is gone that was said to be there"
    if (run_folder / "summary.json").exists():
        assert read(run_folder / "summary.json")["step"] <= newest
    if not checkpoints:
        return 0
    steps = [
        json.loads(row)["step"]
        for row in (run_folder / "metrics.jsonl").read_bytes().splitlines()
        if row[-1:] == b"}"
    ]
    assert steps[:newest] == list(range(1, newest + 1))
    assert has_best(run_folder, checkpoints[0].record), (
        "the model that the newest checkpoint says is the best is nowhere"
    )
    return newest


def train(
    forks,
    data: Path,
    folder: Path,
    *,
    recipe: str | Path = "cls",
    processes: int = 1,
    flags: str = "",
) -> str:
    """Run the same command in this folder to its end; its standard output."""
    argv = build_argv(data, folder) + flags.split()
    ranks = forks.start_ranks(processes, argv, recipe=recipe, pictures=recipe != "cls")
    ends = [fork.end() for fork in ranks]
    assert [end.code for end in ends] == [0] * processes, ends
    return ends[0].stdout


@pytest.mark.parametrize(
    "commits, times, restarts",
    [
        (True, 1, 2),
        pytest.param(True, 9, 12, marks=pytest.mark.long),
        pytest.param(False, 9, 12, marks=pytest.mark.long),
    ],
)
def test_a_power_loss_before_any_file_operation_loses_nothing(
    forks, improving, data, whole, tmp_path, commits, times, restarts
):
    album = tmp_path / "album"
    album.mkdir()
    with ext4(tmp_path, "40m") as disk:
        before = functools.partial(photograph_before_operations, disk, album, commits, times)
        argv = build_argv(data, disk.folder / "run")
        ended = forks(argv, recipe=improving, before=before, pictures=True)
        assert ended.code == 0, ended
        disk.photograph(album / "9999.image")
        (album / "9999.json").write_text(json.dumps({"before": "the end", "made": STEPS}))
    # Of the run folder that the next start finds after each power loss: what it resumes from.
    steps = {}
    for image in sorted(album.glob("*.image")):
        recorded = read(image.with_suffix(".json"))
        run_folder = tmp_path / image.stem / "run"
        run_folder.parent.mkdir()
        with after_power_loss(image) as folder:
            if (folder / "run").exists():
                shutil.copytree(folder / "run", run_folder)
        image.unlink()
        try:
            steps[run_folder] = assert_promises(recorded, run_folder)
        except Exception as error:
            error.add_note(f"at a power loss before {recorded['before']}, in {run_folder}")
            raise
    developed = list(steps)
    assert {0, 2, 4, STEPS} <= set(steps.values()) and len(developed) > 30, steps
    assert read(developed[-1] / "summary.json")["best"]["step"] == STEPS
    status = read(developed[-1] / "status.json")
    assert status["status"] == "finished"
    assert (developed[-1] / "pictures/curves.png").is_file()
    for run_folder in random.Random(7).sample(developed, min(restarts, len(developed))):
        assert "damaged" not in train(forks, data, run_folder, recipe=improving)
        assert_same_run(run_folder, whole, STEPS)
        left = {path.name for path in run_folder.rglob(".*")} - {".lock"}
        assert not left, f"left behind: {left}"


def test_all_ranks_know_that_the_best_model_is_lost(forks, data, tmp_path):
    """Else one of them would wait for the others to write the next one."""
    folder = tmp_path / "run"
    # The best model is from step 3 or 4.
    train(forks, data, folder, processes=2, flags="--max_steps 4 --eval_every 3")
    shutil.rmtree(folder / "best")
    record = read(folder / "checkpoints/step_00000004/record.json")
    record["ledger"]["best"] |= {"step": 3, "eval/ema_top1": 2.0}  # no later one can be better
    record["ledger"]["last"] |= {"step": 3}
    (folder / "checkpoints/step_00000004/record.json").write_text(json.dumps(record))
    seal(folder / "checkpoints/step_00000004")
    stdout = train(forks, data, folder, processes=2)
    assert "is lost; best/ will be the best of the evaluations from now on" in stdout
    assert read(folder / "summary.json")["best"]["step"] in (5, 6)
    assert load_file(folder / "best/model.safetensors")
