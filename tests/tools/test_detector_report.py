"""`--eval_only` of a detector on two ranks with data workers: its numbers are those of one, and its report is complete."""

import json
import shutil

import pytest
from PIL import Image

PICTURES = {"predictions", "precision_recall", "confusion", "misses", "errors", "confidence", "objects"}
VIEWS = ("--eval_flip", "--eval_sizes", "96,128")


def printed(stdout: str) -> dict:
    return json.loads(stdout.splitlines()[-1])


def test_a_report_of_several_views_is_the_same_on_two_ranks(trained_detector, scenes, launch, forks, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_detector, run)
    words = ("--eval_only", run / "best", "--data", scenes, "--split", "train")
    two = launch("multi_cpu", "recipes/det.py", *words, "--workers", 1, *VIEWS)
    assert two.returncode == 0, two.stderr
    said = "each image is shown at 96, 128 pixels, each also mirrored; boxes are merged by NMS at IoU 0.6\n"
    assert two.stdout.count(said) == 1
    (folder,) = (run / "evaluation").iterdir()
    report = json.loads((folder / "results.json").read_text())
    assert {path.stem for path in (folder / "pictures").iterdir()} == PICTURES
    assert all(min(Image.open(path).size) > 300 for path in (folder / "pictures").iterdir())

    one = forks(*words, "--workers", 0, "--dry_run", *VIEWS, recipe="det")
    assert one.code == 0, one.stderr
    assert printed(one.stdout) == printed(two.stdout)
    plain = forks(*words, "--workers", 0, "--dry_run", recipe="det")
    assert printed(plain.stdout)["AP50"] != report["AP50"]

    assert report["AP50"] > 0, "numbers worth comparing"
    assert report["thresholds"] == printed(two.stdout)["thresholds"]
    for name, row in report["classes"].items():
        assert row["threshold"] == report["thresholds"][name]
        assert row["f1"] is None or row["f1"] == pytest.approx(
            2 * row["precision"] * row["recall"] / (row["precision"] + row["recall"])
        )
    errors = report["errors"]
    kinds = ("localisation", "class", "duplicate", "background", "both")
    assert errors["false_positives"]["count"] == sum(errors[kind]["count"] for kind in kinds) > 0
    assert errors["missed"]["count"] <= errors["false_negatives"]["count"]
    assert 0 <= max(errors[kind]["dAP50"] for kind in kinds) <= 1 - report["AP50"]
    for groups in report["objects"].values():
        assert sum(of["count"] for of in groups.values()) == sum(row["objects"] for row in report["classes"].values())
    assert report["evaluated"]["config"]["eval_flip"] and report["evaluated"]["config"]["eval_sizes"] == "96,128"


@pytest.mark.parametrize("recipe, words", [("cls", ["--eval_flip"]), ("det", ["--eval_sizes", "96"])])
def test_a_run_measures_what_it_exports(forks, recipe: str, words: list) -> None:
    ended = forks(*words, recipe=recipe)
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    assert f"{words[0]} is for --eval_only: a run measures the model as it exports it" in ended.stderr


@pytest.mark.parametrize("sizes", ["96,96", "0", "a", "96,", "9000", ",".join(map(str, range(1, 12)))])
def test_sizes_that_are_none_are_refused(forks, sizes: str) -> None:
    ended = forks("--eval_sizes", sizes, recipe="det")
    assert ended.code == 2 and "must be up to 10 different lengths in pixels" in ended.stderr
