"""Predict gives what the evaluation measured: the same top-1, image by image, and the same AP; on
any number of processes.

Every image is a row, once, in the order given, also one that can't be read. Files are complete or absent.
"""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask

from common.errors import Refused
from common.launching import launch as launching
from tests.harness.drawings import draw_picture, save_colours
from tests.harness.launching import ROOT, inherit_environment
from tests.harness.runs import catch_refusal, read, read_rows, start_tool
from tests.harness.shards import list_class_images, write_parquet, write_tars
from tests.tools.calls import call_tool
from tools.predict.__main__ import main
from tools.predict.images import build_file_list, build_images
from tools.predict.listing import list_images
from tools.predict.output import Output
from tools.predict.plan import choose_thresholds
from tools.predict.rows import Format, RowBuilder
from tools.trained import load

PAGE = (ROOT / "docs" / "after_training.md").read_text()
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```$", PAGE.partition("## Export")[0], re.M | re.S)


def load_val(run: Path):
    """Load the images that `run` was evaluated on."""
    trained = load(str(run), reads_data=True)
    launching.start(trained.config)
    return trained.load_data()


@pytest.fixture(scope="module")
def digits(trained_classifier, tmp_path_factory) -> Path:
    """The validation images of the classifier as files, one folder per class."""
    folder = tmp_path_factory.mktemp("digits")
    source = load_val(trained_classifier)
    for index, label in enumerate(source.labels.tolist()):
        (folder / str(label)).mkdir(exist_ok=True)
        source.load_image(index).save(folder / str(label) / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def coco_folder(trained_detector, tmp_path_factory) -> Path:
    """A folder with the validation images of the detector in val/, and instances.json."""
    folder = tmp_path_factory.mktemp("boxes")
    source = load_val(trained_detector)
    (folder / "val").mkdir()
    images = []
    annotations = []
    for index, (width, height) in enumerate(source.sizes.tolist()):
        file_name = f"val/{index}.png"
        source.load_image(index).save(folder / file_name)
        image_id = 1000 - index
        images.append({"id": image_id, "file_name": file_name, "width": width, "height": height})
        for i in range(source.offsets[index], source.offsets[index + 1]):
            left, top, right, bottom = source.boxes[i].tolist()
            annotation = {
                "id": i + 1,
                "image_id": image_id,
                "category_id": 7 + 3 * int(source.labels[i]),
                "bbox": [left, top, right - left, bottom - top],
                "area": float(source.areas[i]),
                "iscrowd": int(source.crowd[i]),
            }
            annotations.append(annotation)
    categories = [{"id": 7 + 3 * i, "name": name} for i, name in enumerate(source.classes)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(content))
    return folder


def predict(tmp_path: Path, args: list) -> list[dict]:
    """Call the tool in this process and read the rows that it writes."""
    output = tmp_path / "rows.jsonl"
    call_tool(main, args + ["-o", output, "--overwrite", "--workers", 0])
    return read_rows(output)


def predict_csv(tmp_path: Path, args: list) -> list[dict]:
    """As `predict`, with a table."""
    output = tmp_path / "rows.csv"
    call_tool(main, args + ["-o", output, "--overwrite", "--format", "csv"])
    return list(csv.DictReader(io.StringIO(output.read_text())))


def compute_coco_metrics(truth: Path, detections: Path, kind: str = "bbox") -> list[float]:
    """AP, AP50, AP75, APs and APm as pycocotools computes them."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations = COCO(truth)
    evaluation = COCOeval(annotations, annotations.loadRes(str(detections)), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats[:5].tolist()


def test_top1_is_that_of_the_run_and_of_timm(launch, trained_classifier, digits, tmp_path) -> None:
    files = sorted(str(path) for path in digits.rglob("*.png"))
    best = trained_classifier / "best"
    args = [trained_classifier, digits, "-o", tmp_path / "two.jsonl", "--max_micro_batch_size", 16]
    done = launch("multi_cpu", ["-m", "tools.predict"] + args + ["--workers", 1])
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert done.stderr.count("359 images") == 1, done.stderr
    predictions = predict(tmp_path, [best, digits, "--max_micro_batch_size", 16])
    assert (tmp_path / "rows.jsonl").read_text() == (tmp_path / "two.jsonl").read_text()
    assert [row["file"] for row in predictions] == files and len(files) == 359
    top1 = [row["predictions"][0] for row in predictions]
    names = [prediction["class"] for prediction in top1]
    labels = [Path(file).parent.name for file in files]
    assert np.mean(np.array(names) == np.array(labels)) == read(best / "results.json")["top1"]

    (tmp_path / "script.py").write_text(SCRIPT)
    assert len(SCRIPT.splitlines()) <= 29  # of them 12 open every kind of file
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", best] + files,
        capture_output=True,
        text=True,
        check=True,
        env=inherit_environment() | {"OMP_NUM_THREADS": "1"},
    )
    lines = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [list(pair) for pair in zip(files, names, strict=True)]
    scores = np.array([float(line[2]) for line in lines])
    assert scores == pytest.approx([prediction["score"] for prediction in top1], abs=1e-4)


@pytest.mark.parametrize("recipe", ["cls", "det"])
def test_images_in_shards_give_the_rows_of_their_files(
    request, recipe, digits, coco_folder, tmp_path
) -> None:
    """From tars and Parquet; an image that can't be read is a row with its reason."""
    run = request.getfixturevalue({"cls": "trained_classifier", "det": "trained_detector"}[recipe])
    folder = tmp_path / "images"
    source = digits if recipe == "cls" else coco_folder
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.json", "?[0-9].png"))
    (folder / "val").mkdir(exist_ok=True)
    (folder / "val" / "broken.png").write_bytes(b"hello")
    shutil.copy(next(folder.rglob("1*.png")), folder / "val" / "kept.v2.png")
    write_tars(folder, tmp_path, "train", (1, 17, 99))
    write_parquet(folder, tmp_path, "train", (1, 17, 99))
    files = list_class_images(folder)
    tars = tmp_path / "train-{000..002}.tar"
    parquet = f"{tmp_path}/*.parquet"

    from_files = predict_csv(tmp_path, [run] + files + ["--workers", 0])
    from_tars = predict_csv(tmp_path, [run, "--data", tars, "--workers", 0])
    from_parquet = predict_csv(tmp_path, [run, "--data", parquet])
    assert len(from_files) >= len(files) > 30
    assert any("not an image" in row["error"] for row in from_files)

    for row in from_files:
        row["file"] = str(Path(row["file"]).relative_to(folder))
    for row in from_tars:
        row["file"] = row["file"].partition(".tar/")[2]
    assert {row["file"] for row in from_tars} == {str(path.relative_to(folder)) for path in files}
    assert from_tars == from_files
    assert from_parquet[0]["file"] == f"{tmp_path}/train-000.parquet: row 0 of row group 0"
    for row in from_files + from_parquet:
        del row["file"]
    assert from_parquet == from_files


def test_pycocotools_finds_the_recorded_ap_in_the_coco_output(
    run_tool, trained_detector, coco_folder, tmp_path
) -> None:
    output = tmp_path / "detections.json"
    truth = coco_folder / "instances.json"
    val = coco_folder / "val"
    args = [trained_detector, val, "--format", "coco", "--images_of", truth, "--workers", 0, "-o"]
    run_tool(2, "predict", args + [output])
    call_tool(main, args + [tmp_path / "one.json"])
    assert output.read_text() == (tmp_path / "one.json").read_text()
    recorded = read(trained_detector / "best" / "results.json")
    expected = [recorded[name] for name in ("AP", "AP50", "AP75", "APs", "APm")]
    assert recorded["AP"] > 0.05
    assert compute_coco_metrics(truth, output) == pytest.approx(expected, abs=1e-6)

    complete = predict(tmp_path, [trained_detector, val, "--threshold", 0])
    assert sum(len(row["predictions"]) for row in complete) == len(read(output))
    best = predict(tmp_path, [trained_detector, val, "--threshold", 0.2, "--top", 2])
    for row, best_row in zip(complete, best, strict=True):
        confident = [box for box in row["predictions"] if box["score"] >= 0.2]
        assert best_row["predictions"] == confident[:2]
    args = [trained_detector, val / "1.png"]  # fewer than ranks
    main_rank, _ = run_tool(2, "predict", args + ["--workers", 0])
    rows = [json.loads(line) for line in main_rank.stdout.splitlines()]
    assert rows == predict(tmp_path, args)


@pytest.fixture
def odd_files(digits, tmp_path) -> tuple[Path, dict[str, str]]:
    """A folder of odd files, and what is wrong with each of them, "" if nothing."""
    folder = tmp_path / "odd"
    good = next(digits.rglob("*.png"))
    (folder / "b.png").mkdir(parents=True)  # a folder with an image's extension
    odd_name = os.fsdecode(b"bad\xff.png")
    for name in ("a b.png", "new\nline.png", 'ünï,日本,"q".png', odd_name, "b.png/LARGE.PNG"):
        shutil.copy(good, folder / name)
    (folder / "zero.png").write_bytes(b"")
    (folder / "text.jpg").write_bytes(b"hello")
    (folder / "cut.png").write_bytes(good.read_bytes()[:-50])
    (folder / "notes.txt").write_text("")
    (folder / "gone.png").symlink_to("nowhere")
    os.mkfifo(folder / "fifo.png")
    Image.new("1", (12_000, 9_000)).save(folder / "huge.png")
    exif = Image.Exif()
    exif[0x112] = 6
    Image.new("RGB", (40, 20)).save(folder / "turned.jpg", exif=exif)
    reasons = {
        "zero.png": "not an image",
        "text.jpg": "not an image",
        "cut.png": "truncated",
        "huge.png": "limit",
        "gone.png": "No such file",
        "fifo.png": "not a regular file",
    }
    return folder, reasons


@pytest.mark.parametrize("recipe", ["cls", "det"])
def test_files_that_cannot_be_read_are_rows_with_a_reason(
    request, recipe, odd_files, tmp_path, capsys
) -> None:
    folder, reasons = odd_files
    pictures = tmp_path / "drawn"
    run = request.getfixturevalue({"cls": "trained_classifier", "det": "trained_detector"}[recipe])
    rows = predict(tmp_path, [run, folder, folder / "never.png", "--draw", pictures])
    drawn = sorted(pictures.iterdir())
    readable = [i for i, row in enumerate(rows) if "error" not in row]
    assert [int(path.name[:6]) for path in drawn] == readable
    assert len(drawn) == 12 - len(reasons)
    assert min(np.asarray(Image.open(path)).std() for path in drawn) > 1
    by_name = {os.fsencode(Path(row["file"]).name): row for row in rows}
    assert len(by_name) == len(rows) == 13 and rows[-1]["file"].endswith("never.png")
    reasons["never.png"] = "No such file"
    for name, row in by_name.items():
        reason = reasons.get(os.fsdecode(name), "")
        assert ("predictions" in row) == (not reason) and reason in row.get("error", ""), row
    if recipe == "det":
        rotated = by_name[b"turned.jpg"]
        assert (rotated["width"], rotated["height"]) == (20, 40)
    stderr = capsys.readouterr().err
    assert f"1 (.txt) beside the images are not read, first {folder}/notes.txt" in stderr
    assert "13 images, 7 with an error" in stderr

    lines = predict_csv(tmp_path, [run, folder, "--workers", 0, "--threshold", 0.1])
    files = {line["file"] for line in lines}
    assert len(files) == 12 and str(folder / "new\nline.png") in files
    assert sum(bool(line["error"]) for line in lines) == 6
    if recipe == "det":
        assert all(line["left"] for line in lines if line["class"])


def test_images_are_named_by_folders_globs_lists_and_stdin(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/2.png", "a/1.png", "a/x/3.jpg", "b.png", "[b].png", "c.txt", "@at.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    assert list_images(["b.png", "a"])[0] == ["b.png", "a/1.png", "a/2.png", "a/x/3.jpg"]
    assert list_images(["**/*.png", "[b].png", "@at.png"])[0] == [
        "@at.png",
        "[b].png",
        "a/1.png",
        "a/2.png",
        "b.png",
    ]
    Path("list.txt").write_bytes(b"a/x\r\n\nb.png\nnowhere.png\n")
    assert list_images(["@list.txt"])[0] == ["a/x/3.jpg", "b.png", "nowhere.png"]
    Path("list.txt").write_bytes(b"new\nline.png\0b.png\0")
    files, notes = list_images(["b.png", "@list.txt"])
    assert files == ["b.png", "new\nline.png"] and "1 files were named more than once" in notes[0]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"c.txt\n")))
    assert list_images(["-"])[0] == ["c.txt"]
    Path("web/@eaDir").mkdir(parents=True)
    for name in ("web/a", "web/@eaDir/a.png", "web/b.jpg_large"):
        draw_picture(Path(name).with_suffix(".png")).rename(name)
    Path("web/c.heic").touch()
    files, notes = list_images(["web"])
    assert files == ["web/a", "web/b.jpg_large"]
    assert "3 images, left out: 1 (.heic), first web/c.heic" in notes
    for name in "defg":
        Path(f"web/{name}.heic").touch()
    with pytest.raises(
        Refused,
        match=r"web: most of its 7 images would be left out: 5 .*convert them to JPEG or PNG",
    ):
        list_images(["web"])
    Path("empty").mkdir()
    Path("empty/a.md").touch()
    with pytest.raises(Refused, match=r"empty: no image is there.* empty/a.md"):
        list_images(["empty"])
    with pytest.raises(Refused, match=r"n.*no file matches"):
        list_images(["n*.gif"])


def test_thresholds_are_those_of_the_evaluation_unless_asked(tmp_path) -> None:
    def choose(requested=None, default=0.3):
        return choose_thresholds(str(tmp_path), ("a", "b"), requested, default)[0].tolist()

    results = tmp_path / "results.json"
    assert choose() == pytest.approx([0.3, 0.3]) and choose(default=0) == [0, 0]
    results.write_text('{"thresholds": {"b": 0.25, "a": null}}')
    assert choose() == pytest.approx([0.3, 0.25]) and choose(0.75) == [0.75, 0.75]
    averaged = '{"thresholds": {"b": 0.25, "a": 0.75}, "ema_thresholds": {"b": 0.5, "a": 0.125}}'
    results.write_text(averaged)
    assert choose() == [0.125, 0.5] and choose(default=0) == [0, 0]
    results.write_text('{"thresholds": {"b": "high"}}')
    with pytest.raises(Refused, match=r"results.json: its thresholds.*--threshold"):
        choose()


def test_scores_that_are_no_numbers_are_an_error_of_their_row() -> None:
    batch = SimpleNamespace(positions=torch.arange(2), broken=())
    images = build_images(build_file_list(["a.png", "b.png"]), ("x", "y"), multi_label=False)
    builder = RowBuilder(images, np.zeros(2, np.float32), top=1)
    (_, good), (_, bad) = builder.build(batch, torch.tensor([[0.0, 1.0], [torch.nan, 0.0]]))
    assert good["predictions"][0]["class"] == "y" and "not finite" in bad["error"]


def test_a_full_disk_is_said_in_a_line() -> None:
    full = Output("/dev/full", False)
    full.start(Format(lambda index, row: "", "[", ",", "]"))
    with pytest.raises(Refused, match="No space left"):
        full.flush()
    assert Path("/dev/full").is_char_device()


def test_what_cannot_be_done_is_refused_in_one_line(
    trained_classifier, trained_detector, digits, tmp_path
) -> None:
    image = next(digits.rglob("*.png"))
    old = tmp_path / "old"
    old.write_text("old")
    empty = tmp_path / "empty"
    empty.write_text('{"images": [], "categories": []}')
    foreign = tmp_path / "other"
    content = {
        "images": [{"id": 1, "file_name": image.name}],
        "categories": [{"id": 1, "name": "0"}],
    }
    foreign.write_text(json.dumps(content))
    coco = [image, "--format", "coco", "--images_of"]
    overwriting = ["-o", foreign, "--overwrite"]
    no_tar = tmp_path / "no-{0..1}.tar"
    for run, args, text in (
        (trained_classifier, [], "no images are named"),
        (trained_classifier, [image, "--data", "a.tar"], "--data names shards, and "),
        (
            trained_classifier,
            ["--data", no_tar],
            "no-0.tar: byte 0: No such file or directory",
        ),
        (
            trained_classifier,
            ["--data", digits],
            "names no shard; give a file, a folder, or a pattern",
        ),
        (trained_classifier, [image, "--top", 0], "--top 0: must be at least 1"),
        (trained_classifier, coco + [old], "for detectors"),
        (trained_detector, [image, "--format", "coco"], "with --images_of JSON"),
        (trained_classifier, [image, "--learning_rate", 3], "unknown flag --learning_rate"),
        (trained_classifier, [image, "-o", old], "old: exists; name another, or add --overwrite"),
        (trained_classifier, [image, "--draw", "/dev/null/x"], "--draw /dev/null/x: "),
        (trained_detector, coco + [old], "not COCO's annotations"),
        (trained_detector, coco + [empty], "is none of the 0 images"),
        (trained_detector, coco + [foreign], "has no category 1, 2"),
        (
            trained_detector,
            coco + [foreign] + overwriting,
            "is the file of --images_of; name another",
        ),
        (tmp_path, [image], "neither config.json nor manifest.json"),
    ):
        if "--learning_rate" not in args:
            args = args + ["--workers", 0]
        assert text in catch_refusal(main, [run] + args)
        assert sorted(os.listdir(tmp_path)) == ["empty", "old", "other"], args
    assert old.read_text() == "old"


def test_rows_stream_and_a_kill_leaves_no_file(forks, trained_classifier, digits, tmp_path):
    """Of a pipe that nobody has read to its end: its first rows are there although the last image
    is not computed.
    """
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    folders = [tmp_path / str(i) for i in range(60)]  # more than a pipe holds
    for folder in folders:
        folder.symlink_to(digits)
    file_list = tmp_path / "list.txt"
    file_list.write_text("".join(f"{folder}\n" for folder in folders))
    args = [trained_classifier, f"@{file_list}", "--workers", 1, "--max_micro_batch_size", 16, "-o"]
    (leaver,) = start_tool(forks, 1, "predict", args + [pipe])
    with pipe.open() as reader:
        first_file = folders[0] / "0" / min(os.listdir(digits / "0"))
        assert json.loads(reader.readline())["file"] == str(first_file)
        assert leaver.process.is_alive()
    done = leaver.end()
    assert done.code == 0 and "Traceback" not in done.stderr, done.stderr

    output = tmp_path / "rows.jsonl"
    (killed,) = start_tool(forks, 1, "predict", args + [output])
    draft = tmp_path / ".rows.jsonl.tmp"
    while killed.process.is_alive() and not (draft.exists() and draft.stat().st_size):
        time.sleep(0.01)
    killed.process.kill()
    assert killed.end().code == -9 and not output.exists()
    assert len(predict(tmp_path, [trained_classifier, digits])) == 359
    assert not draft.exists()


def test_several_labels_are_the_classes_above_their_threshold(run_several, tmp_path) -> None:
    save_colours(tmp_path / "colours")
    args = ["--data", tmp_path / "colours", "--loss", "bce", "--epochs", 3]
    run_several(1, {"several": args + ["--output_dir", tmp_path]})
    run = tmp_path / "several"
    images = tmp_path / "images"
    images.mkdir()
    source = load_val(run)
    for index in range(len(source)):
        source.load_image(index).save(images / f"{index:03d}.png")
    recorded = read(run / "best" / "results.json")
    for weights in (run, next((run / "checkpoints").iterdir())):
        rows = predict(tmp_path, [weights, images, "--threshold", 0.5])
        predicted = np.zeros(source.labels.shape, bool)
        for index, row in enumerate(rows):
            for prediction in row["predictions"]:
                predicted[index, source.classes.index(prediction["class"])] = True
        exact_match = (predicted == source.labels.astype(bool)).all(1).mean()
        assert weights != run or exact_match == pytest.approx(recorded["exact_match"])
        assert (predicted.sum(1) != 1).any()  # none or several

    predictions = []
    for row in predict(tmp_path, [run, images]):
        predictions += row["predictions"]
    assert predictions
    for prediction in predictions:
        assert prediction["score"] >= recorded["thresholds"][prediction["class"]]
    assert len(predictions) != predicted.sum()  # other thresholds than 0.5


@pytest.mark.long
def test_masks_have_the_recorded_ap(run_several, scenes, tmp_path) -> None:
    args = ["--detector", "mask_rcnn", "--data", scenes, "--max_steps", 30]
    run_several(1, {"masks": args + ["--output_dir", tmp_path]}, recipe="recipes/det.py")
    truth = read(scenes / "val.json")
    output = tmp_path / "detections.json"
    args = [tmp_path / "masks", scenes / "val", "--format", "coco", "--workers", 0]
    args += ["--images_of", scenes / "val.json", "-o", output, "--draw", tmp_path / "drawn"]
    call_tool(main, args)
    for annotation in truth["annotations"]:
        annotation |= {"iscrowd": 0, "area": float(annotation["bbox"][2] * annotation["bbox"][3])}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    recorded = read(tmp_path / "masks" / "best" / "results.json")
    for kind, prefix in (("bbox", ""), ("segm", "mask_")):
        expected = [recorded[f"{prefix}{name}"] for name in ("AP", "AP50", "AP75")]
        actual = compute_coco_metrics(tmp_path / "truth.json", output, kind)[:3]
        assert actual == pytest.approx(expected, abs=1e-6)
    assert all(detection["segmentation"]["counts"] for detection in read(output))


def test_masks_of_queries_have_the_ap_of_pycocotools(
    run_several, scenes, rf_detr_seg, tmp_path
) -> None:
    """Every third mask that is predicted is an object, so that an AP depends on every pixel."""
    truth = read(scenes / "val.json")
    output = tmp_path / "detections.json"
    argv = f"--detector rf_detr_seg --model {rf_detr_seg} --data {scenes} --max_steps 1 --lr 1e-5"
    run_several(1, {"masks": argv.split() + ["--output_dir", tmp_path]}, recipe="recipes/det.py")
    args = [tmp_path / "masks", scenes / "val", "--format", "coco", "--workers", 0]
    call_tool(main, args + ["--images_of", scenes / "val.json", "-o", output])
    truth["annotations"] = []
    for annotation_id, detection in enumerate(read(output)[::3], 1):
        rle = detection["segmentation"]
        area = int(mask.area(rle))
        if area:
            box = mask.toBbox(rle).tolist()
            annotation = {"id": annotation_id, "iscrowd": 0, "area": area, "bbox": box}
            truth["annotations"].append(detection | annotation)
    for split in ("train", "val"):
        (tmp_path / f"{split}.json").write_text(json.dumps(truth))
    (tmp_path / "val").symlink_to(scenes / "val")
    evaluate = ["--eval_only", tmp_path / "masks/best", "--data", tmp_path]
    evaluated = run_several(1, {"own": evaluate}, recipe="recipes/det.py")["own"]
    results = json.loads(evaluated.stdout.splitlines()[-1])
    expected = compute_coco_metrics(tmp_path / "val.json", output, "segm")[:3]
    assert 0.1 < expected[0] < 0.9
    actual = [results[f"mask_{name}"] for name in ("AP", "AP50", "AP75")]
    assert actual == pytest.approx(expected, abs=1e-12)
