"""Comparing runs: the statistics are right, equal runs do not differ, and runs on different data are refused."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.classification.metrics import ClassificationCounts
from common.detection.data.annotated import Annotations
from common.detection.evaluation.metrics import Detections
from common.errors import Refused
from common.run.past_run import PastRun
from tests.harness.detections import awkward
from tools.compare import bootstrap, evaluation
from tools.compare.__main__ import main
from tools.compare.average_precision import AveragePrecision
from tools.compare.evaluation import Predictions


def worse(run: Path, copy: Path, noise: float) -> Path:
    """A copy of a run whose best model has other weights, another learning rate and another recipe."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("wandb", "checkpoints"))
    weights, random = load_file(copy / "best" / "model.safetensors"), torch.Generator().manual_seed(0)
    for tensor in weights.values():
        if tensor.is_floating_point() and tensor.ndim > 1:
            tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=random)
    header = {"format": "pt"}
    save_file(weights, copy / "best" / "model.safetensors", header)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("\nlr: ", "\nlr: 7"))
    source = next((copy / "source").glob("*.py"))
    source.write_text(
        source.read_text().replace("model.eval()", "model.eval()  # a comment\n    torch.numel(torch.ones(1))", 1)
    )
    return copy


def compared(capsys, *words: object) -> tuple[str, dict]:
    """What is printed, and comparison.json."""
    main([*map(str, words), "--workers", "0"] if "--recorded" not in words else [*map(str, words)])
    return capsys.readouterr().out, json.loads((Path(words[words.index("-o") + 1]) / "comparison.json").read_text())


# --- statistics


def repeated(source: Annotations, found: list[dict], counts: np.ndarray) -> dict:
    """COCO's evaluation of a data set in which image n occurs counts[n] times."""
    rows = np.repeat(np.arange(len(source)), counts)
    columns = source.columns_of(rows) | {"image_ids": np.arange(1, len(rows) + 1)}
    detections = Detections()
    detections.update(range(len(rows)), [found[row] for row in rows])
    many = Annotations(classes=source.classes, category_ids=source.category_ids, **columns)
    return detections.results(many)


@pytest.mark.parametrize("seed", [3, 4])
def test_ap_over_resampled_images_is_cocos_of_repeated_images(seed: int) -> None:
    source, found = awkward(seed)  # crowds, an absent class, boxes turned inside out, scores tied between images
    for of_image in found:
        of_image["scores"] += (
            torch.arange(len(of_image["scores"])) * 1e-5
        )  # copies of an image change the order of its ties
    detections = Detections()
    detections.update(range(len(source)), found)
    once = np.ones((1, len(source)), np.int64)
    weights = np.concatenate([once, next(bootstrap.resampled(len(source), 12)), 0 * once])
    ap = AveragePrecision(source, *detections.columns())
    values, per_class = ap(weights), ap.per_class(weights)
    assert np.isnan(values[-1]) and len(set(values[:-1].round(6))) > 10
    for row, counts in enumerate(weights[:-1]):
        expected = repeated(source, found, counts)
        assert values[row] == pytest.approx(expected["AP"], abs=1e-12)
        of_classes = [np.nan if value is None else value for value in expected["per_class"]]
        assert per_class[row] == pytest.approx(of_classes, abs=1e-12, nan_ok=True)


def test_intervals_hold_the_true_difference_as_often_as_they_say_and_equal_models_are_called_equal() -> None:
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
        called_better += bootstrap.compare(share(first), share(equal), images, 200).is_larger_than_noise
    assert 0.91 <= held / trials <= 0.98, held / trials
    assert 0.02 <= called_better / trials <= 0.09, called_better / trials


def test_resamples_are_always_the_same_and_draw_as_many_images_as_there_are(monkeypatch) -> None:
    first, again = (np.concatenate([*bootstrap.resampled(37, 50)]) for _ in range(2))
    assert (first == again).all() and (first.sum(1) == 37).all() and first.max() > 2
    assert abs((first == 0).mean() - math.exp(-1)) < 0.03
    monkeypatch.setattr(bootstrap, "_CELLS", 37 * 20)  # in parts, which take less memory
    parts = [*bootstrap.resampled(37, 50)]
    assert [len(part) for part in parts] == [20, 20, 10] and (np.concatenate(parts) == first).all()


def test_mcnemars_p_value_is_that_of_a_fair_coin() -> None:
    first, second = np.zeros(20, bool), np.zeros(20, bool)
    first[:2], second[5:14] = True, True
    chance = 2 * sum(math.comb(11, k) for k in range(3)) / 2**11
    assert bootstrap.mcnemar(first, second) == (2, 9, pytest.approx(chance))
    assert bootstrap.mcnemar(first, first) == (0, 0, 1.0)


def test_f1_of_several_labels_over_resampled_images_is_that_of_repeated_images() -> None:
    random = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(30, 4, generator=random), torch.rand(30, 4, generator=random) < 0.4
    found = logits > 0
    counts = torch.stack([(found & labels).sum(1), (found ^ labels).sum(1)], 1).numpy()
    trained, val = SimpleNamespace(is_detector=False), SimpleNamespace(multi_label=True)
    candidate = SimpleNamespace(trained=trained, val=val)
    predictions = Predictions(candidate, {"counts": counts})
    weights = next(bootstrap.resampled(30, 5))
    for value, times in zip(predictions.result(weights), torch.from_numpy(weights), strict=True):
        rows = torch.arange(30).repeat_interleave(times)
        expected = ClassificationCounts(4, "cpu", multi_label=True)
        expected.update(logits[rows], labels[rows])
        assert value == pytest.approx(expected.reduce().results()["f1"], abs=1e-12)
    assert predictions.metric == "f1" and predictions.right is None


# --- real runs


def test_a_run_does_not_differ_from_its_copy(trained_classifier, tmp_path, capsys) -> None:
    shutil.copytree(trained_classifier, tmp_path / "copy", ignore=shutil.ignore_patterns("wandb", "checkpoints"))
    text, found = compared(capsys, trained_classifier, tmp_path / "copy", "-o", tmp_path / "out")
    assert "configuration: what differs\n  nothing\n" in text and "source, cls and copy: the same" in text
    assert "data fingerprint: the same" in text and "classes that changed most\n  none\n" in text
    assert "no difference beyond noise" in text
    (difference,) = found["differences"]
    assert difference["difference"] == 0 and difference["interval"] == [0, 0] and not difference["larger_than_noise"]
    assert difference["sign_changes"] == 1 and difference["mcnemar"] == {"only_first": 0, "only_second": 0, "p": 1.0}


def test_a_worse_classifier_is_told_from_a_better_one(trained_classifier, tmp_path, capsys, monkeypatch) -> None:
    other = worse(trained_classifier, tmp_path / "other", 0.8)
    text, found = compared(capsys, trained_classifier, other / "best", "-o", tmp_path / "out")
    for said in ("--lr", "best at step", "images/s", "2 × ", "+    torch.numel(torch.ones(1))", "larger than noise"):
        assert said in text, text
    assert "a comment" not in text and "--opt" not in text
    (difference,) = found["differences"]
    recorded = PastRun(trained_classifier).results["top1"]
    assert difference["results"][0] == pytest.approx(recorded, abs=1e-12) and difference["results"][1] < recorded - 0.05
    assert difference["interval"][0] < difference["difference"] < difference["interval"][1] < 0
    only = difference["mcnemar"]
    assert (only["only_second"] - only["only_first"]) / 359 == pytest.approx(difference["difference"], abs=1e-12)

    # The predictions are kept: of the same models, nothing is evaluated again.
    monkeypatch.setattr(evaluation, "_classify", lambda *_: pytest.fail("evaluated again"))
    again, same = compared(capsys, trained_classifier, other, "-o", tmp_path / "out")
    assert same == found and again.replace(str(other / "best"), str(other)) == text.replace(
        str(other / "best"), str(other)
    )


def test_a_worse_detector_is_told_from_a_better_one(trained_detector, tmp_path, capsys) -> None:
    other = worse(trained_detector, tmp_path / "other", 0.3)
    text, found = compared(
        capsys, trained_detector, other, trained_detector, "-o", tmp_path / "out", "--resamples", 200
    )
    assert "AP on digits: fixed scenes" in text and "McNemar" not in text and "larger than noise" in text
    changed, same = found["differences"]
    recorded = PastRun(trained_detector).results["AP"]
    assert changed["results"][0] == pytest.approx(recorded, abs=1e-9) and changed["results"][1] < recorded - 0.02
    assert changed["interval"][1] < 0 and changed["sign_changes"] == 0
    assert same["difference"] == 0 and not same["larger_than_noise"]


def test_on_two_ranks_the_numbers_are_the_same_and_a_refusal_is_said_once(
    launch, trained_classifier, tmp_path, capsys
) -> None:
    other = worse(trained_classifier, tmp_path / "other", 0.8)
    words = [trained_classifier, other, "-o", tmp_path / "two", "--workers", 1]
    done = launch("multi_cpu", "-m", "tools.compare", *words)
    assert done.returncode == 0, done.stderr
    _, alone = compared(capsys, trained_classifier, other, "-o", tmp_path / "one")
    assert json.loads((tmp_path / "two" / "comparison.json").read_text()) == alone
    assert done.stdout.count("is it more than noise?") == 1
    refused = launch("multi_cpu", "-m", "tools.compare", trained_classifier)
    assert refused.returncode == 2
    assert refused.stderr.count("name at least two runs to compare") == 1


def test_what_folders_record_needs_no_model(trained_classifier, tmp_path, capsys) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "log.txt"):
        shutil.copy(trained_classifier / name, killed)
    text, found = compared(capsys, trained_classifier, killed, "--recorded", "-o", tmp_path / "out")
    assert "recipe source, cls and killed: not recorded by both" in text and "noise" not in text
    whole, from_rows = found["runs"]
    assert whole["best"] == from_rows["best"] and whole["best"]["step"] > 0
    assert "differences" not in found


def test_what_can_not_be_compared_is_refused_by_name(trained_classifier, trained_detector, tmp_path, capsys) -> None:
    def refused(*words: object) -> str:
        with pytest.raises(Refused) as refusal:
            main([*map(str, words)])
        return str(refusal.value)

    other = tmp_path / "other"
    shutil.copytree(trained_classifier, other, ignore=shutil.ignore_patterns("wandb", "checkpoints"))
    run = json.loads((other / "best" / "run.json").read_text())
    log = (other / "log.txt").read_text()
    (other / "log.txt").write_text(log.replace("-84c9b91d5f0b", "-000000000000"))
    text = refused(trained_classifier, other, "-o", tmp_path / "out")
    assert f"{trained_classifier} and {other}: were evaluated on different images or labels" in text
    assert "84c9b91d5f0b of digits" in text and "000000000000 of digits" in text and "--data" in text

    (other / "log.txt").write_text("")  # now only the data themselves tell
    folder = tmp_path / "images"
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images[:60], digits.target[:60], strict=True)):
        from PIL import Image

        place = folder / ("train" if number < 40 else "val") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(place / f"{number}.png")
    run["config"]["data"] = str(folder)
    (other / "best" / "run.json").write_text(json.dumps(run))
    text = refused(trained_classifier, other, "--workers", 0)
    assert f"{trained_classifier} and {other}: would be evaluated on different images or labels (digits: " in text
    assert f"{folder}: val/, 20 images" in text
    assert "a classifier and a detector" in refused(trained_classifier, trained_detector, "--data", "digits")
    assert "name at least two runs" in refused(trained_classifier)
    assert f"{tmp_path}: is no run folder" in refused(trained_classifier, tmp_path)
    assert "--resamples 5: at least 100" in refused(trained_classifier, other, "--resamples", 5)
    assert "--recorded evaluates nothing" in refused(trained_classifier, other, "--recorded", "--workers", 1)
    assert "unknown flag --wrokers" in refused(trained_classifier, other, "--data", "digits", "--wrokers", 1)
    assert not (tmp_path / "out").exists()
