"""Predicted and exported masks are those that the run measured, pixel by pixel."""

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.segmentation.evaluation import compute_metrics
from tests.harness.runs import catch_refusal, read_rows, start_tool
from tools.audit.__main__ import main as audit
from tools.compare import bootstrap
from tools.compare.__main__ import main as compare
from tools.compare.evaluation import build_miou
from tools.export import segmenter, verify
from tools.export.__main__ import main as export
from tools.predict.__main__ import main
from tools.publish.__main__ import main as publish

WORDS = (
    "--model test_resnet --width 32 --crop_size 64 --batch_norm group --global_batch_size 8 --max_steps "
    "6 --log_every 1 --lr 5e-3"
).split()


@pytest.fixture(scope="module")
def runs(run_several, regions, tmp_path_factory) -> dict[str, Path]:
    """Runs by name: evaluated at the images' own sizes, resized, and with a linear decoder."""
    output = tmp_path_factory.mktemp("masks")
    argv = ["--data", regions] + WORDS + ["--output_dir", output]
    cases = {
        "own": argv,
        "resized": argv + ["--eval_short_side", 80],
        "linear": argv + ["--model", "test_vit", "--decoder", "linear"],
    }
    outcomes = run_several(2, cases, recipe="recipes/seg.py")
    return {name: outcome.folder for name, outcome in outcomes.items()}


@pytest.fixture(scope="module")
def run(runs) -> Path:
    return runs["own"]


@pytest.mark.parametrize("processes", [1, 2])
def test_masks_have_the_recorded_iou(processes, run, regions, forks, tmp_path) -> None:
    images = regions / "images/val"
    (tmp_path / "broken.png").write_bytes(b"no image")
    argv = [run, images, tmp_path / "broken.png", "-o", tmp_path / "rows.jsonl"]
    argv += ["--masks", tmp_path / "masks", "--draw", tmp_path / "drawn"]
    for rank in start_tool(forks, processes, "predict", argv):
        ended = rank.end()
        assert ended.code == 0, ended
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and "not an image" in rows.pop()["error"]
    confusion = np.zeros((3, 3), np.int64)
    for row in rows:
        file = Path(row["file"])
        truth = np.asarray(Image.open(regions / "masks/val" / f"{file.stem}.png"))
        mask = Image.open(row["mask"])
        predicted = np.asarray(mask)
        assert mask.mode == "P" and mask.getpalette()[:6] == [0, 0, 0, 128, 0, 0]
        assert (row["height"], row["width"]) == predicted.shape == truth.shape
        is_labelled = truth != 255
        np.add.at(confusion, (truth[is_labelled], predicted[is_labelled]), 1)
        shares = {entry["class"]: entry["share"] for entry in row["predictions"]}
        assert shares["sky"] == round((predicted == 2).mean(), 6)
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
        overlay = Image.open(tmp_path / "drawn" / Path(row["mask"]).name)
        assert overlay.size == mask.size
    ious = confusion.diagonal() / (confusion.sum(0) + confusion.sum(1) - confusion.diagonal())
    best = json.loads((run / "best/results.json").read_text())
    assert ious.mean() == best["mIoU"]
    assert ious.tolist() == list(best["per_class"].values())


def test_a_table_has_the_largest_classes(run, regions, capsys) -> None:
    main([str(run), str(regions / "images/val"), "--format", "csv", "--top", "1"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 7 and list(rows[0]) == ["file", "class", "share", "error"]
    assert all(float(row["share"]) > 1 / 3 for row in rows)


@pytest.mark.parametrize("name", ["own", "resized", "linear"])
def test_an_export_scores_what_the_run_scored_at_every_size(name, runs, tmp_path) -> None:
    """The seven images have seven sizes; verify.py needs no torch."""
    folder = tmp_path / "onnx"
    export([str(runs[name]), "--to", "onnx", "-o", str(folder), "--workers", "0"])
    figures = json.loads((folder / "export.json").read_text())["validation"]
    best = json.loads((runs[name] / "best/results.json").read_text())
    assert figures["mIoU"] == best["mIoU"]
    assert figures["mIoU_exported"] == pytest.approx(best["mIoU"], abs=2e-4)
    assert (figures["images"], figures["differing"]) == (7, 0)
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "torch.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, folder / "verify.py"],
        env=os.environ | {"PYTHONPATH": str(blocked)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    vectors = dict(np.load(folder / "vectors.npz"))
    vectors["ids_0"] = vectors["ids_0"] * 0 + 1
    np.savez(folder / "vectors.npz", **vectors)
    about = json.loads((folder / "export.json").read_text())
    digest = hashlib.sha256((folder / "vectors.npz").read_bytes()).hexdigest()
    about["files"]["vectors.npz"] = digest
    (folder / "export.json").write_text(json.dumps(about))
    assert "ids differ by" in verify.find_fault(folder)


def test_two_models_are_compared_by_miou(runs, run_tool, tmp_path) -> None:
    pair = [runs["own"], runs["linear"]]
    for processes in (1, 2):
        output = tmp_path / str(processes)
        run_tool(processes, "compare", pair + ["-o", output, "--workers", 0])
    content = json.loads((tmp_path / "1/comparison.json").read_text())
    assert content == json.loads((tmp_path / "2/comparison.json").read_text())
    (difference,) = content["differences"]
    recorded = []
    for path in pair:
        recorded.append(json.loads((path / "best/results.json").read_text())["mIoU"])
    assert difference["metric"] == "mIoU"
    assert difference["results"] == pytest.approx(recorded, abs=1e-12)
    assert difference["difference"] == pytest.approx(recorded[1] - recorded[0], abs=1e-12)
    low, high = difference["interval"]
    assert low < difference["difference"] < high


def test_miou_over_resampled_images_is_that_of_repeated_images() -> None:
    generator = np.random.default_rng(0)
    confusions = generator.integers(0, 50, (9, 4, 5))
    confusions[3:, 2] = 0  # a class that most resamples lack
    right = np.diagonal(confusions, axis1=1, axis2=2)
    counts = np.stack([right, confusions.sum(2), confusions.sum(1)[:, :4]], axis=2)
    weights = np.concatenate(list(bootstrap.draw_resamples(9, 20)))
    for value, times in zip(build_miou(counts)(weights), weights, strict=True):
        total = np.repeat(confusions, times, axis=0).sum(0)
        assert value == pytest.approx(compute_metrics(total)["mIoU"], abs=1e-12)
    assert np.isnan(build_miou(counts)(np.zeros((1, 9)))).all()


def test_another_model_is_refused(run, tmp_path, monkeypatch) -> None:
    forward = segmenter.Exportable.forward
    monkeypatch.setattr(
        segmenter.Exportable, "forward", lambda self, image: forward(self, image).flip(1)
    )
    text = catch_refusal(
        export, [run, "--to", "torch_export", "-o", tmp_path / "out", "--workers", 0]
    )
    assert "mIoU is " in text and "7 of 7 images differ from the trained model" in text
    assert not (tmp_path / "out").exists()


def test_a_replay_shows_the_samples_and_losses_of_a_step(run, forks, tmp_path) -> None:
    output = tmp_path / "step"
    (rank,) = start_tool(forks, 1, "replay", [run, "--step", 2, "-o", output, "--from_start"])
    ended = rank.end()
    assert ended.code == 0, ended
    numbers = json.loads((output / "step.json").read_text())["numbers"]["train/loss"]
    # Two processes made the run, and one repeats it: the numbers agree but for rounding.
    assert numbers["replayed"] == pytest.approx(numbers["logged"], rel=1e-5)
    losses = [sample["loss"] for sample in read_rows(output / "samples.jsonl")]
    assert len(losses) == 8 and np.mean(losses) == pytest.approx(numbers["logged"], rel=1e-5)


def test_other_tools_say_that_they_do_not_take_it(run, regions, trained_classifier) -> None:
    text = catch_refusal(audit, [run])
    assert "is a model for segmentation, which this tool does not take yet" in text
    text = catch_refusal(compare, [run, trained_classifier, "--data", "digits"])
    assert "a model for segmentation and one for classification have no result in common" in text
    text = catch_refusal(publish, [run, "--to", "a/b", "--dry_run", run / "card"])
    assert text == f"{run}: is a model for segmentation, which has no card yet; upload its best/"
    text = catch_refusal(main, [trained_classifier, regions, "--masks", run / "m"])
    assert text == f"--masks {run / 'm'}: is for models of segmentation; leave it out"
