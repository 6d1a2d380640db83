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
from tests.harness.drawings import picture, save_colours
from tests.harness.launching import ROOT, inherit_environment
from tests.harness.runs import read, read_rows, refusal, start_tool
from tests.harness.shards import list_class_images, write_parquet, write_tars
from tools.predict.__main__ import main
from tools.predict.images import build_file_list, build_images
from tools.predict.listing import list_images
from tools.predict.output import Output
from tools.predict.plan import choose_thresholds
from tools.predict.rows import Format, RowBuilder
from tools.trained import load

PAGE = (ROOT / "docs" / "after_training.md").read_text()
(SCRIPT,) = re.findall(
    r"^```python\n(.*?)^```$", PAGE[: PAGE.index("## Export")], re.MULTILINE | re.DOTALL
)


def held_out(run: Path):
    """The source of the images that `run` was evaluated on."""
    trained = load(str(run), reads_data=True)
    launching.start(trained.config)
    return trained.load_data()


@pytest.fixture(scope="module")
def digits(trained_classifier, tmp_path_factory) -> Path:
    """The validation images of the classifier as files, one folder per class."""
    folder = tmp_path_factory.mktemp("digits")
    source = held_out(trained_classifier)
    for index, label in enumerate(source.labels.tolist()):
        (folder / str(label)).mkdir(exist_ok=True)
        source.image(index).save(folder / str(label) / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def of_boxes(trained_detector, tmp_path_factory) -> Path:
    """A folder with the validation images of the detector in val/, and instances.json."""
    folder = tmp_path_factory.mktemp("boxes")
    source = held_out(trained_detector)
    (folder / "val").mkdir()
    images = []
    objects = []
    for index, (width, height) in enumerate(source.sizes.tolist()):
        source.image(index).save(folder / "val" / f"{index}.png")
        images.append(
            {"id": 1000 - index, "file_name": f"val/{index}.png", "width": width, "height": height}
        )
        for row in range(source.offsets[index], source.offsets[index + 1]):
            left, top, right, bottom = source.boxes[row].tolist()
            one = {
                "id": row + 1,
                "image_id": 1000 - index,
                "category_id": 7 + 3 * int(source.labels[row]),
            }
            one |= {
                "bbox": [left, top, right - left, bottom - top],
                "area": float(source.areas[row]),
            }
            objects.append(one | {"iscrowd": int(source.crowd[row])})
    categories = [
        {"id": 7 + 3 * number, "name": name} for number, name in enumerate(source.classes)
    ]
    content = {"images": images, "annotations": objects, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(content))
    return folder


def found_in(*words: object, tmp_path: Path) -> list[dict]:
    """The rows that a call in this process writes."""
    main([*map(str, words), "-o", str(tmp_path / "rows.jsonl"), "--overwrite", "--workers", "0"])
    return read_rows(tmp_path / "rows.jsonl")


def coco_numbers(truth: Path, found: Path, kind: str = "bbox") -> list[float]:
    """AP, AP50, AP75, APs and APm as pycocotools computes them."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations = COCO(truth)
    evaluation = COCOeval(annotations, annotations.loadRes(str(found)), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats[:5].tolist()


def test_top1_is_that_of_the_run_and_of_timm(launch, trained_classifier, digits, tmp_path) -> None:
    files = [str(path) for path in sorted(digits.rglob("*.png"))]
    words = [trained_classifier, digits, "-o", tmp_path / "two.jsonl", "--max_micro_batch_size", 16]
    done = launch("multi_cpu", "-m", "tools.predict", *words, "--workers", 1)
    assert done.returncode == 0 and not done.stdout and done.stderr.count("359 images") == 1, (
        done.stderr
    )
    rows = found_in(
        trained_classifier / "best", digits, "--max_micro_batch_size", "16", tmp_path=tmp_path
    )
    assert (tmp_path / "rows.jsonl").read_text() == (tmp_path / "two.jsonl").read_text()
    assert [row["file"] for row in rows] == files and len(files) == 359
    right = [row["predictions"][0]["class"] == Path(row["file"]).parent.name for row in rows]
    assert np.mean(right) == read(trained_classifier / "best" / "results.json")["top1"]

    (tmp_path / "script.py").write_text(SCRIPT)
    assert len(SCRIPT.splitlines()) <= 29  # of them 12 open every kind of file
    words = [sys.executable, tmp_path / "script.py", trained_classifier / "best", *files]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=True,
        env=inherit_environment() | {"OMP_NUM_THREADS": "1"},
    )
    theirs = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert [(file, name) for file, name, _ in theirs] == [
        (row["file"], row["predictions"][0]["class"]) for row in rows
    ]
    ours = [row["predictions"][0]["score"] for row in rows]
    assert np.array([float(score) for *_, score in theirs]) == pytest.approx(ours, abs=1e-4)


@pytest.mark.parametrize("recipe", ["cls", "det"])
def test_images_in_shards_give_the_rows_of_their_files(
    request, recipe, digits, of_boxes, tmp_path
) -> None:
    """From tars and Parquet; an image that can't be read is a row with its reason."""
    run = request.getfixturevalue({"cls": "trained_classifier", "det": "trained_detector"}[recipe])
    folder = tmp_path / "images"
    shutil.copytree(
        digits if recipe == "cls" else of_boxes,
        folder,
        ignore=shutil.ignore_patterns("*.json", "?[0-9].png"),
    )
    (folder / "val").mkdir(exist_ok=True)
    (folder / "val" / "broken.png").write_bytes(b"hello")
    shutil.copy(next(folder.rglob("1*.png")), folder / "val" / "kept.v2.png")
    write_tars(folder, tmp_path, "train", (1, 17, 99))
    write_parquet(folder, tmp_path, "train", (1, 17, 99))
    files = list_class_images(folder)

    def rows(*words: object) -> list[dict]:
        main(
            list(
                map(
                    str,
                    [run, *words, "-o", tmp_path / "rows.csv", "--overwrite", "--format", "csv"],
                )
            )
        )
        return list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text())))

    of_files = rows(*files, "--workers", 0)
    places = {str(file): str(file.relative_to(folder)) for file in files}
    in_tars = rows("--data", tmp_path / "train-{000..002}.tar", "--workers", 0)
    assert len(of_files) >= len(files) > 30 and any(
        "not an image" in row["error"] for row in of_files
    )
    names = {row["file"].partition(".tar/")[2] for row in in_tars}
    assert names == set(places.values())
    assert [row | {"file": row["file"].partition(".tar/")[2]} for row in in_tars] == [
        row | {"file": places[row["file"]]} for row in of_files
    ]
    in_rows = rows("--data", f"{tmp_path}/*.parquet", "--workers", 0)
    assert in_rows[0]["file"] == f"{tmp_path}/train-000.parquet: row 0 of row group 0"
    assert [row | {"file": ""} for row in in_rows] == [row | {"file": ""} for row in of_files]


def test_pycocotools_finds_the_recorded_ap_in_the_coco_output(
    run_tool, trained_detector, of_boxes, tmp_path
) -> None:
    found = tmp_path / "found.json"
    truth = of_boxes / "instances.json"
    words = [
        trained_detector,
        of_boxes / "val",
        "--format",
        "coco",
        "--images_of",
        truth,
        "-o",
        found,
    ]
    run_tool(2, "predict", *words, "--workers", 0)
    main([*map(str, words[:-1]), str(tmp_path / "one.json"), "--workers", "0"])
    assert found.read_text() == (tmp_path / "one.json").read_text()
    recorded = read(trained_detector / "best" / "results.json")
    numbers = [recorded[name] for name in ("AP", "AP50", "AP75", "APs", "APm")]
    assert recorded["AP"] > 0.05 and coco_numbers(truth, found) == pytest.approx(numbers, abs=1e-6)

    rows = found_in(trained_detector, of_boxes / "val", "--threshold", 0, tmp_path=tmp_path)
    boxes = [one for row in rows for one in row["predictions"]]
    assert len(boxes) == len(json.loads(found.read_text()))
    best = found_in(
        trained_detector, of_boxes / "val", "--threshold", 0.2, "--top", 2, tmp_path=tmp_path
    )
    for many, few in zip(rows, best, strict=True):
        assert few["predictions"] == [one for one in many["predictions"] if one["score"] >= 0.2][:2]
    words = [trained_detector, of_boxes / "val" / "1.png"]  # fewer than ranks
    one, _ = run_tool(2, "predict", *words, "--workers", 0)
    assert [json.loads(line) for line in one.stdout.splitlines()] == found_in(
        *words, tmp_path=tmp_path
    )


@pytest.fixture
def odd(digits, tmp_path) -> tuple[Path, dict[str, str]]:
    """A folder of odd files, and what is wrong with each of them, "" if nothing."""
    folder = tmp_path / "odd"
    good = next(digits.rglob("*.png"))
    (folder / "b.png").mkdir(parents=True)  # a folder with an image's extension
    for name in (
        "a b.png",
        "new\nline.png",
        'ünï,日本,"q".png',
        os.fsdecode(b"bad\xff.png"),
        "b.png/LARGE.PNG",
    ):
        shutil.copy(good, folder / name)
    for name, content in {
        "zero.png": b"",
        "text.jpg": b"hello",
        "cut.png": good.read_bytes()[:-50],
    }.items():
        (folder / name).write_bytes(content)
    (folder / "notes.txt").write_text("")
    (folder / "gone.png").symlink_to("nowhere")
    os.mkfifo(folder / "fifo.png")
    Image.new("1", (12_000, 9_000)).save(folder / "huge.png")
    exif = Image.Exif()
    exif[0x112] = 6
    Image.new("RGB", (40, 20)).save(folder / "turned.jpg", exif=exif)
    wrong = {
        "zero.png": "not an image",
        "text.jpg": "not an image",
        "cut.png": "truncated",
        "huge.png": "limit",
    }
    wrong |= {"gone.png": "No such file", "fifo.png": "not a regular file"}
    return folder, wrong


@pytest.mark.parametrize("recipe", ["cls", "det"])
def test_files_that_cannot_be_read_are_rows_with_a_reason(
    request, recipe, odd, tmp_path, capsys
) -> None:
    folder, wrong = odd
    run = request.getfixturevalue({"cls": "trained_classifier", "det": "trained_detector"}[recipe])
    rows = found_in(
        run, folder, folder / "never.png", "--draw", tmp_path / "drawn", tmp_path=tmp_path
    )
    drawn = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert [int(name[:6]) for name in drawn] == [
        number for number, row in enumerate(rows) if "error" not in row
    ]
    assert len(drawn) == 12 - len(wrong)
    assert min(np.asarray(Image.open(tmp_path / "drawn" / name)).std() for name in drawn) > 1
    by_name = {os.fsencode(Path(row["file"]).name): row for row in rows}
    assert len(by_name) == len(rows) == 13 and rows[-1]["file"].endswith("never.png")
    for name, row in by_name.items():
        reason = {**wrong, "never.png": "No such file"}.get(os.fsdecode(name), "")
        assert ("predictions" in row) == (not reason) and reason in row.get("error", ""), row
    assert recipe == "cls" or (
        by_name[b"turned.jpg"]["width"],
        by_name[b"turned.jpg"]["height"],
    ) == (20, 40)
    said = capsys.readouterr().err
    assert f"1 (.txt) beside the images are not read, first {folder}/notes.txt" in said
    assert "13 images, 7 with an error" in said

    main(
        list(
            map(
                str,
                [
                    run,
                    folder,
                    "-o",
                    tmp_path / "rows.csv",
                    "--format",
                    "csv",
                    "--workers",
                    0,
                    "--threshold",
                    0.1,
                ],
            )
        )
    )
    lines = list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text())))
    files = {line["file"] for line in lines}
    assert (
        len(files) == 12
        and str(folder / "new\nline.png") in files
        and sum(bool(row["error"]) for row in lines) == 6
    )
    assert recipe == "cls" or all(line["left"] for line in lines if line["class"])


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
    for name in ("web/a", "web/@eaDir/a.png", "web/b.jpg_large"):
        picture(Path("0.png")).rename(Path(name).parent.mkdir(parents=True, exist_ok=True) or name)
    Path("web/c.heic").touch()
    files, notes = list_images(["web"])
    assert (
        files == ["web/a", "web/b.jpg_large"]
        and "3 images, left out: 1 (.heic), first web/c.heic" in notes
    )
    for name in "defg":
        Path(f"web/{name}.heic").touch()
    with pytest.raises(
        Refused,
        match=r"web: most of its 7 images would be left out: 5 .*convert them to JPEG or PNG",
    ):
        list_images(["web"])
    Path("empty").mkdir()
    Path("empty/a.md").touch()
    for words, text in {
        "empty": "empty: no image is there.* empty/a.md",
        "n*.gif": "n.*no file matches",
    }.items():
        with pytest.raises(Refused, match=text):
            list_images([words])


def test_thresholds_are_those_of_the_evaluation_unless_asked(tmp_path) -> None:
    def chosen(asked=None, default=0.3):
        return choose_thresholds(str(tmp_path), ("a", "b"), asked, default)[0].tolist()

    assert chosen() == pytest.approx([0.3, 0.3]) and chosen(default=0) == [0, 0]
    (tmp_path / "results.json").write_text('{"thresholds": {"b": 0.25, "a": null}}')
    assert chosen() == pytest.approx([0.3, 0.25]) and chosen(0.75) == [0.75, 0.75]
    averaged = '{"thresholds": {"b": 0.25, "a": 0.75}, "ema_thresholds": {"b": 0.5, "a": 0.125}}'
    (tmp_path / "results.json").write_text(averaged)
    assert chosen() == [0.125, 0.5] and chosen(default=0) == [0, 0]
    (tmp_path / "results.json").write_text('{"thresholds": {"b": "high"}}')
    with pytest.raises(Refused, match=r"results.json: its thresholds.*--threshold"):
        chosen()


def test_scores_that_are_no_numbers_are_an_error_of_their_row() -> None:
    batch = SimpleNamespace(positions=torch.arange(2), broken=())
    rows = RowBuilder(
        build_images(build_file_list(["a.png", "b.png"]), ("x", "y"), multi_label=False),
        np.zeros(2, np.float32),
        top=1,
    )
    (_, right), (_, wrong) = rows.build(batch, torch.tensor([[0.0, 1.0], [torch.nan, 0.0]]))
    assert right["predictions"][0]["class"] == "y" and "not finite" in wrong["error"]


def test_a_full_disk_is_said_in_a_line() -> None:
    full = Output("/dev/full", False)
    full.start(Format(lambda index, row: "", "[", ",", "]"))
    with pytest.raises(Refused, match="No space left"):
        full.flush()
    assert Path("/dev/full").is_char_device()


def test_what_cannot_be_done_is_refused_in_one_line(
    trained_classifier, trained_detector, digits, tmp_path
) -> None:
    image, old, empty, other = (
        next(digits.rglob("*.png")),
        *(tmp_path / name for name in ("old", "empty", "other")),
    )
    old.write_text("old")
    empty.write_text('{"images": [], "categories": []}')
    of_other = {
        "images": [{"id": 1, "file_name": image.name}],
        "categories": [{"id": 1, "name": "0"}],
    }
    other.write_text(json.dumps(of_other))
    coco = ["--format", "coco", "--images_of"]
    for run, words, text in (
        (trained_classifier, [], "no images are named"),
        (trained_classifier, [image, "--data", "a.tar"], "--data names shards, and "),
        (
            trained_classifier,
            ["--data", tmp_path / "no-{0..1}.tar"],
            "no-0.tar: byte 0: No such file or directory",
        ),
        (
            trained_classifier,
            ["--data", digits],
            "names no shard; give a file, a folder, or a pattern",
        ),
        (trained_classifier, [image, "--top", 0], "--top 0: must be at least 1"),
        (trained_classifier, [image, *coco, old], "for detectors"),
        (trained_detector, [image, "--format", "coco"], "with --images_of JSON"),
        (trained_classifier, [image, "--learning_rate", 3], "unknown flag --learning_rate"),
        (trained_classifier, [image, "-o", old], "old: exists; name another, or add --overwrite"),
        (trained_classifier, [image, "--draw", "/dev/null/x"], "--draw /dev/null/x: "),
        (trained_detector, [image, *coco, old], "not COCO's annotations"),
        (trained_detector, [image, *coco, empty], "is none of the 0 images"),
        (trained_detector, [image, *coco, other], "has no category 1, 2"),
        (
            trained_detector,
            [image, *coco, other, "-o", other, "--overwrite"],
            "is the file of --images_of; name another",
        ),
        (tmp_path, [image], "neither config.json nor manifest.json"),
    ):
        assert text in refusal(
            main, run, *words, *([] if "--learning_rate" in words else ["--workers", 0])
        )
        assert sorted(os.listdir(tmp_path)) == ["empty", "old", "other"], words
    assert old.read_text() == "old"


def test_rows_stream_and_a_kill_leaves_no_file(forks, trained_classifier, digits, tmp_path):
    """Of a pipe that nobody has read to its end: its first rows are there although the last image
    is not computed.
    """
    os.mkfifo(tmp_path / "pipe")
    many = tmp_path / "list.txt"
    for number in range(60):  # more than a pipe holds
        (tmp_path / f"{number}").symlink_to(digits)
    many.write_text("".join(f"{tmp_path / str(number)}\n" for number in range(60)))
    words = [trained_classifier, f"@{many}", "--workers", 1, "--max_micro_batch_size", 16, "-o"]
    (leaver,) = start_tool(forks, 1, "predict", *words, tmp_path / "pipe")
    with (tmp_path / "pipe").open() as reader:
        assert json.loads(reader.readline())["file"] == str(
            tmp_path / "0" / "0" / min(os.listdir(digits / "0"))
        )
        assert leaver.process.is_alive()
    done = leaver.end()
    assert done.code == 0 and "Traceback" not in done.stderr, done.stderr

    (killed,) = start_tool(forks, 1, "predict", *words, tmp_path / "rows.jsonl")
    draft = tmp_path / ".rows.jsonl.tmp"
    while killed.process.is_alive() and not (draft.exists() and draft.stat().st_size):
        time.sleep(0.01)
    killed.process.kill()
    assert killed.end().code == -9 and not (tmp_path / "rows.jsonl").exists()
    assert (
        len(found_in(trained_classifier, digits, tmp_path=tmp_path)) == 359 and not draft.exists()
    )


def test_several_labels_are_the_classes_above_their_threshold(run_several, tmp_path) -> None:
    save_colours(tmp_path / "colours")
    words = [
        "--data",
        tmp_path / "colours",
        "--loss",
        "bce",
        "--epochs",
        3,
        "--output_dir",
        tmp_path,
    ]
    run_several(1, {"several": words})
    run = tmp_path / "several"
    images = tmp_path / "images"
    images.mkdir()
    source = held_out(run)
    for index in range(len(source)):
        source.image(index).save(images / f"{index:03d}.png")
    recorded = read(run / "best" / "results.json")
    for weights in (run, next((run / "checkpoints").iterdir())):
        rows = found_in(weights, images, "--threshold", 0.5, tmp_path=tmp_path)
        predicted = [{one["class"] for one in row["predictions"]} for row in rows]
        true = [
            {source.classes[place] for place in np.flatnonzero(labels)} for labels in source.labels
        ]
        exact = np.mean([ours == theirs for ours, theirs in zip(predicted, true, strict=True)])
        assert weights != run or exact == pytest.approx(recorded["exact_match"])
        assert {len(one) for one in predicted} - {1}  # none or several
    own = [one for row in found_in(run, images, tmp_path=tmp_path) for one in row["predictions"]]
    assert own and all(one["score"] >= recorded["thresholds"][one["class"]] for one in own)
    assert len(own) != sum(map(len, predicted))  # other thresholds than 0.5


@pytest.mark.long
def test_masks_have_the_recorded_ap(run_several, scenes, tmp_path) -> None:
    words = [
        "--detector",
        "mask_rcnn",
        "--data",
        scenes,
        "--max_steps",
        30,
        "--output_dir",
        tmp_path,
    ]
    run_several(1, {"masks": words}, recipe="recipes/det.py")
    truth = read(scenes / "val.json")
    found = tmp_path / "found.json"
    coco = [
        "--format",
        "coco",
        "--images_of",
        scenes / "val.json",
        "-o",
        found,
        "--draw",
        tmp_path / "drawn",
    ]
    main(list(map(str, [tmp_path / "masks", scenes / "val", *coco, "--workers", 0])))
    for annotation in truth["annotations"]:
        annotation |= {"iscrowd": 0, "area": float(annotation["bbox"][2] * annotation["bbox"][3])}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    recorded = read(tmp_path / "masks" / "best" / "results.json")
    for kind, prefix in (("bbox", ""), ("segm", "mask_")):
        numbers = [recorded[f"{prefix}{name}"] for name in ("AP", "AP50", "AP75")]
        assert coco_numbers(tmp_path / "truth.json", found, kind)[:3] == pytest.approx(
            numbers, abs=1e-6
        )
    assert all(one["segmentation"]["counts"] for one in json.loads(found.read_text()))


def test_masks_of_queries_have_the_ap_of_pycocotools(
    run_several, scenes, rf_detr_seg, tmp_path
) -> None:
    """Every third mask that is predicted is an object, so that an AP depends on every pixel."""
    truth = read(scenes / "val.json")
    found = tmp_path / "found.json"
    words = f"--detector rf_detr_seg --model {rf_detr_seg} --data {scenes} --max_steps 1 --lr 1e-5"
    run_several(1, {"masks": [*words.split(), "--output_dir", tmp_path]}, recipe="recipes/det.py")
    coco = ["--format", "coco", "--images_of", scenes / "val.json", "-o", found]
    main(list(map(str, [tmp_path / "masks", scenes / "val", *coco, "--workers", 0])))
    truth["annotations"] = []
    for number, one in enumerate(read(found)[::3], 1):
        rle = one["segmentation"]
        if area := int(mask.area(rle)):
            more = {"id": number, "iscrowd": 0, "area": area, "bbox": mask.toBbox(rle).tolist()}
            truth["annotations"].append(one | more)
    for part in ("train", "val"):
        (tmp_path / f"{part}.json").write_text(json.dumps(truth))
    (tmp_path / "val").symlink_to(scenes / "val")
    evaluate = ["--eval_only", tmp_path / "masks/best", "--data", tmp_path]
    (evaluated,) = run_several(1, {"own": evaluate}, recipe="recipes/det.py").values()
    results = json.loads(evaluated.stdout.splitlines()[-1])
    expected = coco_numbers(tmp_path / "val.json", found, "segm")[:3]
    assert 0.1 < expected[0] < 0.9
    actual = [results[f"mask_{name}"] for name in ("AP", "AP50", "AP75")]
    assert actual == pytest.approx(expected, abs=1e-12)
