"""Evaluations that are kept leave the prediction for each image, of the same weights."""

import csv
import json
import signal
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO

from tests.harness.detections import evaluate_with_pycocotools
from tests.harness.drawings import draw_stripes
from tests.harness.outcomes import read, read_best_files, read_rows
from tests.harness.resumed import signal_at

WORDS = (
    "--model test_vit --image_size 16 --global_batch_size 8 --max_micro_batch_size 4 --lr 2e-3 "
    "--max_steps 6 --eval_every 2 --checkpoint_every 2 --ema_decay 0.5 --workers 0 --tracker none "
    "--name run"
).split()
DET = (
    "--short_sides 96 --long_side 112 --levels 3-5 --width 32 --convolutions 1 --opt muon "
    "--lr 5e-3 --model test_convnext --max_steps 30 --eval_every 30 --max_micro_batch_size 3 "
    "--workers 0 --tracker none --name run"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An image folder, one of whose images can't be read."""
    folder = tmp_path_factory.mktemp("predictions") / "flat"
    draw_stripes(folder, (20, 16, 14, 12, 10))
    for number in range(20):  # some of these are held out
        if number % 3 == 0:
            (folder / "stuff_0" / f"{number}.png").write_bytes(b"no image %d" % number)
    return folder


@pytest.fixture(scope="module")
def run(forks, folder: Path, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("run")
    assert forks(["--data", folder, "--output_dir", output] + WORDS).code == 0
    return output / "run"


def read_table(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def compute_top1_and_loss(file: Path) -> tuple[float, float]:
    rows = read_table(file)
    right = [row["predicted"] == row["label"] for row in rows]
    return sum(right) / len(rows), np.nanmean([float(row["loss"]) for row in rows])


def test_predictions_are_of_the_weights_and_numbers_beside_them(run: Path, forks, tmp_path) -> None:
    """Of the moving average, whose numbers differ from those of the weights that it averages."""
    best = read(run / "best/results.json")
    top1, loss = compute_top1_and_loss(run / "best/predictions.csv")
    assert top1 == best["top1"] and loss == pytest.approx(best["loss"], abs=1e-6)
    assert abs(best["loss"] - best["raw_loss"]) > 1e-4 and best["broken"] > 0
    last = read_rows(run / "metrics.jsonl")[-1]
    top1, loss = compute_top1_and_loss(run / "predictions.csv")
    assert top1 == last["eval/ema_top1"] and loss == pytest.approx(last["eval/ema_loss"], abs=1e-6)
    for name, value in best["per_class"].items():
        assert best[f"accuracy_class/{name}"] == value
    assert {f"eval/ema_accuracy_class/{name}" for name in best["per_class"]} <= last.keys()

    ended = forks(["--eval_only", run / "best"])
    assert ended.code == 0, ended
    report = run / "evaluation/best-held_out"
    top1, loss = compute_top1_and_loss(report / "predictions.csv")
    results = read(report / "results.json")
    assert top1 == results["top1"] and loss == pytest.approx(results["loss"], abs=1e-6)
    assert [row["path"] for row in read_table(report / "predictions.csv")] == [
        row["path"] for row in read_table(run / "best/predictions.csv")
    ]


def test_split_says_which_image_was_trained_on(run: Path, folder: Path) -> None:
    rows = read_table(run / "split.csv")
    splits = {row["path"]: row["split"] for row in rows}
    assert len(splits) == len(rows) == 72
    assert splits.keys() == {str(path) for path in folder.rglob("*.png")}
    held_out = [path for path, split in splits.items() if split == "val"]
    assert held_out == [row["path"] for row in read_table(run / "predictions.csv")]
    assert 0 < len(held_out) < 72 and set(splits.values()) == {"train", "val"}


@pytest.mark.parametrize("step", [3, 5])
def test_a_killed_run_leaves_the_files_of_an_undisturbed_one(step, run, forks, folder, tmp_path):
    args = ["--data", folder, "--output_dir", tmp_path] + WORDS
    killed = forks(args, observer=signal_at(step))
    assert killed.code == -signal.SIGKILL
    written = (tmp_path / "run/split.csv").stat()
    assert forks(args).code == 0
    assert (tmp_path / "run/split.csv").stat().st_mtime_ns == written.st_mtime_ns, "written once"
    for name in ("split.csv", "predictions.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (run / name).read_bytes(), name
    assert read_best_files(tmp_path / "run") == read_best_files(run)


def test_two_processes_leave_the_same_predictions(run: Path, run_several, folder) -> None:
    args = ["--eval_only", run / "best", "--max_micro_batch_size", 4]
    run_several(1, {"one": args})
    file = next((run / "evaluation").glob("best-held_out*/predictions.csv"))
    content = file.read_bytes()
    file.unlink()
    run_several(2, {"two": args})
    assert file.read_bytes() == content


def test_detections_are_coco_results_with_the_ids_of_the_data(forks, scenes, tmp_path) -> None:
    content = json.loads((scenes / "val.json").read_text())
    for annotation in content["annotations"]:  # what pycocotools needs
        width, height = annotation["bbox"][2:]
        annotation.setdefault("iscrowd", 0)
        annotation.setdefault("area", width * height)
    assert forks(["--data", scenes, "--output_dir", tmp_path] + DET, recipe="det").code == 0
    run = tmp_path / "run"
    results = read(run / "best/results.json")
    detections = json.loads((run / "best/predictions.json").read_text())
    # Refuses ids that are not in the data.
    COCO(scenes / "val.json").loadRes(str(run / "best/predictions.json"))
    expected = evaluate_with_pycocotools(content, detections)
    assert expected.stats[0] > 0, "numbers worth comparing"
    for name, value in zip(("AP", "AP50"), expected.stats, strict=False):
        assert results[name] == pytest.approx(value, abs=1e-12), name
    assert (run / "predictions.json").read_bytes() == (run / "best/predictions.json").read_bytes()
    splits = [row["split"] for row in read_table(run / "split.csv")]
    assert (splits.count("train"), splits.count("val")) == (25, 7)
    assert forks(["--eval_only", run / "best"], recipe="det").code == 0
    (report,) = (run / "evaluation").iterdir()
    assert len(json.loads((report / "predictions.json").read_text())) == len(detections)
