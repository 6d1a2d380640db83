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
from tests.harness.detections import awkward
from tests.harness.runs import copied, read, refusal
from tests.tools.changed import update_json
from tools.compare import bootstrap
from tools.compare.__main__ import main
from tools.compare.average_precision import AveragePrecision
from tools.compare.evaluation import build_f1

# --- statistics


def repeated(source: Annotated, found: list[dict], counts: np.ndarray) -> dict:
    """COCO's evaluation of a data set in which image n occurs counts[n] times."""
    rows = np.repeat(np.arange(len(source)), counts)
    detections = Detections()
    detections.update(range(len(rows)), [found[row] for row in rows])
    return detections.results(
        dataclasses.replace(source.select(rows), image_ids=np.arange(1, len(rows) + 1))
    )


def test_ap_over_resampled_images_is_cocos_of_repeated_images() -> None:
    # Crowds, an absent class, boxes turned inside out, scores tied between images.
    source, found = awkward(3)
    for of_image in found:  # without ties: copies of an image change their order
        of_image["scores"] += torch.arange(len(of_image["scores"])) * 1e-5
    detections = Detections()
    detections.update(range(len(source)), found)
    once = np.ones((1, len(source)), np.int64)
    weights = np.concatenate([once, next(bootstrap.draw_resamples(len(source), 12)), 0 * once])
    ap = AveragePrecision(source, *detections.to_arrays())
    values, per_class = ap(weights), ap.compute_per_class(weights)
    assert np.isnan(values[-1]) and len(set(values[:-1].round(6))) > 10
    for row, counts in enumerate(weights[:-1]):
        expected = repeated(source, found, counts)
        assert values[row] == pytest.approx(expected["AP"], abs=1e-12)
        of_classes = [np.nan if value is None else value for value in expected["per_class"]]
        assert per_class[row] == pytest.approx(of_classes, abs=1e-12, nan_ok=True)


def test_intervals_hold_the_true_difference_as_they_say() -> None:
    random, images, trials = np.random.default_rng(0), 400, 250
    held, called_better = 0, 0
    for _ in range(trials):
        ease = random.random(images)  # pairs: the same images are hard for both
        first, second, equal = (random.random(images) < ease**power for power in (0.5, 0.4, 0.5))
        true = 1 / 1.4 - 1 / 1.5

        def share(right: np.ndarray):
            return lambda weights: weights @ right / images

        found = bootstrap.compare(share(first), share(second), images, 200)
        assert found.value == pytest.approx(second.mean() - first.mean())
        held += found.low <= true <= found.high
        called_better += bootstrap.compare(
            share(first), share(equal), images, 200
        ).is_larger_than_noise
    assert 0.91 <= held / trials <= 0.98, held / trials
    assert 0.02 <= called_better / trials <= 0.09, called_better / trials


def test_resamples_are_always_the_same(monkeypatch) -> None:
    first = np.concatenate([*bootstrap.draw_resamples(37, 50)])
    assert (first.sum(1) == 37).all() and abs((first == 0).mean() - math.exp(-1)) < 0.03
    monkeypatch.setattr(bootstrap, "_MAX_CELLS", 37 * 20)  # in parts, which take less memory
    parts = [*bootstrap.draw_resamples(37, 50)]
    assert [len(part) for part in parts] == [20, 20, 10] and (np.concatenate(parts) == first).all()


def test_f1_over_resampled_images_is_that_of_repeated_images() -> None:
    random = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(30, 4, generator=random), torch.rand(30, 4, generator=random) < 0.4
    found = logits > 0
    counts = torch.stack([(found & labels).sum(1), (found ^ labels).sum(1)], 1).numpy()
    weights = next(bootstrap.draw_resamples(30, 5))
    for value, times in zip(build_f1(counts)(weights), torch.from_numpy(weights), strict=True):
        rows = torch.arange(30).repeat_interleave(times)
        expected = ClassificationCounts(4, "cpu", multi_label=True)
        expected.update(logits[rows], labels[rows])
        assert value == pytest.approx(expected.reduce().results()["f1"], abs=1e-12)


# --- real runs


def worse(run: Path, copy: Path, noise: float) -> Path:
    """A copy of a run whose best model has other weights, another learning rate and another recipe."""
    copied(run, copy)
    weights, random = (
        load_file(copy / "best" / "model.safetensors"),
        torch.Generator().manual_seed(0),
    )
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


def compared(capsys, output: Path, *words: object) -> tuple[str, dict]:
    """What is printed, and comparison.json."""
    main([*map(str, words), "-o", str(output)])
    return capsys.readouterr().out, read(output / "comparison.json")


def test_a_worse_classifier_is_told_from_better_and_equal_ones(
    run_tool, trained_classifier, tmp_path, capsys
) -> None:
    other, copy = (
        worse(trained_classifier, tmp_path / "other", 0.8),
        copied(trained_classifier, tmp_path / "copy"),
    )
    runs = (
        trained_classifier,
        other,
        copy,
        "--recipe",
        "recipes/cls.py",
        "--recipe",
        other / "source" / "cls.py",
    )
    ended = run_tool(2, "compare", *runs, "-o", tmp_path / "two", "--workers", 0)
    assert "".join(rank.stdout for rank in ended).count("is it more than noise?") == 1
    text, found = compared(capsys, tmp_path / "one", *runs, "--workers", 0)
    assert read(tmp_path / "two" / "comparison.json") == found
    for said in (
        "--lr",
        "best at step",
        "images/s",
        "2 × ",
        "+    torch.numel(torch.ones(1))",
        "larger than noise",
    ):
        assert said in text, text
    assert "a comment" not in text and "--opt" not in text and "no difference beyond noise" in text

    different, same = found["differences"]
    recorded = PastRun(trained_classifier).results["top1"]
    assert (
        different["results"][0] == pytest.approx(recorded, abs=1e-12)
        and different["results"][1] < recorded - 0.05
    )
    assert different["interval"][0] < different["difference"] < different["interval"][1] < 0
    assert same["difference"] == 0 and same["interval"] == [0, 0] and not same["larger_than_noise"]
    assert same["sign_changes"] == 1


def test_a_worse_detector_is_told_from_a_better_one(trained_detector, tmp_path, capsys) -> None:
    other = worse(trained_detector, tmp_path / "other", 0.3)
    recipes = ["--recipe", "recipes/det.py", "--recipe", other / "source" / "det.py"]
    text, found = compared(
        capsys, tmp_path / "out", trained_detector, other, *recipes, "--workers", 0
    )
    assert "AP on digits: fixed scenes" in text and "larger than noise" in text
    (changed,) = found["differences"]
    recorded = PastRun(trained_detector).results["AP"]
    assert (
        changed["results"][0] == pytest.approx(recorded, abs=1e-9)
        and changed["results"][1] < recorded - 0.02
    )
    assert changed["interval"][1] < 0 and changed["sign_changes"] == 0


def test_what_folders_record_needs_no_model(trained_classifier, tmp_path, capsys) -> None:
    copy, killed = copied(trained_classifier, tmp_path / "copy"), tmp_path / "killed"
    text, _ = compared(capsys, tmp_path / "out", trained_classifier, copy, "--recorded")
    assert (
        "configuration: what differs\n  nothing\n" in text
        and "source, cls and copy: the same" in text
    )
    killed.mkdir()
    for name in ("config.yaml", "summary.json", "log.txt"):
        shutil.copy(trained_classifier / name, killed)
    text, found = compared(capsys, tmp_path / "out", trained_classifier, killed, "--recorded")
    assert "recipe source, cls and killed: not recorded by both" in text and "noise" not in text
    whole, of_killed = found["runs"]
    assert whole["best"] == of_killed["best"] and whole["best"]["step"] > 0
    assert "differences" not in found


def test_what_can_not_be_compared_is_refused_by_name(
    trained_classifier, trained_detector, scenes, tmp_path
) -> None:
    boxes = copied(trained_detector, tmp_path / "boxes")
    config = read(boxes / "best" / "run.json")["config"]
    update_json(boxes / "best" / "run.json", config=config | {"data": str(scenes)})
    text = refusal(main, trained_detector, boxes, "--workers", 0)
    assert (
        f"{trained_detector} and {boxes}: would be evaluated on different images or labels "
        "(digits: " in text
    )
    assert f"{scenes}: " in text
    for words, told in (
        ((trained_classifier, trained_detector, "--data", "digits"), "have no result in common"),
        ((trained_classifier,), "name at least two runs"),
        ((trained_classifier, tmp_path), f"{tmp_path}: is no run folder"),
    ):
        assert told in refusal(main, *words)
