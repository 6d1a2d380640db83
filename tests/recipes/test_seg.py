"""A run of recipes/seg.py: its files, its exported model on other data, and images that can't be read."""

import csv
import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from common.segmentation.sources import Spec, load
from tests.harness.outcomes import Outcome

FLAGS = (
    "--model test_resnet --width 32 --crop_size 64 --batch_norm group --global_batch_size 8 --max_steps "
    "12 --eval_every 12 --log_every 1 --lr 5e-3 --ema_decay 0.5"
).split()
# The classes of `regions` under other ids, one of them unknown.
NEW_IDS = np.arange(256)
NEW_IDS[[0, 1, 2]] = 1, 255, 0


@pytest.fixture(scope="module")
def trained(forks, regions, tmp_path_factory) -> Outcome:
    """A run whose data has an image in each split that can't be read."""
    folder = tmp_path_factory.mktemp("seg")
    data = shutil.copytree(regions, folder / "data")
    for split in ("train", "val"):
        (data / "images" / split / "1.jpg").write_bytes(b"no image")
    args = ["--data", data] + FLAGS + ["--output_dir", folder / "runs", "--name", "a"]
    ended = forks(args + ["--max_broken_share", 0.5], recipe="seg", pictures=True)
    assert ended.code == 0, ended
    return Outcome(stdout=ended.stdout, folder=folder / "runs/a")


def evaluate(forks, run: Outcome, flags: list | tuple = ()) -> tuple[dict, str]:
    """The line of results of --eval_only, and the lines before it."""
    argv = ["--eval_only", run.folder, "--workers", 1] + list(flags)
    ended = forks(argv, recipe="seg")
    assert ended.code == 0, ended
    lines = ended.stdout.strip().splitlines()
    return json.loads(lines[-1]), "\n".join(lines[:-1])


def test_a_run_leaves_its_pictures_predictions_and_results(trained) -> None:
    names = {path.stem for path in (trained.folder / "pictures").iterdir()}
    assert names == {"confusion", "curves", "first_batch", "predictions", "worst"}
    assert "could not be" not in (trained.folder / "report.html").read_text()
    assert "crops of 3 x 64 x 64; evaluated: whole images, short side as it is" in trained.stdout
    last = trained.rows[-1]
    content = json.loads((trained.folder / "best/results.json").read_text())
    assert content["mIoU"] == last["eval/ema_mIoU"] > 0.4
    shares = [content["per_class"][name] for name in ("ground", "leaf", "sky")]
    assert content["mIoU"] == np.mean(shares)
    assert content["IoU_class/leaf"] == shares[1] == last["eval/ema_IoU_class/leaf"]
    right = sum(row["right"] for row in content["pixels"].values())
    labelled = sum(row["pixels"] for row in content["pixels"].values())
    assert content["pixel_accuracy"] == right / labelled


def test_each_image_has_a_row_and_an_unreadable_one_is_wrong(trained) -> None:
    rows = list(csv.DictReader((trained.folder / "best/predictions.csv").open()))
    assert len(rows) == 7
    content = json.loads((trained.folder / "best/results.json").read_text())
    num_labelled = np.array([int(row["labelled_pixels"]) for row in rows])
    accuracies = np.array([float(row["pixel_accuracy"] or 0) for row in rows])
    total = (accuracies * num_labelled).sum() / num_labelled.sum()
    assert total == pytest.approx(content["pixel_accuracy"], abs=1e-6)
    unreadable = next(row for row in rows if Path(row["path"]).name == "1.jpg")
    assert float(unreadable["pixel_accuracy"]) == 0
    assert unreadable["loss"] == ""
    assert int(unreadable["labelled_pixels"]) > 0
    without_label = next(row for row in rows if Path(row["path"]).stem == "5")
    assert (without_label["pixel_accuracy"], without_label["labelled_pixels"]) == ("", "0")
    assert "tools.audit" not in trained.stdout, "which does not take it"
    assert "counts as wrong: " in trained.stdout and "val/1.jpg" in trained.stdout
    is_read = np.array([row["loss"] != "" for row in rows])
    losses = np.array([float(row["loss"] or 0) for row in rows])
    mean = (losses * num_labelled).sum() / num_labelled[is_read].sum()
    assert mean == pytest.approx(content["loss"], rel=1e-5)


def test_best_and_checkpoint_give_what_the_run_measured(trained, forks) -> None:
    best = json.loads((trained.folder / "best/results.json").read_text())
    checkpoint = Outcome(folder=trained.checkpoint)
    for run in (trained, checkpoint):
        results, text = evaluate(forks, run)
        for key in ("mIoU", "pixel_accuracy", "mean_class_accuracy", "loss", "count"):
            assert results[key] == best[key], (run.folder, key)
        assert "images/val, 7 images of 3 classes, those of the model" in text


def test_other_data_are_matched_by_the_names_of_their_classes(trained, forks, tmp_path) -> None:
    """A class that the data do not have can still be predicted, which is an error."""
    data = shutil.copytree(trained.folder.parents[1] / "data", tmp_path / "data")
    (data / "classes.txt").write_text("sky\nground\n")
    for file in (data / "masks").rglob("*.png"):
        ids = NEW_IDS[np.asarray(Image.open(file))]
        Image.fromarray(ids.astype(np.uint8)).save(file)
    results, text = evaluate(forks, trained, ["--data", data])
    assert "7 images of 2 classes, of the 3 that the model knows" in text
    assert list(results["per_class"]) == ["sky", "ground"]
    best = json.loads((trained.folder / "best/results.json").read_text())
    [file] = (trained.folder / "evaluation").glob("best-val-*/results.json")
    report = json.loads(file.read_text())
    for name in ("sky", "ground"):  # the same pixels, in another place
        assert report["pixels"][name] == best["pixels"][name]
    (data / "classes.txt").write_text("sky\nwater\n")
    args = ("--eval_only", trained.folder, "--data", data)
    ended = forks(args, recipe="seg")
    assert ended.code == 2 and "does not know 1 of the 2 classes" in ended.stderr


def test_a_table_trains_as_the_same_files_in_folders(run_several, regions, tmp_path) -> None:
    """On two ranks, from pictures in a saved data set and from paths in a CSV file."""
    train, val = load(Spec(str(regions), seed=0, val_share=0.2))
    splits = {}
    rows = ["image,mask,split"]
    for name, source in (("train", train), ("val", val)):
        images = [source.get_content(index) for index in range(len(source))]
        masks = [source.masks.get_content(index) for index in range(len(source))]
        table = datasets.Dataset.from_dict({"image": images, "mask": masks})
        for column in ("image", "mask"):
            table = table.cast_column(column, datasets.Image())
        splits[name] = table
        rows += [f"{image},{mask},{name}" for image, mask in zip(images, masks, strict=True)]
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    (tmp_path / "a.csv").write_text("\n".join(rows))
    names = ["--class_names", regions / "classes.txt"]
    cases = {
        "folder": ["--data", regions],
        "saved": ["--data", tmp_path / "saved", *names],
        "csv": ["--data", tmp_path / "a.csv", *names],
    }
    cases = {name: [*words, *FLAGS, "--max_steps", 4] for name, words in cases.items()}
    outcomes = run_several(2, cases, recipe="recipes/seg.py")
    folder = outcomes.pop("folder")
    for outcome in outcomes.values():
        for key in ("train/loss", "train/grad_norm", "eval/mIoU", "eval/loss"):
            assert len(folder.column(key))
            assert outcome.column(key).tolist() == folder.column(key).tolist(), key
    predictions = [o.folder / "best/predictions.csv" for o in (folder, outcomes["csv"])]
    assert predictions[0].read_text() == predictions[1].read_text()


def test_outlines_of_an_unreadable_image_count_as_wrong(forks, scenes, tmp_path) -> None:
    data = shutil.copytree(scenes, tmp_path / "data")
    file = data / "val/1.png"
    file.write_bytes(file.read_bytes()[:2000])
    args = ["--data", data] + FLAGS + ["--max_steps", 2, "--output_dir", tmp_path, "--name", "a"]
    ended = forks(args, recipe="seg")
    assert ended.code == 0, ended
    assert "counts as wrong: " in ended.stdout and "val/1.png" in ended.stdout
    rows = list(csv.DictReader((tmp_path / "a/best/predictions.csv").open()))
    row = next(row for row in rows if Path(row["path"]) == file)
    width, height = Image.open(scenes / "val/1.png").size
    assert (float(row["pixel_accuracy"]), row["loss"]) == (0, "")
    assert int(row["labelled_pixels"]) == width * height


def test_classes_without_a_pixel_are_named_once(forks, regions, tmp_path) -> None:
    data = shutil.copytree(regions, tmp_path / "data")
    unused = [f"unused {i}" for i in range(7)]
    (data / "classes.txt").write_text("\n".join(["ground", "leaf", "sky", *unused]))
    args = ["--data", data] + FLAGS + ["--eval_every", 6, "--output_dir", tmp_path, "--name", "a"]
    ended = forks(args, recipe="seg")
    assert ended.code == 0, ended
    line = (
        "7 of 10 classes have no labelled pixel in the images to evaluate on, and are left out of "
        f"mIoU: {', '.join(unused[:5])}, ..."
    )
    assert ended.stdout.count(line) == 1
    assert line in evaluate(forks, Outcome(folder=tmp_path / "a"))[1]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--crop_size 50", "--crop_size 50: must be a multiple of 32, the stride of the model's"),
        ("--min_scale 3", "--min_scale 3: is larger than --max_scale 2"),
        (
            "--data digits --ignore_zero",
            "--ignore_zero: is for files of masks, where 0 can mean no",
        ),
        ("--decoder linear --model no_such", "--model no_such: not a model of timm"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(
    flags, message, forks, regions, tmp_path
) -> None:
    args = ["--data", regions] + FLAGS + ["--output_dir", tmp_path] + flags.split()
    ended = forks(args, recipe="seg")
    assert ended.code == 2 and ended.stderr.startswith(f"seg.py: {message}"), ended
    assert len(ended.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
