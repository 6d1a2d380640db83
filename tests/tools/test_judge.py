"""`--eval_only` leaves a report: its numbers are those of the run and of any layout, each part of the data has its own."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.harness.drawings import draw_stripes
from tests.harness.runs import copied, read


def report_in(folder: Path) -> dict:
    return read(folder / "results.json")


def printed(ended) -> dict:
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def run(trained_classifier, tmp_path_factory) -> Path:
    """A run of digits, whose reports may be written into its folder."""
    return shutil.copytree(trained_classifier, tmp_path_factory.mktemp("judge") / "run")


@pytest.fixture(scope="module")
def reported(run, run_several) -> Path:
    """The report that two ranks with data workers leave."""
    words = ["--eval_only", run / "best", "--workers", 1, "--output_dir", run.parent]
    done = run_several(2, {"two": words}, pictures=True)["two"]
    assert f"report: {run}/evaluation/best-held_out\n" in done.stdout
    return shutil.copytree(run / "evaluation/best-held_out", run.parent / "report of two ranks")


def test_a_report_has_the_numbers_of_the_run_and_of_any_layout(run, reported, forks) -> None:
    report, best = report_in(reported), report_in(run / "best")
    for key in ("top1", "per_class", "count"):
        assert report[key] == best[key]
    assert report["thresholds"] == best["thresholds"] and len(set(best["thresholds"].values())) > 1
    assert report["ece"] == pytest.approx(best["ece"], abs=1e-6) and 0 < best["ece"] < 0.2
    classes, calibration = report["classes"], report["calibration"]
    assert list(classes) == [*"0123456789"]
    assert {name: row["recall"] for name, row in classes.items()} == report["per_class"]
    assert np.mean([row["f1"] for row in classes.values()]) == pytest.approx(report["f1_macro"])
    assert all(row["f1_at_threshold"] > 0.9 for row in classes.values())
    assert 0.1 < calibration["temperature"] < 10 and calibration["nll_after"] <= calibration["nll"]
    assert sum(row["images"] for row in calibration["bins"]) == 359
    evaluated = report["evaluated"]
    assert (evaluated["part"], evaluated["images"], evaluated["run"]) == ("a fixed fifth, held out", 359, "cls")
    assert evaluated["step"] == read(run / "best/run.json")["step"]

    assert {path.name for path in reported.iterdir()} == {"results.json", "pictures"}
    drawn = {path.name for path in (reported / "pictures").iterdir()}
    assert drawn == {"confusion.png", "mistakes.png", "reliability.png"}
    assert drawn < {path.name for path in (run / "pictures").iterdir()}

    alone = printed(forks("--eval_only", run / "best", "--workers", 0))
    again = report_in(run / "evaluation/best-held_out")
    assert again.pop("loss") == pytest.approx(report.pop("loss"), rel=1e-6)
    assert again == report and alone["thresholds"] == report["thresholds"]
    assert not (run / "evaluation/best-held_out/pictures").exists(), "the old report's pictures are gone with it"


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """Images of five classes in train/, val/ and test/."""
    root = tmp_path_factory.mktemp("parts")
    for seed, part in enumerate(("train", "val", "test")):
        draw_stripes(root / part, (16, 14, 12, 10, 8), seed=seed)
    return root


def test_each_part_and_each_setting_has_a_report_of_its_own(parts, run_several, tmp_path) -> None:
    words = f"--data {parts} --model test_vit --image_size 32 --max_steps 4 --lr 1e-3 --output_dir {tmp_path}"
    run = run_several(1, {"folders": words.split()})["folders"].folder
    assert "test" not in (run / "metrics.jsonl").read_text() and not (run / "evaluation").exists()
    shutil.copytree(run / "best", tmp_path / "model")
    flags = {"best-val": "", "best-test": "--split test", "best-val-": "--image_size 64"}
    cases = {name: ["--eval_only", run / "best", *words.split()] for name, words in flags.items()}
    cases["alone"] = ["--eval_only", tmp_path / "model", "--output_dir", tmp_path / "here"]
    cases["dry"] = ["--eval_only", tmp_path / "model", "--output_dir", tmp_path / "dry", "--dry_run"]
    cases["nowhere"] = ["--eval_only", tmp_path / "model", "--output_dir", "/proc/here"]
    ended = run_several(1, cases)
    reports = {}
    for name in ("best-val", "best-test", "best-val-", "alone"):
        reports[name] = Path(re.findall("^report: (.*)$", ended[name].stdout, re.MULTILINE)[0])
        assert printed(ended[name])["top1"] == report_in(reports[name])["top1"]
    assert {*reports.values()} == {*(run / "evaluation").iterdir(), *(tmp_path / "here/evaluation").iterdir()}
    for name in flags:
        assert reports[name].name.startswith(name), reports
        evaluated = report_in(reports[name])["evaluated"]
        assert evaluated["part"] == ("test/" if "test" in name else "val/")
        assert evaluated["config"]["image_size"] == (64 if name == "best-val-" else 32)
    assert reports["alone"].name.startswith("model-val-") and len([*(tmp_path / "model").iterdir()]) == 4
    assert ended["nowhere"].outcome == "ok" and "can't be written (" in ended["nowhere"].stdout
    assert "name another --output_dir" in ended["nowhere"].stdout
    assert printed(ended["dry"])["top1"] == printed(ended["alone"])["top1"] and not (tmp_path / "dry").exists()


# --- detectors

PICTURES = {"predictions", "precision_recall", "confusion", "misses"}


def test_two_ranks_leave_the_report_of_a_detector(trained_detector, scenes, run_several, tmp_path) -> None:
    run = copied(trained_detector, tmp_path / "run")
    words = ["recipes/det.py", "--eval_only", run / "best", "--data", scenes, "--split", "train"]
    of_two = printed(run_several(2, {"two": words}, pictures=True)["two"])
    (folder,) = (run / "evaluation").iterdir()
    report = report_in(folder)
    assert {path.stem for path in (folder / "pictures").iterdir()} == PICTURES
    assert all(min(Image.open(path).size) > 300 for path in (folder / "pictures").iterdir())
    assert report["AP50"] > 0 and report["thresholds"] == of_two["thresholds"]
    for name, row in report["classes"].items():
        assert row["threshold"] == report["thresholds"][name]
