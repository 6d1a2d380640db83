"""`--eval_only` leaves a report: its numbers are those of the run and of any layout, each part of the data has its own.

A folder of checkpoints stands for the mean of their weights.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file, save_file

from common.errors import Refused
from tests.harness.drawings import draw_stripes
from tests.harness.forked import Ended
from tools.trained import load


def read(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def printed(ended: Ended) -> dict:
    assert ended.code == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def refusal(ended: Ended) -> str:
    assert ended.code == 2 and ended.stderr.count("\n") == 1, ended
    return ended.stderr


@pytest.fixture(scope="module")
def run(trained_classifier, tmp_path_factory) -> Path:
    """A run of digits with two checkpoints, whose reports may be written into its folder."""
    return shutil.copytree(trained_classifier, tmp_path_factory.mktemp("judge") / "run")


@pytest.fixture(scope="module")
def reported(run, launch) -> Path:
    """The report that two ranks with data workers leave, launched as a user would."""
    done = launch("multi_cpu", "recipes/cls.py", "--eval_only", run / "best")
    assert done.returncode == 0, done.stderr
    assert f"report: {run}/evaluation/best-held_out\n" in done.stdout
    return shutil.copytree(run / "evaluation/best-held_out", run.parent / "report of two ranks")


def test_a_report_has_the_numbers_of_the_run_and_of_any_layout(run, reported, forks) -> None:
    report, best = read(reported), read(run / "best")
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
    assert evaluated["step"] == json.loads((run / "best/run.json").read_text())["step"]

    alone = printed(forks("--eval_only", run / "best", "--workers", 0))
    again = read(run / "evaluation/best-held_out")
    assert again.pop("loss") == pytest.approx(report.pop("loss"), rel=1e-6)
    assert again == report and alone["thresholds"] == report["thresholds"]
    assert not (run / "evaluation/best-held_out/pictures").exists(), "the old report's pictures are gone with it"


def test_a_report_has_pictures_and_so_has_a_run(run, reported) -> None:
    assert {path.name for path in reported.iterdir()} == {"results.json", "pictures"}
    drawn = {path.name for path in (reported / "pictures").iterdir()}
    assert drawn == {"confusion.png", "mistakes.png", "reliability.png"}
    assert drawn < {path.name for path in (run / "pictures").iterdir()}
    for path in (reported / "pictures/reliability.png", run / "pictures/reliability.png"):
        pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
        assert min(pixels.shape[:2]) > 700
        assert all((np.abs(pixels - colour).sum(2) < 12).any() for colour in ((0, 114, 178), (213, 94, 0)))


def test_the_mean_of_checkpoints_is_evaluated_and_loaded_by_tools(run, forks, capsys) -> None:
    steps = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(steps) == 2
    ended = forks("--eval_only", run / "checkpoints", "--workers", 0)
    wanted = f"the mean of the weights of steps {', '.join(str(int(step[5:])) for step in steps)}"
    assert f"evaluating {run}/checkpoints of the run cls, {wanted}\n" in ended.stdout
    of_mean, of_last = printed(ended), printed(forks("--eval_only", run / "checkpoints" / steps[1], "--workers", 0))
    assert 0.9 < of_mean["top1"] and of_mean["loss"] != of_last["loss"]
    assert read(run / "evaluation/checkpoints-held_out")["evaluated"]["mean_of_steps"] == [
        int(step[5:]) for step in steps
    ]
    assert read(run / f"evaluation/{steps[1]}-held_out")["evaluated"]["mean_of_steps"] is None

    trained = load(str(run / "checkpoints"), ["--workers", "0"])
    assert capsys.readouterr().err == f"{run}/checkpoints: {wanted}\n"
    _, data = trained.recipe.build_data(trained.config, trained.origin)
    model = trained.build(data, Accelerator(cpu=True).device)[0].state_dict()
    one, other = (load_file(run / "checkpoints" / step / "model.safetensors") for step in steps)
    assert model.keys() == one.keys() == other.keys()
    for name, tensor in model.items():
        both = one[name].double(), other[name].double()
        is_number = tensor.is_floating_point()
        torch.testing.assert_close(tensor, ((both[0] + both[1]) / 2).to(tensor.dtype) if is_number else other[name])
        assert is_number or not torch.equal(one[name], other[name]), "buffers worth comparing"


def test_checkpoints_without_a_mean_are_refused(run, forks, tmp_path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(run / "checkpoints", folder)
    shutil.copy(run / "config.yaml", folder.parent)
    first, last = sorted(folder.iterdir())
    manifest = json.loads((first / "manifest.json").read_text())
    tensors = load_file(first / "model.safetensors")
    name = next(name for name in tensors if tensors[name].ndim == 4)
    (first / "manifest.json").unlink()
    assert "no manifest.json is in it" in refusal(forks("--eval_only", folder, "--workers", 0))
    save_file(tensors | {name: tensors[name][:1]}, first / "model.safetensors")
    from common.checkpoints.store import stamps

    (first / "manifest.json").write_text(json.dumps(stamps(first)))
    assert manifest.keys() == stamps(first).keys() - {"manifest.json"}
    word = refusal(forks("--eval_only", folder, "--workers", 0))
    assert f"{last}: {name} is not as in {first.name}, so they have no mean" in word
    shutil.rmtree(first)
    assert f"has one checkpoint, and a mean needs two or more; name {last}, or train" in refusal(
        forks("--eval_only", folder)
    )
    with pytest.raises(Refused, match="keep_checkpoints"):
        load(str(folder))


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """Images of five classes in train/, val/ and test/."""
    root = tmp_path_factory.mktemp("parts")
    for seed, part in enumerate(("train", "val", "test")):
        draw_stripes(root / part, (16, 14, 12, 10, 8), seed=seed)
    return root


def test_each_part_of_the_data_and_each_setting_has_a_report_of_its_own(parts, forks, tmp_path) -> None:
    common = f"--output_dir {tmp_path}/runs --tracker none --workers 0".split()
    words = f"--data {parts} --model test_vit --image_size 32 --max_steps 4 --lr 1e-3 --name folders".split()
    assert forks(*words, *common).code == 0
    run = tmp_path / "runs" / "folders"
    assert "test" not in (run / "metrics.jsonl").read_text() and not (run / "evaluation").exists()
    seen = {}
    for name, flags in (("best-val", ""), ("best-test", "--split test"), ("best-val-", "--image_size 64")):
        results = printed(forks("--eval_only", run / "best", "--workers", 0, *flags.split()))
        (folder,) = set((run / "evaluation").iterdir()) - set(seen)
        seen[folder] = (folder / "results.json").read_bytes()
        assert folder.name.startswith(name) and read(folder)["top1"] == results["top1"]
        assert read(folder)["evaluated"]["part"] == ("test/" if "test" in name else "val/")
        assert read(folder)["evaluated"]["config"]["image_size"] == (64 if "64" in flags else 32)
    assert all((folder / "results.json").read_bytes() == content for folder, content in seen.items())
    assert len({*seen.values()}) == 3

    shutil.copytree(run / "best", tmp_path / "model")
    ended = forks("--eval_only", tmp_path / "model", "--output_dir", tmp_path / "here", "--workers", 0)
    (folder,) = (tmp_path / "here/evaluation").iterdir()
    assert printed(ended)["top1"] == read(folder)["top1"] and folder.name.startswith("model-val-")
    assert f"report: {folder}\n" in ended.stdout and len([*(tmp_path / "model").iterdir()]) == 4
    word = refusal(forks("--eval_only", tmp_path / "model", "--output_dir", "/proc/here", "--workers", 0))
    assert "/proc/here/evaluation can't be written (" in word and "name another --output_dir" in word
    dry = forks("--eval_only", tmp_path / "model", "--output_dir", tmp_path / "dry", "--workers", 0, "--dry_run")
    assert printed(dry)["top1"] == read(folder)["top1"] and not (tmp_path / "dry").exists()


def test_a_test_part_of_tables_and_of_boxes_is_evaluated_by_name(parts, scenes, forks, tmp_path) -> None:
    rows = [
        f"{path},{path.parent.name},{part}"
        for part in ("train", "val", "test")
        for path in (parts / part).rglob("*.png")
    ]
    (tmp_path / "table.csv").write_text("image,label,split\n" + "\n".join(rows) + "\n")
    boxes = shutil.copytree(scenes, tmp_path / "scenes")
    (boxes / "test.json").write_text(json.dumps(part_of(json.loads((boxes / "val.json").read_text()), 4)))
    small = "--short_sides 64 --long_side 96 --levels 3-5 --width 32 --convolutions 1 --model test_convnext"
    common = f"--output_dir {tmp_path}/runs --tracker none --workers 0 --max_steps 2".split()
    for recipe, data, flags, count in (
        ("cls", tmp_path / "table.csv", "--model test_vit --image_size 32", 60),
        ("det", boxes, small, 4),
    ):
        ended = forks("--data", data, *flags.split(), "--name", recipe, *common, recipe=recipe)
        assert ended.code == 0 and "for --split test\n" in ended.stdout, ended.stderr
        run = tmp_path / "runs" / recipe
        for part in ("val", "test"):
            ended = forks("--eval_only", run / "best", "--split", part, "--workers", 0, recipe=recipe)
            report = read(run / "evaluation" / f"best-{part}")
            assert printed(ended)["count"] == report["evaluated"]["images"] == report["count"]
            assert part in report["evaluated"]["part"] and f"{part}" in ended.stdout.splitlines()[1]
        assert report["count"] == count


def part_of(annotations: dict, count: int) -> dict:
    """The first `count` images of annotations in COCO's format."""
    kept = {image["id"] for image in annotations["images"][:count]}
    return annotations | {
        "images": annotations["images"][:count],
        "annotations": [row for row in annotations["annotations"] if row["image_id"] in kept],
    }
