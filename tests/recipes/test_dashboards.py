"""A dashboard has what the run folder has: keys and values of metrics.jsonl through a kill, and pictures at evaluations."""

import functools
import json
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.harness.dashboard import logged, records, results
from tests.harness.resumed import read

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
    from common.run.run import Run

    draw_at_every_evaluation(rank)
    end_step = Run.end_step

    def end_and_die(run: Run, grad_norm) -> None:
        end_step(run, grad_norm)
        if run.step == LAST and rank == 0:
            run._writer.wait()
            while not {*range(1, LAST - 1)} <= logged(folder, tracker).keys():
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)

    Run.end_step = end_and_die


@pytest.mark.parametrize("recipe, tracker", [("cls", "wandb"), ("det", "wandb"), ("cls", "tensorboard")])
def test_rows_are_on_the_dashboard_key_by_key_through_a_kill(
    forks, scenes, tmp_path, recipe: str, tracker: str
) -> None:
    folder = tmp_path / "run"
    words = [*FLAGS[recipe].split(), *COMMON.split(), "--output_dir", tmp_path, "--tracker", tracker]
    words += ["--data", scenes] if recipe == "det" else []
    for before in (functools.partial(die_once_sent, folder, tracker), draw_at_every_evaluation):
        ranks = forks.start_ranks(2, *words, recipe=recipe, before=before, pictures=True)
        ends = [rank.end() for rank in ranks]
    assert [end.code for end in ends] == [0, 0], ends
    sent = logged(folder, tracker)
    rows = {row["step"]: row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    assert sent.keys() == rows.keys() == {*range(1, 10)}
    for step, row in rows.items():
        assert row.keys() - {"step"} <= sent[step].keys() | {key for key in row if row[key] is None}, step
        repeated = 4 < step < LAST  # then only the first start's pace was sent
        for key in row.keys() - {"step"}:
            if not (row[key] is None or (repeated and key.startswith("perf/"))):
                np.testing.assert_allclose(sent[step][key], row[key], rtol=1e-6 if tracker == "tensorboard" else 0)
    names = {"train/weight_norm", "train/update_ratio", "perf/slowest_rank", "perf/slowest_rank_lag"}
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
        pictures |= {"cls": {"mistakes_table"}, "det": {"objects/01"}}[recipe]
    for step in (3, 6, 9):
        assert pictures <= sent[step].keys(), step
    shown, kept = results(folder, tracker), read(folder, "summary.json")
    for key, value in {
        f"{part}/{key}": value for part in ("best", "last") for key, value in kept[part].items()
    }.items():
        assert value is None or shown[key] == pytest.approx(value, rel=1e-6), key
