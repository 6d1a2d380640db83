"""A dashboard has what the run folder has: keys and values of metrics.jsonl through a kill, and pictures at evaluations."""

import functools
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.harness.dashboard import logged, records, results
from tests.harness.resumed import after_step, die, read
from tests.harness.wandb_server import wandb_server

FLAGS = {
    "cls": "--model test_vit --image_size 16 --global_batch_size 32 --layer_decay 0.8 --ema_decay 0.9",
    "det": "--short_sides 112 --width 32 --global_batch_size 8 --backbone_lr_factor 0.1 --freeze_stages stem",
}
COMMON = "--max_steps 9 --log_every 1 --checkpoint_every 4 --eval_every 3 --workers 1 --name run --tags a,b --group g --notes n"
LAST = 7  # steps of the start that is killed


def draw_at_every_evaluation(rank: int) -> None:
    from common.run import records

    records.MOST_DRAWING = math.inf


def die_once_sent(folder: Path, tracker: str, rank: int) -> None:
    """SIGKILL after step `LAST`, when the dashboard's files have the rows of all steps but this one."""
    draw_at_every_evaluation(rank)

    def die_then(run) -> None:
        while not {*range(1, LAST - 1)} <= logged(folder, tracker).keys():
            time.sleep(0.1)
        die(run)

    if rank == 0:
        after_step(die_then, LAST)


@pytest.mark.parametrize(
    "recipe, tracker, processes",
    [pytest.param("cls", "wandb", 2, marks=pytest.mark.long), ("det", "wandb", 1), ("cls", "tensorboard", 2)],
)
def test_rows_are_on_the_dashboard_key_by_key_through_a_kill(
    forks, scenes, tmp_path, recipe: str, tracker: str, processes: int
) -> None:
    folder = tmp_path / "run"
    words = [*FLAGS[recipe].split(), *COMMON.split(), "--output_dir", tmp_path, "--tracker", tracker]
    words += ["--data", scenes] if recipe == "det" else []
    for before in (functools.partial(die_once_sent, folder, tracker), draw_at_every_evaluation):
        ranks = forks.start_ranks(processes, *words, recipe=recipe, before=before, pictures=True)
        ends = [rank.end() for rank in ranks]
    assert {end.code for end in ends} == {0}, ends
    sent = logged(folder, tracker)
    rows = {row["step"]: row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    assert "first_batch" in sent[1]  # the step that trains on it
    assert sent.keys() == rows.keys() == {*range(1, 10)}
    for step, row in rows.items():
        assert row.keys() - {"step"} <= sent[step].keys() | {key for key in row if row[key] is None}, step
        repeated = tracker == "wandb" and 4 < step < LAST  # then only the first start's pace was sent
        for key in row.keys() - {"step"}:
            if not (row[key] is None or (repeated and key.startswith("perf/"))):
                np.testing.assert_allclose(sent[step][key], row[key], rtol=1e-6 if tracker == "tensorboard" else 0)
    names = {
        "train/weight_norm",
        "train/update_ratio",
        *["perf/slowest_rank", "perf/slowest_rank_lag"] * (processes > 1),
    }
    names |= {
        f"train/lr_{name}"
        for name in {"cls": ("backbone_min", "backbone_max", "head"), "det": ("backbone", "head", "neck")}[recipe]
    }
    names |= {"train/loss_class", "train/loss_box"} if recipe == "det" else set()
    assert all(names <= row.keys() for row in rows.values())
    pictures = {"cls": {"confusion", "mistakes"}, "det": {"predictions", "precision_recall", "confusion", "misses"}}[
        recipe
    ]
    if tracker == "wandb":
        of_run = [record["run"] for start in records(folder) for record in start if record["type"] == "run"]
        assert [(run["tags"], run["run_group"], run["notes"]) for run in of_run] == [(["a", "b"], "g", "n")] * 2
    for step in (3, 6, 9):
        assert pictures <= sent[step].keys(), step
    shown, kept = results(folder, tracker), read(folder, "summary.json")
    for key, value in {
        f"{part}/{key}": value for part in ("best", "last") for key, value in kept[part].items()
    }.items():
        assert value is None or shown[key] == pytest.approx(value, rel=1e-6), key


def with_environment(environment: dict[str, str], rank: int) -> None:
    os.environ.update(environment)
    draw_at_every_evaluation(rank)


def die_with_the_service(environment: dict[str, str], rows: Path, rank: int) -> None:
    """SIGKILL of the rank and of W&B's service after step `LAST`, as when the machine is lost."""
    with_environment(environment, rank)

    def die_with_all(run) -> None:
        while not list(rows.parent.glob("wandb/*run-*/*.wandb")):
            time.sleep(0.01)
        for process in [*psutil.Process().children(recursive=True), psutil.Process()]:
            process.kill()

    if rank == 0:
        after_step(die_with_all, LAST)


@pytest.mark.parametrize("mode", ["online", pytest.param("offline", marks=pytest.mark.long)])
def test_wandb_shows_one_run_with_each_step_once_through_a_kill_and_a_longer_run(forks, tmp_path, mode: str) -> None:
    folder = tmp_path / "run"
    words = [*FLAGS["cls"].split(), *COMMON.split(), "--output_dir", tmp_path, "--tracker", "wandb"]
    with wandb_server() as server:
        environment = server.environment if mode == "online" else {}
        dies = functools.partial(die_with_the_service, environment, folder / "metrics.jsonl")
        lives = functools.partial(with_environment, environment)
        for before, steps in ((dies, 9), (lives, 9), (lives, 12)):
            longer = [*words, "--max_steps", steps]
            (ended,) = [rank.end() for rank in forks.start_ranks(1, *longer, before=before, pictures=True)]
        assert ended.code == 0, ended
        if mode == "offline":
            command = re.search(r"wandb sync (\S+)", (folder / "log.txt").read_text())[1].rstrip(")")
            sync = f"{sys.executable} -m wandb sync {command}"
            environment = os.environ | server.environment
            subprocess.run(sync, shell=True, check=True, env=environment, cwd=tmp_path, capture_output=True)
        (run_id,) = server.runs
        shown, uploads, kept = server.history(run_id), server.uploads, server.runs[run_id]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 13)]
    assert [(row["_step"], row["step"]) for row in shown] == [(step, step) for step in range(1, 13)]
    for row, here in zip(rows, shown, strict=True):
        for key, value in row.items():
            repeated = 4 < row["step"] <= LAST and key.startswith("perf/")
            assert value is None or repeated or here[key] == pytest.approx(value, rel=1e-12), (row["step"], key)
    for row in shown[5::3]:  # the pictures of step 3 went with the machine
        assert {row[name]["path"] for name in ("confusion", "mistakes")} <= uploads
    summary = json.loads(kept["summaryMetrics"])
    last = read(folder, "summary.json")["last"]
    assert last["step"] == 12
    assert {key: summary[f"last/{key}"] for key in last} == pytest.approx(last, rel=1e-12)
