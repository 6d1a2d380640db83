"""A dashboard has each row and picture of the run folder once, through a kill and a longer run."""

import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness.outcomes import read, read_rows
from tests.harness.resumed import AfterStep
from tests.harness.wandb_server import WandbServer

FLAGS = {
    "cls": "--model test_vit --image_size 16 --global_batch_size 32 --layer_decay 0.8 --ema_decay 0.9",
    "det": "--short_sides 112 --width 32 --global_batch_size 8 --backbone_lr_factor 0.1 --freeze_stages stem",
}
COMMON = (
    "--log_every 1 --checkpoint_every 4 --eval_every 3 --name run --tags a,b --group g --notes n"
)
COLUMNS = {
    "cls": ("train/lr_backbone", "train/lr_head"),
    "det": (
        "train/lr_backbone",
        "train/lr_head",
        "train/lr_neck",
        "train/loss_class",
        "train/loss_box",
    ),
}
PICTURES = {
    "cls": ("confusion", "mistakes"),
    "det": ("predictions", "precision_recall", "confusion", "misses"),
}
# steps of the start that is killed, and of the whole run
LAST = 7
STEPS = 12


def read_tensorboard(folder: Path) -> dict[int, dict]:
    """What the files have, by step: numbers and pictures by key."""
    rows: dict[int, dict] = defaultdict(dict)
    events = EventAccumulator(
        str(folder / "tensorboard"), size_guidance=dict.fromkeys(("images", "scalars"), 0)
    ).Reload()
    for key in events.Tags()["scalars"]:
        for event in events.Scalars(key):
            rows[event.step][key] = event.value
    for key in events.Tags()["images"]:
        for event in events.Images(key):
            rows[event.step][key] = event
    return rows


def live(environment: dict[str, str]) -> None:
    """With more of the environment, drawing at each evaluation."""
    from common.run import records

    os.environ.update(environment)
    records.MOST_DRAWING = math.inf


def die_with_all(run) -> None:
    """Once files are there, SIGKILL of this process and all that it has started."""
    written = False
    while not written:
        time.sleep(0.01)
        if (run.path / "tensorboard").exists():
            written = set(range(1, LAST - 1)) <= read_tensorboard(run.path).keys()
        else:
            written = any(run.path.glob("wandb/*run-*/*.wandb"))
    own_process = psutil.Process()
    for process in own_process.children(recursive=True) + [own_process]:
        process.kill()


@pytest.mark.parametrize(
    "recipe, tracker, processes",
    [
        ("cls", "tensorboard", 2),
        ("det", "online", 1),
        pytest.param("cls", "offline", 1, marks=pytest.mark.long),
    ],
)
def test_each_row_and_picture_is_shown_once_through_a_kill(
    forks, scenes, tmp_path, recipe: str, tracker: str, processes: int
) -> None:
    folder = tmp_path / "run"
    of_wandb = tracker != "tensorboard"
    args = FLAGS[recipe].split() + COMMON.split() + ["--output_dir", tmp_path]
    args += ["--tracker", "wandb" if of_wandb else tracker]
    if recipe == "det":
        args += ["--data", scenes]
    with WandbServer() as server:
        environment = server.environment if tracker == "online" else {}
        options = {
            "recipe": recipe,
            "before": functools.partial(live, environment),
            "pictures": True,
        }
        for observers, steps in (({0: AfterStep(die_with_all, LAST)}, 9), ({}, 9), ({}, STEPS)):
            ranks = forks.start_ranks(
                processes, args + ["--max_steps", steps], observers=observers, **options
            )
            ends = [rank.end() for rank in ranks]
        assert {end.code for end in ends} == {0}, ends
        if tracker == "offline":
            command = re.search(r"wandb sync (\S+)", (folder / "log.txt").read_text())[1].rstrip(
                ")"
            )
            sync = f"{sys.executable} -m wandb sync {command}"
            environment = os.environ | server.environment
            subprocess.run(
                sync, shell=True, check=True, env=environment, cwd=tmp_path, capture_output=True
            )
    rows = {row["step"]: row for row in read_rows(folder / "metrics.jsonl")}
    assert list(rows) == list(range(1, STEPS + 1))
    columns = {"train/weight_norm", "train/update_ratio"}.union(COLUMNS[recipe])
    assert all(columns <= row.keys() for row in rows.values())
    if of_wandb:
        ((run_id, run),) = server.runs.items()
        row_by_step = {row["_step"]: row for row in server.history(run_id)}
        assert [row["step"] for row in server.history(run_id)] == list(rows), "each step once"
        assert (run["tags"], run["groupName"], run["notes"]) == (["a", "b"], "g", "n")
        summary = json.loads(run["summaryMetrics"])
    else:
        row_by_step = read_tensorboard(folder)
        assert "first_batch" in row_by_step[1]  # the step that trains on it
        summary = {}
        for step in sorted(row_by_step):
            for key, value in row_by_step[step].items():
                summary[key.removeprefix("summary/")] = value
    assert row_by_step.keys() == rows.keys()
    for step, row in rows.items():
        is_repeated = 4 < step <= LAST  # then only the first start's pace was sent
        for key, value in row.items():
            if value is None or key == "step":
                continue
            if of_wandb and is_repeated and key.startswith("perf/"):
                continue
            actual = row_by_step[step][key]
            rtol = 1e-12 if of_wandb else 1e-6
            np.testing.assert_allclose(actual, value, rtol=rtol, err_msg=f"{step} {key}")
    # W&B's pictures of step 3 went with the machine.
    for step in range(6 if of_wandb else 3, STEPS + 1, 3):
        assert set(PICTURES[recipe]) <= row_by_step[step].keys(), step
        if of_wandb:
            assert {row_by_step[step][name]["path"] for name in PICTURES[recipe]} <= server.uploads
    expected = read(folder / "summary.json")
    for kind in ("best", "last"):
        for key, value in expected[kind].items():
            if value is not None:
                assert summary[f"{kind}/{key}"] == pytest.approx(value, rel=1e-6), (kind, key)
    assert expected["last"]["step"] == STEPS


def read_records(run: Path, kind: str) -> list[dict]:
    """The records of a kind in the files of W&B's offline runs, in the order of the starts."""
    records = []
    for folder in sorted(run.glob("wandb/offline-run-*")):
        inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
        lines = subprocess.run(
            inspect, capture_output=True, check=True, text=True
        ).stdout.splitlines()
        records += [record[kind] for record in map(json.loads, lines) if record["type"] == kind]
    return records


def read_models(run: Path) -> list[dict]:
    """The artifacts of models; W&B keeps tables as artifacts, too."""
    return [artifact for artifact in read_records(run, "artifact") if artifact["type"] == "model"]


def stop(run) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_best_model_is_an_artifact_of_each_end(forks, tmp_path) -> None:
    """Offline: a start that is stopped has none, one that resumes and finishes has one, and a
    longer run another.
    """
    flags = f"{FLAGS['cls']} --eval_every 2 --tracker wandb".split()
    args = flags + ["--output_dir", tmp_path, "--name", "one run"]
    artifact_args = args + ["--wandb_artifact", "--wandb_entity", "team"]
    codes = []
    counts = []
    starts = (
        (artifact_args, 4, {0: AfterStep(stop, 1)}),
        (artifact_args, 4, {}),
        (args, 6, {}),
        (artifact_args, 8, {}),
    )
    for flags, steps, observers in starts:
        ranks = forks.start_ranks(
            1, flags + ["--max_steps", steps], recipe="cls", observers=observers
        )
        codes += [rank.end().code for rank in ranks]
        counts.append(len(read_models(tmp_path / "one run")))
    assert codes == [75, 0, 0, 0] and counts == [0, 1, 1, 2]
    assert [run.get("entity") for run in read_records(tmp_path / "one run", "run")] == [
        "team",
        "team",
        None,
        "team",
    ]

    best = tmp_path / "one run" / "best"
    artifact = read_models(tmp_path / "one run")[-1]
    step = read(best / "run.json")["step"]
    assert artifact["name"] == "one-run"
    assert {"best", f"step-{step}"} <= set(artifact["aliases"])
    uploads = {
        entry["path"]: Path(entry["local_path"]) for entry in artifact["manifest"]["contents"]
    }
    assert uploads.keys() == {file.name for file in best.iterdir()}
    assert all(uploads[name].read_bytes() == (best / name).read_bytes() for name in uploads)


def test_an_artifact_needs_wandb(run_several, tmp_path) -> None:
    """Else the model would not be uploaded, and nobody would know."""
    flags = f"{FLAGS['cls']} --max_steps 1 --tracker none --wandb_artifact".split()
    (run,) = run_several(1, {"run": flags + ["--output_dir", tmp_path]}).values()
    assert run.outcome == "ok", run.text
    line = "--wandb_artifact: best/ is not uploaded with --tracker none; take --tracker wandb"
    assert line in (run.folder / "log.txt").read_text()
