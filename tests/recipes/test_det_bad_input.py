"""The detection recipe refuses what it can't do in one line on every rank, and leaves nothing behind.

Every case is the real recipe on two ranks: each must refuse on both with the same single line, which names the value, the
limit and the way out. What both recipes share is in test_cls_bad_input.py.
"""

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.harness.launching import NO_NETWORK, Bad
from tests.harness.outcomes import Outcome

RECIPE = "recipes/det.py"
IMAGES = 8
CONTENT = {  # of a data set that can be trained on: two boxes in each of eight images
    "images": [{"id": 10 + n, "file_name": f"{n}.png", "width": 64, "height": 48} for n in range(IMAGES)],
    "annotations": [
        {"id": n, "image_id": 10 + n // 2, "category_id": (3, 90)[n % 2], "bbox": [4 + n, 6, 20, 16], "iscrowd": 0}
        for n in range(2 * IMAGES)
    ],
    "categories": [{"id": 90, "name": "emu"}, {"id": 3, "name": "dog"}],
}


def write(folder: Path, train: dict | str, val: dict | None = None) -> Path:
    """A folder in COCO's format, with an image for each name in either part."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(IMAGES):
        Image.fromarray(random.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    (folder / "train.json").write_text(train if isinstance(train, str) else json.dumps(train))
    (folder / "val.json").write_text(json.dumps(val or CONTENT))
    return folder


def changed(change: Callable[[dict], object]) -> dict:
    content = copy.deepcopy(CONTENT)
    change(content)
    return content


def replace(key: str, place: int, **values: object) -> dict:
    return changed(lambda content: content[key][place].update(values))


JSON = {  # what the training part's annotations are, and what is said to them; FILE is their path, ROOT its folder
    "no categories": (changed(lambda c: c.pop("categories")), "FILE: lacks the key categories, which .* have"),
    "no annotations key": (changed(lambda c: c.pop("annotations")), "FILE: lacks the key annotations, which .* have"),
    "a box without its class": (
        changed(lambda c: c["annotations"][3].pop("category_id")),
        r"FILE: 1 entries of annotations lack category_id, first annotations\[3\]",
    ),
    "text for a number": (
        replace("annotations", 2, category_id="dog"),
        r"FILE: annotations\[2\].category_id is 'dog', not of the type int64",
    ),
    "an inverted box": (
        replace("annotations", 5, bbox=[30, 10, -20, 10]),
        "FILE: 1 boxes end before they begin .right < left or .*, first ROOT/2.png with .* 30, 10, 10, 20; correct .*",
    ),
    "a box that is no number": (
        replace("annotations", 1, bbox=[1, 2, float("nan"), 4]),
        "FILE: 1 boxes have a coordinate that is missing or no finite number, first ROOT/0.png .*; correct or remove them",
    ),
    "a box of three numbers": (
        replace("annotations", 1, bbox=[1, 2, 3]),
        r"FILE: annotations\[1\] has a bbox of other than 4 numbers: left, top, width, height",
    ),
    "an unknown category": (
        replace("annotations", 4, category_id=7),
        "FILE: 1 boxes of an unknown class, first of ROOT/2.png: category_id 7 is not listed there; add it to .*",
    ),
    "a box of no image": (
        replace("annotations", 0, image_id=99),
        "FILE: 1 annotations of images that are not in it, first image_id 99; remove them",
    ),
    "no annotations": (changed(lambda c: c["annotations"].clear()), "FILE: no boxes in its 8 images; annotate some .*"),
    "no images": (
        changed(lambda c: (c["images"].clear(), c["annotations"].clear())),
        "FILE: no images in it; it needs at least one",
    ),
    "an image missing from disk": (
        replace("images", 6, file_name="away.png"),
        "ROOT/away.png: 1 of 8 annotated images are missing or may not be read, this one first; add them, or .*",
    ),
    "all images elsewhere": (
        changed(lambda c: [image.update(file_name=f"x/{image['file_name']}") for image in c["images"]]),
        "FILE: its image x/0.png is missing; looked in ROOT at .*",
    ),
    "images of another size": (
        replace("images", 1, width=640, height=480),
        "FILE: 1 of 8 images have another size than annotated, first ROOT/1.png: 640 x 480 in .*, 64 x 48 in the file; .*",
    ),
    "boxes in shares": (
        changed(lambda c: [box.update(bbox=[60, 40, 64, 48]) for box in c["annotations"]]),
        "FILE: 16 of 16 boxes reach beyond their image, first ROOT/0.png .*; they are in another format .*",
    ),
    "the same image twice": (replace("images", 1, id=10), "FILE: 2 images with the id 10; give each its own"),
    "no JSON": ('{"images": [', "FILE: not readable as JSON: .*"),
    "lists in lists": ("[" * 10**6, "FILE: not readable as JSON: .*"),
    "a list": ("[]", "FILE: holds a list, not COCO's object of images, annotations and categories"),
}
SETTINGS = {  # FINE is a folder that can be trained on
    "nothing there": Bad(["--data", "FINE/nowhere"], "--data FINE/nowhere: nothing is there; expected digits, .*"),
    "a folder of images": Bad(
        ["--data", "recipes"], "--data recipes: a folder or file of a kind that is not known; expected digits, .*COCO.*"
    ),
    "a class in val only": Bad(
        ["--data", "FINE/../a class in val only"],
        ".*val.json: 2 boxes of an unknown class, first of .*: category_id 5 is cat, which the training part does not .*",
    ),
    "outlines that are not there": Bad(
        ["--data", "FINE", "--detector", "mask_rcnn"],
        "FINE/train.json: none of its 16 objects has an outline .*; add them, or choose a detector of boxes .*",
    ),
    "nothing to paste": Bad(
        ["--data", "FINE", "--copy_paste", 0.5],
        "FINE/train.json: none of its 16 objects has an outline .* for masks or --copy_paste; add them, or .*",
    ),
    "no such part": Bad(
        ["--data", "FINE", "--split", "test"], "--split test: --data FINE has no such part; there is train, val"
    ),
    "box format of a folder": Bad(
        ["--data", "FINE", "--box_format", "xyxy"], "--data FINE: is no table, so leave out .*--box_format"
    ),
    "unknown box format": Bad(["--box_format", "yxyx"], "--box_format yxyx: is none of xywh, xyxy, cxcywh"),
    "unknown backbone": Bad(
        ["--model", "restnet50"], "--model restnet50: not a model of timm .*; did you mean resnet50, .*"
    ),
    "levels of no number": Bad(["--levels", "all"], "--levels all: must be two numbers joined by a dash, such as 3-7"),
    "levels in other digits": Bad(["--levels", "²-³"], "--levels ²-³: must be two numbers joined by a dash, .*"),
    "levels of nothing": Bad(["--levels", "3-99"], "--levels 3-99: the first .* and at most the second, .*at most 12"),
    "levels upside down": Bad(["--levels", "5-3"], "--levels 5-3: the first is at least 1 and at most the second, .*"),
    "levels that the backbone lacks": Bad(
        ["--model", "test_convnext", "--levels", "1-4"],
        "--levels 1-4: test_convnext has features at strides 4, 8, 16, 32 .level l is stride 2.l.",
    ),
    "width": Bad(["--width", 48], "--width 48: the heads normalise 32 groups of channels; take a multiple of 32"),
    "no short side": Bad(["--short_sides", "big"], "--short_sides big: must be lengths in pixels joined by commas, .*"),
    "a short side beyond all": Bad(["--short_sides", "64,99999"], "--short_sides 64,99999: must be .*from 1 to 8192"),
    "no square of the stride": Bad(
        ["--detector", "rtdetr_v2", "--short_sides", "96,100"],
        "--short_sides, --eval_short_side: a square of 100 pixels is no multiple of 32, as .* needs; take 128",
    ),
    "long side of a square": Bad(
        ["--detector", "dfine", "--long_side", "640"],
        "--long_side 640: --detector dfine stretches images to squares; leave it out",
    ),
    "a backbone under one that has its own": Bad(
        ["--detector", "rf_detr"], "--model test_resnet: --detector rf_detr has a backbone of its own; there are .*"
    ),
    "width of one that has its own": Bad(
        ["--detector", "rf_detr", "--model", "rf_detr_nano", "--width", 32],
        "--width 32: --detector rf_detr has its own width; leave it out",
    ),
    "short side of nothing": Bad(["--short_sides", "640,0"], "--short_sides 640,0: must be lengths in pixels .*"),
    "falls of the rate": Bad(
        ["--schedule", "step", "--step_epochs", "8,x"], "--step_epochs 8,x: must be epochs above 0, .*"
    ),
    "batch below processes": Bad(
        ["--global_batch_size", 1], "--global_batch_size 1 leaves some of 2 processes without .*"
    ),
    "norm groups in batch": Bad(
        ["--batch_norm", "group", "--norm_batch_size", 3], "--global_batch_size 8 does not divide into the 3 samples .*"
    ),
    "global norm in pieces": Bad(
        ["--batch_norm", "global", "--max_micro_batch_size", 1],
        "--batch_norm global needs the whole share .* not 4 micro-steps: raise --max_micro_batch_size to 4, .*",
    ),
    "nothing to evaluate": Bad(
        ["--eval_only", "/nowhere/best"],
        "/nowhere/best: nothing is there; there are a run's best/, torchvision:NAME, .*",
    ),
    "nothing to begin with": Bad(
        ["--init", "/nowhere/best"], "/nowhere/best: nothing is there; there are a run's best/, torchvision:NAME, .*"
    ),
    "another detector to begin with": Bad(
        ["--init", "BEST", "--detector", "retinanet", "--width", 32],
        "BEST is of another detector: --detector fcos there, retinanet here; --width 64 there, 32 here; leave these .*",
    ),
    "other classes to evaluate": Bad(
        ["--eval_only", "BEST", "--data", "FINE"],
        r"BEST does not know . of the . classes of --data FINE \(.*\); it knows 0, 1, 2, 3, 4, ...: evaluate it on data .*",
    ),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """What stands for a folder in the cases."""
    root = tmp_path_factory.mktemp("bad data")
    write(root / "fine", CONTENT)
    stranger = replace("annotations", 0, category_id=5)
    stranger["categories"].append({"id": 5, "name": "cat"})
    stranger["annotations"][1]["category_id"] = 5
    write(root / "a class in val only", CONTENT, stranger)
    for name, (content, _) in JSON.items():
        write(root / name, content)
    for name, count in (("one broken", 1), ("many broken", 6)):
        folder = write(root / name, CONTENT)
        for number in range(count):
            file = folder / f"{number}.png"
            file.write_bytes(file.read_bytes()[:200])  # its header is whole
        for number in range(IMAGES):  # what is evaluated on is whole
            shutil.copy(root / "fine" / f"{number}.png", folder / f"whole_{number}.png")
        val = changed(lambda c: [i.update(file_name=f"whole_{i['file_name']}") for i in c["images"]])
        (folder / "val.json").write_text(json.dumps(val))
    return {"FINE": str(root / "fine"), "BEST": str(root / "best"), "ROOT": str(root)}


def filled(text: str, places: dict[str, str], written=str) -> str:
    for name in ("FINE", "BEST"):
        text = text.replace(name, written(places[name]))
    return text


@pytest.fixture(scope="module")
def outcomes(run_several, places) -> dict[str, Outcome]:
    """One launch: first a run that makes what others are asked to begin with, then every case."""
    root = Path(places["ROOT"])
    small = ["--model", "test_resnet", "--short_sides", 64, "--long_side", 64, "--max_steps", 2]
    cases = {"good": [*small, "--width", 64, "--output_dir", root / "good"]}
    cases |= {name: ["--data", root / name] for name in JSON}
    cases |= {name: [filled(str(word), places) for word in bad.words] for name, bad in SETTINGS.items()}
    cases["one broken"] = ["--data", root / "one broken", *small, "--max_steps", 4]
    cases["many broken"] = ["--data", root / "many broken", *small, "--max_steps", 40]
    (root / "best").symlink_to(root / "good" / "good" / "best")
    return run_several(2, cases, recipe=RECIPE, timeout=600)


@pytest.mark.parametrize("name", [*JSON, *SETTINGS])
def test_a_request_that_cannot_be_met_is_refused_on_all_ranks_and_leaves_no_trace(outcomes, places, name) -> None:
    outcome = outcomes[name]
    assert outcome.outcome == "refused", outcome
    if name in SETTINGS:
        expected = filled(SETTINGS[name].text, places, re.escape)
    else:
        folder = re.escape(f"{places['ROOT']}/{name}")
        expected = JSON[name][1].replace("FILE", f"{folder}/train.json").replace("ROOT", folder)
    assert re.fullmatch(expected, outcome.text), outcome.text
    assert not outcome.folder.exists()


def test_a_broken_image_is_named_and_counted_and_training_goes_on(outcomes, places) -> None:
    outcome = outcomes["one broken"]
    assert outcome.outcome == "ok", outcome
    log = (outcome.folder / "log.txt").read_text()
    assert log.count(f"can't be read, a stand-in takes its place: {places['ROOT']}/one broken/0.png: ") == 1
    assert outcome.rows[-1]["data/broken"] == 4  # 32 positions over 8 images
    assert outcome.rows[-1]["eval/count"] == IMAGES


def test_too_many_broken_images_end_the_run_with_one_line(outcomes, places) -> None:
    outcome = outcomes["many broken"]
    assert outcome.outcome == "refused", outcome
    expected = (
        r"step 4: 24 of the last 32 images could not be read \(the last: .*/many broken/[0-5].png: .*\), more than "
        "--max_broken_share 0.02 of each 1,000: mend the data, or raise the limit"
    )
    assert re.fullmatch(expected, outcome.text), outcome.text
    assert json.loads((outcome.folder / "status.json").read_text())["status"] == "failed"


def test_what_a_person_sees_is_one_line_and_not_one_a_rank(launch, places, tmp_path) -> None:
    """The real script, with exit codes and the launcher's own words around it."""
    folder = Path(places["ROOT"]) / "an inverted box"
    done = launch("multi_cpu", RECIPE, "--data", folder, "--output_dir", tmp_path / "runs", "--workers", 0)
    assert re.match("det.py: .*train.json: 1 boxes end before they begin", done.stderr), done.stderr
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stdout == "" and not any((tmp_path / "runs").glob("*"))
    done = launch("multi_cpu", RECIPE, "--detector", "yolo", "--output_dir", tmp_path / "runs", env=NO_NETWORK)
    assert re.match("det.py: --detector yolo: must be one of fcos, .*", done.stderr)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
