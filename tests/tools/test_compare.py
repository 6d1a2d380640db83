"""Comparing runs: the statistics are right, equal runs do not differ, and runs on different data
are refused.
"""

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.classification.metrics import ClassificationCounts
from common.detection.data.annotated import Annotated
from common.detection.evaluation.metrics import Detections
from common.run.past_run import PastRun
from tests.harness.detections import make_awkward_objects
from tests.harness.runs import catch_refusal, copy_run, read
from tests.tools.calls import call_tool
from tests.tools.changed import update_json
from tools.compare import bootstrap
from tools.compare.__main__ import main
from tools.compare.average_precision import AveragePrecision
from tools.compare.evaluation import build_f1

# --- statistics


def evaluate_repeated(source: Annotated, outputs: list[dict], counts: np.ndarray) -> dict:
    """COCO's evaluation of a data set in which image n occurs counts[n] times."""
    indices = np.repeat(np.arange(len(source)), counts)
    detections = Detections()
    detections.update(range(len(indices)), [outputs[index] for index in indices])
    repeated = source.select(indices)
    image_ids = np.arange(1, len(indices) + 1)
    return detections.results(dataclasses.replace(repeated, image_ids=image_ids))


def test_ap_over_resampled_images_is_cocos_of_repeated_images() -> None:
    # Crowds, an absent class, boxes turned inside out, scores tied between images.
    source, outputs = make_awkward_objects(3)
    for output in outputs:  # without ties: copies of an image change their order
        output["scores"] += torch.arange(len(output["scores"])) * 1e-5
    detections = Detections()
    detections.update(range(len(source)), outputs)
    once = np.ones((1, len(source)), np.int64)
    weights = np.concatenate([once, next(bootstrap.draw_resamples(len(source), 12)), 0 * once])
    ap = AveragePrecision(source, *detections.to_arrays())
    values = ap(weights)
    per_class = ap.compute_per_class(weights)
    assert np.isnan(values[-1]) and len(set(values[:-1].round(6))) > 10
    for row, counts in enumerate(weights[:-1]):
        expected = evaluate_repeated(source, outputs, counts)
        assert values[row] == pytest.approx(expected["AP"], abs=1e-12)
        expected_per_class = np.array(expected["per_class"], float)  # None becomes nan
        assert per_class[row] == pytest.approx(expected_per_class, abs=1e-12, nan_ok=True)


def test_intervals_hold_the_true_difference_as_they_say() -> None:
    random = np.random.default_rng(0)
    images = 400
    trials = 250
    num_held = 0
    num_called_better = 0
    for _ in range(trials):
        ease = random.random(images)  # pairs: the same images are hard for both
        first = random.random(images) < ease**0.5
        second = random.random(images) < ease**0.4
        equal = random.random(images) < ease**0.5
        true = 1 / 1.4 - 1 / 1.5

        def share(right: np.ndarray):
            return lambda weights: weights @ right / images

        difference = bootstrap.compare(share(first), share(second), images, 200)
        assert difference.value == pytest.approx(second.mean() - first.mean())
        num_held += difference.low <= true <= difference.high
        num_called_better += bootstrap.compare(
            share(first), share(equal), images, 200
        ).is_larger_than_noise
    assert 0.91 <= num_held / trials <= 0.98, num_held / trials
    assert 0.02 <= num_called_better / trials <= 0.09, num_called_better / trials


def test_resamples_are_always_the_same(monkeypatch) -> None:
    first = np.concatenate(list(bootstrap.draw_resamples(37, 50)))
    assert (first.sum(1) == 37).all() and abs((first == 0).mean() - math.exp(-1)) < 0.03
    monkeypatch.setattr(bootstrap, "_MAX_CELLS", 37 * 20)  # in parts, which take less memory
    chunks = list(bootstrap.draw_resamples(37, 50))
    assert [len(chunk) for chunk in chunks] == [20, 20, 10]
    assert (np.concatenate(chunks) == first).all()


def test_f1_over_resampled_images_is_that_of_repeated_images() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 4, generator=random)
    labels = torch.rand(30, 4, generator=random) < 0.4
    predicted = logits > 0
    counts = torch.stack([(predicted & labels).sum(1), (predicted ^ labels).sum(1)], 1).numpy()
    weights = next(bootstrap.draw_resamples(30, 5))
    for value, times in zip(build_f1(counts)(weights), torch.from_numpy(weights), strict=True):
        indices = torch.arange(30).repeat_interleave(times)
        expected = ClassificationCounts(4, "cpu", multi_label=True)
        expected.update(logits[indices], labels[indices])
        assert value == pytest.approx(expected.reduce().results()["f1"], abs=1e-12)


# --- real runs


def copy_worse(run: Path, copy: Path, noise: float) -> Path:
    """A copy of a run whose best model has other weights, another learning rate and another recipe."""
    copy_run(run, copy)
    weights = load_file(copy / "best" / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        if tensor.is_floating_point() and tensor.ndim > 1:
            tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=random)
    save_file(weights, copy / "best" / "model.safetensors", {"format": "pt"})
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("\nlr: ", "\nlr: 7"))
    source = next((copy / "source").glob("*.py"))
    changed = "config = parse(Config)  # a comment\n    torch.numel(torch.ones(1))"
    source.write_text(source.read_text().replace("config = parse(Config)", changed, 1))
    return copy


def compare_runs(capsys, output: Path, args: list) -> tuple[str, dict]:
    """Compare; return what is printed, and comparison.json."""
    call_tool(main, args + ["-o", output])
    return capsys.readouterr().out, read(output / "comparison.json")


def test_a_worse_classifier_is_told_from_better_and_equal_ones(
    run_tool, trained_classifier, tmp_path, capsys
) -> None:
    worse = copy_worse(trained_classifier, tmp_path / "other", 0.8)
    copy = copy_run(trained_classifier, tmp_path / "copy")
    recipes = ["--recipe", "recipes/cls.py", "--recipe", worse / "source" / "cls.py"]
    args = [trained_classifier, worse, copy] + recipes + ["--workers", 0]
    ended = run_tool(2, "compare", args + ["-o", tmp_path / "two"])
    assert "".join(rank.stdout for rank in ended).count("is it more than noise?") == 1
    text, comparison = compare_runs(capsys, tmp_path / "one", args)
    assert read(tmp_path / "two" / "comparison.json") == comparison
    changed_line = "+    torch.numel(torch.ones(1))"
    for text_part in (
        "--lr",
        "best at step",
        "images/s",
        "2 × ",
        changed_line,
        "larger than noise",
    ):
        assert text_part in text, text
    assert "a comment" not in text and "--opt" not in text and "no difference beyond noise" in text

    different, same = comparison["differences"]
    recorded = PastRun(trained_classifier).results["top1"]
    assert different["results"][0] == pytest.approx(recorded, abs=1e-12)
    assert different["results"][1] < recorded - 0.05
    assert different["interval"][0] < different["difference"] < different["interval"][1] < 0
    assert same["difference"] == 0 and same["interval"] == [0, 0] and not same["larger_than_noise"]
    assert same["sign_changes"] == 1


def test_a_worse_detector_is_told_from_a_better_one(trained_detector, tmp_path, capsys) -> None:
    worse = copy_worse(trained_detector, tmp_path / "other", 0.3)
    recipes = ["--recipe", "recipes/det.py", "--recipe", worse / "source" / "det.py"]
    args = [trained_detector, worse] + recipes + ["--workers", 0]
    text, comparison = compare_runs(capsys, tmp_path / "out", args)
    assert "AP on digits: fixed scenes" in text and "larger than noise" in text
    (changed,) = comparison["differences"]
    recorded = PastRun(trained_detector).results["AP"]
    assert changed["results"][0] == pytest.approx(recorded, abs=1e-9)
    assert changed["results"][1] < recorded - 0.02
    assert changed["interval"][1] < 0 and changed["sign_changes"] == 0


def test_what_folders_record_needs_no_model(trained_classifier, tmp_path, capsys) -> None:
    copy = copy_run(trained_classifier, tmp_path / "copy")
    killed = tmp_path / "killed"
    args = [trained_classifier, copy, "--recorded"]
    text, _ = compare_runs(capsys, tmp_path / "out", args)
    assert "configuration: what differs\n  nothing\n" in text
    assert "source, cls and copy: the same" in text
    killed.mkdir()
    for name in ("config.yaml", "summary.json", "log.txt"):
        shutil.copy(trained_classifier / name, killed)
    args = [trained_classifier, killed, "--recorded"]
    text, comparison = compare_runs(capsys, tmp_path / "out", args)
    assert "recipe source, cls and killed: not recorded by both" in text and "noise" not in text
    finished_run, killed_run = comparison["runs"]
    assert finished_run["best"] == killed_run["best"] and finished_run["best"]["step"] > 0
    assert "differences" not in comparison


def test_what_can_not_be_compared_is_refused_by_name(
    trained_classifier, trained_detector, scenes, tmp_path
) -> None:
    boxes = copy_run(trained_detector, tmp_path / "boxes")
    config = read(boxes / "best" / "run.json")["config"]
    update_json(boxes / "best" / "run.json", config=config | {"data": str(scenes)})
    text = catch_refusal(main, [trained_detector, boxes, "--workers", 0])
    assert (
        f"{trained_detector} and {boxes}: would be evaluated on different images or labels "
        "(digits: " in text
    )
    assert f"{scenes}: " in text
    for args, message in (
        ((trained_classifier, trained_detector, "--data", "digits"), "have no result in common"),
        ((trained_classifier,), "name at least two runs"),
        ((trained_classifier, tmp_path), f"{tmp_path}: is no run folder"),
    ):
        assert message in catch_refusal(main, args)
