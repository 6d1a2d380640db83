"""The present code resumes a run of an earlier commit, with the losses that the earlier code has without the interruption.

`run_before/` holds that run, stopped halfway, and the rows of the uninterrupted run: see its README.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

BEFORE = Path(__file__).parent / "run_before"
NAME, STOPPED, STEPS = "cls-c895d2", 16, 32  # the folder's name is derived from the flags: the same flags find it
FLAGS = (
    *("--model", "test_efficientnet", "--opt", "sgd", "--lr", 0.05, "--clip", 1.0, "--mixup", 0.2),
    *("--random_erasing", 0.3, "--color_jitter", 0.2, "--workers", 1, "--tracker", "none"),
    *("--max_steps", STEPS, "--log_every", 1, "--eval_every", 8, "--keep_checkpoints", 1),
)
# Relative. The machine that made the run repeats it bit for bit, other instruction sets differ by at most 1e-6, and whatever
# was resumed wrongly (step, seed, momentum, augmentation) differs by more than 6e-3: see the table in the README.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def resumed(run_several, tmp_path_factory):
    """A copy of the run, evaluated and then resumed by one launch of two processes: (output of the first, run folder)."""
    runs = tmp_path_factory.mktemp("runs")
    shutil.copytree(BEFORE / NAME, runs / NAME)
    done = run_several(
        2,
        {
            "evaluated": ["--eval_only", runs / NAME / "checkpoints" / f"step_{STOPPED:08}"],
            "resumed": [*FLAGS, "--allow_changed_source", "--output_dir", runs, "--name", ""],
        },
    )
    assert [case.outcome for case in done.values()] == ["ok", "ok"], [case.text for case in done.values()]
    return done["evaluated"].stdout, runs / NAME


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_resumed_run_has_the_losses_of_the_uninterrupted_one(resumed):
    later, expected = rows(resumed[1])[STOPPED:], rows(BEFORE / "uninterrupted")[STOPPED:]
    assert [row["step"] for row in later] == list(range(STOPPED + 1, STEPS + 1))
    for row, other in zip(later, expected, strict=True):
        assert row.keys() >= other.keys()  # newer code tells more
        same = {"epoch", "samples", "train/lr", "data/broken", "eval/count", "eval/broken"} & row.keys()
        assert {key: row[key] for key in same} == pytest.approx({key: other[key] for key in same}, rel=1e-12)
        for key in {"train/loss", "train/grad_norm", "eval/loss"} & row.keys():
            np.testing.assert_allclose(row[key], other[key], rtol=TOLERANCE, err_msg=f"{key}, step {row['step']}")


def test_rows_before_the_stop_stay_as_they_were(resumed):
    assert rows(resumed[1])[:STOPPED] == rows(BEFORE / NAME)


def test_resumed_run_ends_with_the_results_of_the_uninterrupted_one(resumed):
    one, other = (
        json.loads((folder / "summary.json").read_text()) for folder in (resumed[1], BEFORE / "uninterrupted")
    )
    assert one.keys() == other.keys()
    assert json.loads((resumed[1] / "status.json").read_text())["status"] == "finished"
    for part in ("best", "last"):
        assert one[part].keys() - {"eval/ece"} == other[part].keys()
        assert one[part]["step"] == other[part]["step"] == STEPS
        images = 1 / one[part]["eval/count"]  # an image between two classes may change sides
        assert one[part]["eval/top1"] == pytest.approx(other[part]["eval/top1"], abs=1.5 * images)


def test_checkpoint_evaluates_to_what_its_run_recorded(resumed):
    results = json.loads(resumed[0].splitlines()[-1])
    record = json.loads((BEFORE / NAME / "summary.json").read_text())["last"]
    assert results["count"] == record["eval/count"]
    assert results["loss"] == pytest.approx(record["eval/loss"], rel=TOLERANCE)
    assert results["top1"] == pytest.approx(record["eval/top1"], abs=1.5 / results["count"])
