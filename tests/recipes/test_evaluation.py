"""An evaluation counts every image once on any layout; `--eval_only` gives what the run recorded,
or says what it evaluates.

Each command is typed as a user would: the folder, and the one flag that the test is about.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import timm
from safetensors.torch import load_file

from common.training import timm_models
from tests.harness.drawings import draw_stripes, save_colours
from tests.harness.forked import Ended, Forks
from tests.harness.outcomes import Outcome
from tests.harness.runs import read, read_rows

PARTS = "--data {root}/parts --model test_vit --max_steps 4 --lr 1e-3"
STUFFS = [f"stuff_{number}" for number in range(5)]


def read_results(ended: Ended | Outcome) -> tuple[dict, str]:
    """The results that an evaluation prints, and the lines before them."""
    assert ended.stdout, ended
    lines = ended.stdout.splitlines()
    return json.loads(lines[-1]), "\n".join(lines[:-1])


@pytest.fixture(scope="module")
def evaluate(forks):
    """`evaluate(weights, flags)` -> the results, and the lines before them."""

    def run(weights: Path, flags: list = (), **options) -> tuple[dict, str]:
        return read_results(forks(["--eval_only", weights] + list(flags), **options))

    return run


def read_refusal(ended: Ended) -> str:
    assert ended.code == 2 and ended.stderr.count("\n") == 1, ended
    return ended.stderr.strip()


def read_recorded(best: Path) -> dict:
    """The results that the run recorded for the weights that it exports; not the `raw_...` ones,
    nor details of classes.
    """
    results = read(best / "results.json")
    details = ("classes", "calibration", "threshold")
    return {
        key: results[key] for key in results if not key.startswith("raw_") and key not in details
    }


def assert_same(actual: dict, expected: dict) -> None:
    """The same numbers: a loss but for the order of its sum."""
    actual = {key: value for key, value in actual.items() if key != "eval_only"}
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if key in ("loss", "ece"):
            value = pytest.approx(value, rel=1e-6)
        assert actual[key] == value, key


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Folders: flat, with three parts, with classes in another order, and with fewer."""
    root = tmp_path_factory.mktemp("eval_only")
    draw_stripes(root / "flat", (20, 16, 14, 12, 10))
    for seed, part in enumerate(("train", "val", "test")):
        draw_stripes(root / "parts" / part, (16, 14, 12, 10, 8), seed=seed)
    for number, name in enumerate(STUFFS):
        shutil.copytree(root / "flat" / name, root / "renamed" / f"{9 - number} {name}")
    for number in (3, 1):
        shutil.copytree(root / "flat" / STUFFS[number], root / "some" / STUFFS[number])
    return root


@pytest.fixture(scope="module")
def train(forks: Forks, root: Path):
    """Train a run of this name in `root`, once."""

    def run(name: str, flags: str, recipe: str = "cls") -> Path:
        if not (root / "runs" / name).exists():
            common = f"--name {name} --output_dir {root}/runs"
            ended = forks(flags.split() + common.split(), recipe=recipe)
            assert ended.code == 0, ended.stderr
        return root / "runs" / name

    return run


@pytest.fixture(scope="module")
def odd(train, root: Path) -> Path:
    """A run of which nothing is as the flags have it by default."""
    return train(
        "odd",
        f"--data {root}/flat --model test_vit --image_size 48 --crop_pct 0.7 --val_share 0.3 "
        "--seed 5 --max_steps 6 --eval_every 3 --checkpoint_every 3 --lr 2e-4 --ema_decay 0.5 "
        "--max_micro_batch_size 32",
    )


@pytest.fixture(scope="module")
def labels(train, root: Path) -> Path:
    """A run of images with several labels, or none."""
    save_colours(root / "labels")
    flags = "--model test_vit --lr 2e-3 --loss bce --max_steps 15 --mixup 0.2 --ema_decay 0.7"
    return train("of_labels", f"--data {root}/labels {flags}")


@pytest.mark.smoke
def test_an_exported_model_has_the_numbers_of_its_run_anywhere(odd, evaluate, tmp_path) -> None:
    shutil.copytree(odd / "best", tmp_path / "model")
    for weights, best in (
        (odd / "best", odd / "best"),
        (tmp_path / "model", tmp_path / "model"),
        (odd, odd / "best"),
    ):
        results, lines = evaluate(weights)
        assert_same(results, read_recorded(best))
        assert 0 < results["top1"] < 1, "numbers worth comparing"
        assert (
            f"evaluating {best} of the run odd, step " in lines and "where the run had" not in lines
        )
        assert "30 % held out of the folder, 22 images of 5 classes, those of the model" in lines
    of_run = read(odd / "best/run.json")
    assert (of_run["name"], of_run["recipe"], of_run["config"]["image_size"]) == ("odd", "cls", 48)
    assert of_run["step"] in (3, 6) and of_run["commit"] == read(odd / "environment.json")["commit"]
    assert list(read_recorded(best)["per_class"]) == STUFFS
    details = read(best / "results.json")["classes"]
    assert {name: row["recall"] for name, row in details.items()} == read_recorded(best)[
        "per_class"
    ]
    assert sum(row["images"] for row in details.values()) == 22
    results, lines = evaluate(odd / "checkpoints/step_00000003")
    row = read_rows(odd / "metrics.jsonl")[0]
    assert results["loss"] == pytest.approx(row["eval/ema_loss"], rel=1e-6) != row["eval/loss"]
    assert "of the run odd, step 3" in lines


# What is evaluated: images.
WEIGHTS = {"best": 22, "checkpoint": 22, "fewer images than processes": 2, "labels": 23}


@pytest.fixture(scope="module")
def commands(odd, labels, root) -> dict[str, list]:
    for name in ("stuff_1", "stuff_3"):
        (root / "tiny" / name).mkdir(parents=True)
        shutil.copy(root / "flat" / name / "0.png", root / "tiny" / name)
    return {
        "best": [odd / "best", "--max_micro_batch_size", 7],
        "checkpoint": [odd / "checkpoints/step_00000003"],
        "fewer images than processes": [odd / "best", "--data", root / "tiny"],
        "labels": [labels / "best"],
    }


@pytest.fixture(scope="module")
def on_two(run_several, commands) -> dict[str, Outcome]:
    """The evaluations of `commands` on two processes."""
    return run_several(2, {name: ["--eval_only"] + args for name, args in commands.items()})


@pytest.mark.parametrize("name", WEIGHTS)
def test_two_processes_count_every_image_once(name, on_two, commands, evaluate) -> None:
    command = commands[name]
    expected, _ = evaluate(command[0], command[1:])
    expected.pop("eval_only")
    assert_same(read_results(on_two[name])[0], expected)
    assert expected["count"] == WEIGHTS[name] and not on_two[name].folder.exists()


def test_averaged_weights_are_evaluated_and_choose_the_best(odd, train, root) -> None:
    parts = train("parts", PARTS.format(root=root))
    row, without = (read_rows(run / "metrics.jsonl")[-1] for run in (odd, parts))
    assert {f"eval/{key}" for key in ("ema_loss", "ema_top1", "loss", "top1")} <= row.keys()
    assert row["eval/loss"] != row["eval/ema_loss"] and not any("ema" in key for key in without)
    leading = [read(run / "summary.json")["leading"] for run in (odd, parts)]
    assert leading == ["eval/ema_top1", "eval/top1"], "the result of the weights that are exported"


def test_images_of_several_labels_are_learnt_and_judged_by_f1(
    labels, root, forks, evaluate
) -> None:
    results, _ = evaluate(labels / "best")
    assert_same(results, read_recorded(labels / "best"))
    assert results["f1"] > 0.9 > results["loss"]
    assert len(results["per_class"]) == 3 and "top1" not in results
    assert "--loss bce" in read_refusal(forks(["--data", root / "labels", "--max_steps", 2]))


def test_what_a_flag_or_a_preset_overrides_is_said_and_used(odd, forks, tmp_path, evaluate) -> None:
    plain, _ = evaluate(odd / "best")
    preset = tmp_path / "preset.yaml"
    preset.write_text("crop_pct: 1.0\nimage_size: 32\n")
    args = ["--config", preset, "--eval_only", odd / "best"]
    args += ["--image_size", 64, "--max_micro_batch_size", 7]
    results, lines = read_results(forks(args))
    assert "; --image_size 64, where the run had 48; --crop_pct 1.0, where the run had 0.7" in lines
    assert results["loss"] != plain["loss"]
    message = read_refusal(forks(["--eval_only", odd / "best", "--model", "test_resnet"]))
    assert message == (
        f"cls.py: --model test_resnet: {odd}/best brings its own model, test_vit; leave --model out"
    )


def test_a_split_is_evaluated_by_its_name_and_a_new_folder_whole(
    odd, train, root, evaluate
) -> None:
    run = train("parts", PARTS.format(root=root))
    for flags, part in (
        ([], "val/, 60"),
        (["--split", "test"], "test/, 60"),
        (["--split", "train"], "train/, 60"),
    ):
        results, lines = evaluate(run / "best", flags)
        assert f"{root}/parts: {part} images of 5 classes, those of the model" in lines
        assert results["count"] == 60 and list(results["per_class"]) == STUFFS
    results, lines = evaluate(odd / "best", ["--data", root / "parts/test"])
    assert (
        results["count"] == 60
        and f"--data {root}/parts/test, where the run had {root}/flat" in lines
    )
    assert "the folder, 60 images" in lines and "val_share" not in lines


def test_classes_are_matched_by_name_in_any_order_and_number(odd, root, evaluate) -> None:
    everything, _ = evaluate(odd / "best", ["--split", "all"])
    best = root / "renamed best"
    shutil.copytree(odd / "best", best)
    content = read(best / "config.json")
    content["label_names"] = [
        f"{9 - number} {name}"  # sorted the other way round
        for number, name in enumerate(STUFFS)
    ]
    (best / "config.json").write_text(json.dumps(content))
    results, lines = evaluate(best, ["--data", root / "renamed"])
    assert "5 classes, those of the model, which has them in another order" in lines
    assert list(results["per_class"].values()) == list(everything["per_class"].values())[::-1]
    assert list(results["per_class"]) == sorted(content["label_names"])
    assert [results[key] for key in ("top1", "top5", "count")] == [
        everything[key] for key in ("top1", "top5", "count")
    ]
    assert results["loss"] == pytest.approx(everything["loss"], rel=1e-6)

    accuracies = everything["per_class"]
    best = max(accuracies, key=accuracies.get)
    worst = min(accuracies, key=accuracies.get)
    for name in (best, worst):
        shutil.copytree(root / "flat" / name, root / "two" / name)
    results, lines = evaluate(odd / "best", ["--data", root / "two"])
    assert "2 classes, of the 5 that the model knows" in lines
    assert results["per_class"] == {name: accuracies[name] for name in sorted((best, worst))}
    assert results["top1"] < 1, "what is taken for a class that the data do not have is wrong"


def test_a_model_without_class_names_has_the_order_of_the_data(
    odd, root, forks, tmp_path, evaluate
) -> None:
    model = timm.create_model("test_resnet", num_classes=5)
    folder = tmp_path / "timm"
    timm_models.export_classifier(
        model, STUFFS, timm_models.resolve_data_config(model, 64, 0.9), False, {}, folder
    )
    content = read(folder / "config.json")
    del content["label_names"]
    (folder / "config.json").write_text(json.dumps(content))
    assert read_refusal(forks(["--eval_only", folder])).endswith(
        "does not say which data it was trained on; add --data"
    )
    results, lines = evaluate(folder, ["--data", root / "flat"])
    assert (
        "72 images of 5 classes, taken to be the model's, which have no names, in this order"
        in lines
    )
    assert results["count"] == 72 and f"{folder}, which names no run\n" in lines
    message = read_refusal(forks(["--eval_only", folder, "--data", root / "some"]))
    assert f"{folder} has 5 classes without names, --data {root}/some has 2" in message


def test_what_is_no_weights_is_refused_before_anything_is_read(odd, forks, tmp_path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(odd / "best", bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert "has no weights (model.safetensors); copy the whole folder" in read_refusal(
        forks(["--eval_only", bare])
    )
    torn = tmp_path / "torn"
    shutil.copytree(odd / "best", torn)
    (torn / "run.json").write_text('{"name": "x"}')
    assert f"--eval_only {torn} is incomplete (" in read_refusal(forks(["--eval_only", torn]))
    message = read_refusal(forks(["--eval_only", odd / "best"], recipe="det"))
    assert f"--eval_only {odd}/best: its run has flags that det.py does not know (--" in message
    assert message.endswith("; evaluate it with the recipe that trained it, cls")


DET = (
    "--short_sides 96 --long_side 112 --eval_short_side 128 --levels 3-5 --width 32 "
    "--convolutions 1 --model test_convnext"
)


def test_a_detector_has_the_numbers_of_its_run(
    train, scenes, root, forks, run_several, evaluate
) -> None:
    args = (
        "--opt muon --lr 5e-3 --max_steps 30 --eval_every 30 --ema_decay 0.5 "
        "--max_micro_batch_size 3"
    )
    run = train("detector", f"--data {scenes} {DET} {args}", recipe="det")
    expected = read_recorded(run / "best")
    assert expected["AP"] > 0, "numbers worth comparing"
    for weights in (run / "best", run / "checkpoints/step_00000030"):
        results, lines = evaluate(weights, recipe="det")
        assert_same(results, expected)
        assert (
            f"evaluating {weights} of the run detector, step 30\n{scenes}: val.json, 7 images of 10 classes"
            in lines
        )
        resized, lines = evaluate(weights, ["--eval_short_side", 64], recipe="det")
        assert (
            "; --eval_short_side 64, where the run had 128" in lines
            and resized["AP"] != expected["AP"]
        )
    two = run_several(2, {"two": ["recipes/det.py", "--eval_only", run / "best"]})["two"]
    assert_same(read_results(two)[0], expected)
    common = f"--max_steps 1 --dry_run --output_dir {root}/nothing".split()
    argv = ["--data", scenes, "--init", run / "best"] + DET.split() + common
    ended = forks(argv, recipe="det")
    assert ended.code == 0, ended.stderr
    everything = len(load_file(run / "best/model.safetensors"))
    assert re.search(
        rf"begins with +{everything} of {everything} tensors of {run}/best\n", ended.stdout
    )
