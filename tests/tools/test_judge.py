"""`--eval_only` leaves a report: its numbers are those of the run and of any layout, each part of
the data has its own.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.harness.drawings import draw_stripes
from tests.harness.outcomes import Outcome
from tests.harness.runs import copy_run, read


def read_report(folder: Path) -> dict:
    return read(folder / "results.json")


def read_printed(ended) -> dict:
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def run(trained_classifier, tmp_path_factory) -> Path:
    """A run of digits, whose reports may be written into its folder."""
    return shutil.copytree(trained_classifier, tmp_path_factory.mktemp("judge") / "run")


@pytest.fixture(scope="module")
def reported(run, run_several) -> Path:
    """The report that two ranks with data workers leave."""
    argv = ["--eval_only", run / "best", "--workers", 1, "--output_dir", run.parent]
    done = run_several(2, {"two": argv}, pictures=True)["two"]
    assert f"report: {run}/evaluation/best-held_out\n" in done.stdout
    return shutil.copytree(run / "evaluation/best-held_out", run.parent / "report of two ranks")


def test_a_report_has_the_numbers_of_the_run_and_of_any_layout(run, reported, forks) -> None:
    report = read_report(reported)
    best = read_report(run / "best")
    for key in ("top1", "per_class", "count"):
        assert report[key] == best[key]
    assert report["thresholds"] == best["thresholds"] and len(set(best["thresholds"].values())) > 1
    assert report["ece"] == pytest.approx(best["ece"], abs=1e-6) and 0 < best["ece"] < 0.2
    classes = report["classes"]
    calibration = report["calibration"]
    assert list(classes) == list("0123456789")
    assert {name: row["recall"] for name, row in classes.items()} == report["per_class"]
    assert np.mean([row["f1"] for row in classes.values()]) == pytest.approx(report["f1_macro"])
    assert all(row["f1_at_threshold"] > 0.9 for row in classes.values())
    assert 0.1 < calibration["temperature"] < 10 and calibration["nll_after"] <= calibration["nll"]
    assert sum(row["images"] for row in calibration["bins"]) == 359
    evaluated = report["evaluated"]
    assert (evaluated["part"], evaluated["images"], evaluated["run"]) == (
        "a fixed fifth, held out",
        359,
        "cls",
    )
    assert evaluated["step"] == read(run / "best/run.json")["step"]

    names = {path.name for path in reported.iterdir()}
    assert names == {"results.json", "predictions.csv", "pictures"}
    drawn = {path.name for path in (reported / "pictures").iterdir()}
    assert drawn == {"confusion.png", "mistakes.png", "reliability.png"}
    assert drawn < {path.name for path in (run / "pictures").iterdir()}

    alone = read_printed(forks(["--eval_only", run / "best", "--workers", 0]))
    second_report = read_report(run / "evaluation/best-held_out")
    assert second_report.pop("loss") == pytest.approx(report.pop("loss"), rel=1e-6)
    assert second_report == report and alone["thresholds"] == report["thresholds"]
    assert not (run / "evaluation/best-held_out/pictures").exists(), (
        "the old report's pictures are gone with it"
    )


@pytest.fixture(scope="module")
def on_parts(run_several, tmp_path_factory) -> dict[str, Outcome]:
    """A run on images in train/, val/ and test/, and evaluations of it and of a copy of its model,
    by name.
    """
    folder = tmp_path_factory.mktemp("parts")
    for seed, part in enumerate(("train", "val", "test")):
        draw_stripes(folder / "data" / part, (16, 14, 12, 10, 8), seed=seed)
    argv = (
        f"--data {folder}/data --model test_vit --image_size 32 --max_steps 4 --lr 1e-3 "
        f"--output_dir {folder}"
    )
    [run] = run_several(1, {"run": argv.split()}).values()
    assert (
        "test" not in (run.folder / "metrics.jsonl").read_text()
        and not (run.folder / "evaluation").exists()
    )
    best = run.folder / "best"
    copy = shutil.copytree(run.folder / "best", folder / "model")
    cases = {
        "val": ["--eval_only", best],
        "test": ["--eval_only", best, "--split", "test"],
        "large": ["--eval_only", best, "--image_size", 64],
        "copy": ["--eval_only", copy, "--output_dir", folder / "here"],
        "dry": ["--eval_only", copy, "--output_dir", folder / "dry", "--dry_run"],
        "nowhere": ["--eval_only", copy, "--output_dir", "/proc/here"],
    }
    return {"run": run} | run_several(1, cases)


def parse_report(ended: Outcome) -> Path:
    """The folder that an evaluation has named as its report."""
    return Path(re.findall("^report: (.*)$", ended.stdout, re.MULTILINE)[0])


@pytest.mark.parametrize(
    "name, start, part, size",
    [
        ("val", "best-val", "val/", 32),
        ("test", "best-test", "test/", 32),
        ("large", "best-val-", "val/", 64),
        ("copy", "model-val-", "val/", 32),
    ],
)
def test_each_part_and_each_setting_has_a_report_of_its_own(
    on_parts, name, start, part, size
) -> None:
    report = parse_report(on_parts[name])
    evaluated = read_report(report)["evaluated"]
    assert read_printed(on_parts[name])["top1"] == read_report(report)["top1"]
    assert report.name.startswith(start)
    assert (evaluated["part"], evaluated["config"]["image_size"]) == (part, size)


def test_reports_stand_with_the_run_or_where_they_are_asked_for(on_parts) -> None:
    folder = on_parts["run"].folder
    assert set((folder / "evaluation").iterdir()) == {
        parse_report(on_parts[name]) for name in ("val", "test", "large")
    }
    assert list((folder.parent / "here/evaluation").iterdir()) == [parse_report(on_parts["copy"])]
    exported = {path.name for path in (folder / "best").iterdir()}
    beside = {path.name for path in (folder.parent / "model").iterdir()}
    assert beside <= exported, "nothing is written beside a model"


def test_an_evaluation_without_a_report_has_its_numbers(on_parts) -> None:
    """One that is not asked for, or can't be written."""
    assert read_printed(on_parts["dry"])["top1"] == read_printed(on_parts["copy"])["top1"]
    assert not (on_parts["run"].folder.parent / "dry").exists()
    nowhere = on_parts["nowhere"]
    assert nowhere.outcome == "ok" and "can't be written (" in nowhere.stdout
    assert "name another --output_dir" in nowhere.stdout


# --- detectors

PICTURES = {"predictions", "precision_recall", "confusion", "misses"}


def test_two_ranks_leave_the_report_of_a_detector(
    trained_detector, scenes, run_several, tmp_path
) -> None:
    run = copy_run(trained_detector, tmp_path / "run")
    argv = ["recipes/det.py", "--eval_only", run / "best", "--data", scenes, "--split", "train"]
    of_two = read_printed(run_several(2, {"two": argv}, pictures=True)["two"])
    (folder,) = (run / "evaluation").iterdir()
    report = read_report(folder)
    assert {path.stem for path in (folder / "pictures").iterdir()} == PICTURES
    assert all(min(Image.open(path).size) > 300 for path in (folder / "pictures").iterdir())
    assert report["AP50"] > 0 and report["thresholds"] == of_two["thresholds"]
    for name, row in report["classes"].items():
        assert row["threshold"] == report["thresholds"][name]
