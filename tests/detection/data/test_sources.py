"""COCO, VOC, YOLO and Hugging Face data become columns; problems are refused or counted."""

import io
import itertools
import json
import tarfile
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from common.data.data_spec import describe_data
from common.data.images import BrokenImage, open_rgb
from common.detection.data import coco_files
from common.detection.data.sources import Spec, load
from common.errors import Refused
from common.randomness import key_of
from tests.harness.annotations import (
    CATEGORIES,
    build_annotation,
    draw_picture,
    format_voc_xml,
    write_coco,
    write_voc,
    write_yolo,
)
from tests.harness.shards import add

_NUMBERS = itertools.count()


def read(data, seed=0, val_share=0.25, **options):
    return load(Spec(str(data), seed=seed, val_share=val_share, **options))


def read_refusal(data, **options) -> str:
    with pytest.raises(Refused) as refused:
        read(data, **options)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600
    return str(refused.value)


def find_red_box(image: Image.Image) -> list[int]:
    red = np.asarray(image).astype(int)
    return list(Image.fromarray(((red[..., 0] - red[..., 1]) > 80).astype(np.uint8)).getbbox())


def get_boxes(source, index: int) -> list[list[float]]:
    return source.boxes[source.offsets[index] : source.offsets[index + 1]].tolist()


def check_columns(source):
    kinds = {
        np.int64: "offsets labels image_ids category_ids",
        np.float64: "areas truth",
        np.int32: "sizes",
    }
    for kind, names in (kinds | {np.float32: "boxes", bool: "crowd"}).items():
        assert {getattr(source, name).dtype for name in names.split()} == {np.dtype(kind)}
    assert source.offsets[0] == 0
    assert source.offsets[-1] == len(source.boxes) == len(source.labels) == len(source.areas)
    limits = np.repeat(source.sizes, np.diff(source.offsets), axis=0)
    assert (source.boxes[:, :2] >= 0).all() and (source.boxes[:, 2:] <= limits).all()
    assert len(np.unique(source.image_ids)) == len(source)
    assert len(source.category_ids) == len(source.classes)


# ---- COCO


@pytest.mark.smoke
def test_coco_boxes_become_columns_by_image(tmp_path, monkeypatch):
    """By Arrow alone, also with segmentations of both kinds, and with keys that nobody needs."""
    monkeypatch.setattr(
        coco_files, "_read_slowly", lambda *_: pytest.fail("Python's reader: minutes for COCO")
    )
    other_categories = [{"id": 1, "name": "bird"}, {"id": 2, "name": "cat"}]
    write_coco(
        tmp_path, change=lambda c: c["images"][0].update(coco_url="http://x", date_captured="2013")
    )
    write_coco(tmp_path, "val", (4, 5), [build_annotation(5, [1, 1, 2, 2], 2)], other_categories)
    train, val = read(tmp_path)
    check_columns(train)
    check_columns(val)
    # By id in train, whatever the order of the file.
    assert train.classes == val.classes == ("cat", "dog", "bird")
    assert train.category_ids.tolist() == [3, 7, 90] and val.category_ids.tolist() == [2, -1, 1]
    assert train.image_ids.tolist() == [10, 4, 25]
    assert train.offsets.tolist() == [0, 0, 2, 3]  # an image without boxes is kept
    assert get_boxes(train, 1) == [
        [1, 2, 11, 10],
        [3.5, 4.25, 8.5, 10.25],
    ] and train.labels.tolist() == [2, 0, 1]
    assert train.crowd.tolist() == [False, False, True] and train.areas.tolist() == [
        12.5,
        12.5,
        12.5,
    ]
    assert train.get_name(1) == f"{tmp_path}/train/4.jpg" and train.load_image(1).size == (40, 30)
    assert train.notes == (
        f"{tmp_path}/train.json: 1 of 3 images have no boxes and are background, first "
        f"{tmp_path}/train/10.jpg",
        f"{tmp_path}/train.json: 1 of 3 boxes are crowds or difficult, neither objects nor "
        f"background, first {tmp_path}/train/25.jpg with left, top, right, bottom 0, 0, 40, 30",
    )
    assert len(val.notes) == 1 and val.labels.tolist() == [0]
    image, boxes, labels, crowd, *_ = train.load_sample(np.int64(2), position=99)
    assert (image.width, image.height) == (40, 30) and boxes.tolist() == [[0, 0, 40, 30]]
    assert labels.tolist() == [1] and crowd.tolist() == [True]
    boxes[:] = 0  # a sample is the caller's own
    assert get_boxes(train, 2) == [[0, 0, 40, 30]]


def test_what_coco_may_leave_out(tmp_path):
    """No width, height, area or iscrowd; true for 1; NaN as an area; whole numbers for broken ones."""

    def change(content):
        for image in content["images"]:
            del image["width"], image["height"]
        first, second, third = content["annotations"]
        del first["area"], first["iscrowd"]
        second["iscrowd"] = True
        third["area"] = float("nan")

    train, _ = read(write_coco(write_coco(tmp_path, change=change), "val"))
    check_columns(train)
    assert (train.sizes == [40, 30]).all() and train.areas.tolist() == [80, 30, 12.5]
    assert train.crowd.tolist() == [False, False, True]


def test_boxes_outside_are_clipped_or_left_out_counted_and_named(tmp_path):
    boxes = [[-3, 2, 10, 8], [35, 25, 10, 10], [50, 2, 5, 5], [5, 5, 0, 3], [0, 0, 40.9, 30]]
    boxes += [[1, 1, 2, n] for n in range(2, 6)]
    write_coco(write_coco(tmp_path, annotations=[build_annotation(4, box) for box in boxes]), "val")
    train, _ = read(tmp_path)
    check_columns(train)
    assert (
        get_boxes(train, 1)[:3] == [[0, 2, 7, 10], [35, 25, 40, 30], [0, 0, 40, 30]]
        and len(train.boxes) == 7
    )
    _, left_out, clipped = train.notes
    assert "2 of 9 boxes reach beyond their image and are clipped, first" in clipped
    assert f"{tmp_path}/train/4.jpg with left, top, right, bottom -3, 2, 7, 10" in clipped
    assert "9 boxes, left out: 2 (no area inside their image), first" in left_out
    assert "50, 2, 55, 7" in left_out


def test_a_broken_image_is_noted_on_loading_and_named_on_reading(tmp_path):
    write_coco(write_coco(tmp_path), "val")
    (tmp_path / "train/4.jpg").write_bytes(b"no image")
    train, _ = read(tmp_path)
    assert (
        "1 of 3 images can't be read, first" in train.notes[0] and "train/4.jpg" in train.notes[0]
    )
    # Its objects still count as missed.
    assert train.sizes[1].tolist() == [40, 30] and len(get_boxes(train, 1)) == 2
    with pytest.raises(BrokenImage, match="not an image"):
        train.load_image(1)
    draw_picture(tmp_path / "train/10.jpg", (20, 10))
    with pytest.raises(BrokenImage, match="20 x 10 pixels large, and was 40 x 30"):
        train.load_sample(0, 0)
    (tmp_path / "train/10.jpg").write_text("version https://git-lfs.github.com/spec/v1")
    assert "2 of 3 images can't be read, first" in read_refusal(tmp_path)


def test_the_hold_out_depends_on_seed_and_path_alone(tmp_path):
    """A run would otherwise resume on other data."""
    ids = range(1, 41)
    boxes = [build_annotation(n, [n % 9, 1, 5, 5]) for n in ids]
    train, val = read(write_coco(tmp_path, ids=ids, annotations=boxes))
    assert len(val) == 10 and sorted([*train.image_ids, *val.image_ids]) == list(ids)
    for source in (train, val):
        check_columns(source)
        for index in range(len(source)):
            assert source.get_name(index).endswith(f"/{source.image_ids[index]}.jpg")
            assert get_boxes(source, index)[0][0] == source.image_ids[index] % 9
    same_seed = read(tmp_path)
    other_seed = read(tmp_path, seed=1)
    assert [part.fingerprint for part in same_seed] == [train.fingerprint, val.fingerprint]
    assert other_seed[1].image_ids.tolist() != val.image_ids.tolist()
    assert sorted(
        read(write_coco(tmp_path, ids=ids[::-1], annotations=boxes))[1].image_ids
    ) == sorted(val.image_ids)
    prints = set()
    for change in ({}, {"bbox": [1, 1, 5, 5.01]}, {"iscrowd": 1}, {"category_id": 7}):
        parts = read(write_coco(tmp_path, ids=ids, annotations=[boxes[0] | change, *boxes[1:]]))
        prints.add(tuple(part.fingerprint for part in parts))
    assert len(prints) == 4


def test_images_of_a_group_are_on_one_side(tmp_path):
    ids = range(1, 25)
    boxes = [build_annotation(n, [n % 9, 1, 5, 5]) for n in ids]
    doubles = [{"id": n, "file_name": f"{n % 8 + 1}.jpg"} for n in ids]
    videos = [image | {"file_name": f"v{image['id'] % 8}/{image['id']}.jpg"} for image in doubles]
    for image in videos:
        draw_picture(tmp_path / "folders/train" / image["file_name"])
    root = write_coco(
        tmp_path / "folders", ids=ids, annotations=boxes, change=partial(dict.update, images=videos)
    )
    train, val = read(root, group_column="folder")
    assert (
        not set(train.image_ids % 8) & set(val.image_ids % 8) and len(val) == 6 and not train.notes
    )
    root = save_table(
        tmp_path / "table", build_table([[[0, 0, 9, 9]]] * 24, video=[n % 8 for n in range(24)])
    )
    train, val = read(root, box_format="xywh", group_column="video")
    assert not set(train.images.rows % 8) & set(val.images.rows % 8) and len(val) == 6


RARE = "lynx", "owl"
NUM_RARE = 5, 2  # boxes, each in an image of its own


def count_held_out(root: Path) -> tuple[dict[str, int], list[int]]:
    """Boxes of each class that are held out, and the images."""
    _, val = read(root, val_share=0.2)
    return dict(zip(val.classes, val.class_counts.tolist(), strict=True)), val.image_ids.tolist()


def test_each_class_of_boxes_keeps_its_share(tmp_path, processes):
    """The same on any process. The images with the smallest random numbers have none of the rare class."""
    ids = range(200)
    boxes = [build_annotation(n, [1, 1, 5, 5], 3) for n in ids]
    boxes += [
        build_annotation(n, [2, i, 5, 5], 7) for n in range(0, 200, 3) for i in range(1 + n % 4)
    ]
    images = load_split(write_coco(tmp_path, ids=ids, annotations=boxes), "all")
    order = np.argsort(images.hash_images(key_of(0, "held out"))).tolist()
    rare = order[40 : 40 + sum(NUM_RARE)]
    boxes.append(build_annotation(order[0], [3, 3, 9, 9], 91, iscrowd=1))
    class_ids = np.repeat([91, 92], NUM_RARE).tolist()
    boxes += [
        build_annotation(image, [3, 3, 9, 9], rare_id)
        for image, rare_id in zip(rare, class_ids, strict=True)
    ]
    categories = [*CATEGORIES[:2], *({"id": 91 + n, "name": name} for n, name in enumerate(RARE))]
    write_coco(tmp_path, ids=ids, annotations=boxes, categories=categories)
    counts, held_out = count_held_out(tmp_path)
    assert len(held_out) == 40 and counts["cat"] == 40
    assert abs(counts["dog"] - 0.2 * sum(box["category_id"] == 7 for box in boxes)) <= 1
    assert (counts["lynx"], counts["owl"]) == (1, 0)
    rows = describe_data("here", *read(tmp_path, val_share=0.2))
    assert rows["not evaluated"] == "owl: no boxes to evaluate"
    assert processes.run(count_held_out, tmp_path, ranks=2) == [(counts, held_out)] * 2

    write_coco(tmp_path, "val", range(3), [build_annotation(0, [1, 1, 5, 5], 7)], categories)
    assert (
        describe_data("here", *read(tmp_path))["not evaluated"]
        == "cat, lynx, owl: no boxes to evaluate"
    )


def write_as_text(entry, *names):
    entry.update({name: str(entry[name]) for name in names})


def renumber(content, rename):
    for entries, field in (("images", "id"), ("annotations", "image_id")):
        for entry in content[entries]:
            entry[field] = rename(entry[field])


FORMS = {
    "an image id": lambda content: write_as_text(content["annotations"][0], "image_id"),
    "a category id": lambda content: write_as_text(content["annotations"][0], "category_id"),
    "all numbers": lambda content: [
        write_as_text(a, "image_id", "category_id", "iscrowd") for a in content["annotations"]
    ],
    "sizes": lambda content: write_as_text(content["images"][1], "width", "height"),
    "corners": lambda content: content["annotations"][0].update(bbox=["1", "2", "10", "8"]),
    "broken ids": lambda content: renumber(content, float),
    "iscrowd": lambda content: [
        a.update(iscrowd=bool(a["iscrowd"])) for a in content["annotations"]
    ],
    "a flat outline": lambda content: content["annotations"][0].update(
        segmentation=[1, 2, 3, 4, 5, 6]
    ),
    "hashes of 63 bits": lambda content: renumber(content, lambda number: 2**62 + number),
    "hashes beside false": lambda content: (
        renumber(content, lambda number: 2**62 + number),
        content["annotations"][0].update(iscrowd=False),
    ),
    "unsigned": lambda content: renumber(content, lambda number: 2**63 + number),
    "names": lambda content: renumber(content, lambda number: f"picture {number}"),
    "a name with a blank": lambda content: content["categories"][0].update(name=" dog "),
}


@pytest.mark.parametrize("form", FORMS)
def test_values_of_coco_in_other_forms_are_the_same_data(tmp_path, form):
    expected, _ = read(write_coco(write_coco(tmp_path / "plain"), "val"), masks=True)
    actual, _ = read(
        write_coco(write_coco(tmp_path / "other", change=FORMS[form]), "val"), masks=True
    )
    for name in ("boxes", "labels", "crowd", "offsets", "sizes", "areas"):
        assert np.array_equal(getattr(actual, name), getattr(expected, name)), name
    assert actual.masks.shapes.equals(expected.masks.shapes)
    shift = {"hashes of 63 bits": 2**62, "hashes beside false": 2**62}.get(form, 0)
    if form not in ("unsigned", "names"):
        assert (actual.image_ids - shift).tolist() == expected.image_ids.tolist()
    assert len(np.unique(actual.image_ids)) == 3


def test_boxes_and_files_that_stand_there_twice_count_once(tmp_path):
    boxes = [build_annotation(number, [1, 2, 10, 8]) for number in (4, 4, 5)] + [
        build_annotation(5, [3, 4, 10, 8])
    ]
    write_coco(write_coco(tmp_path, ids=(4, 5, 6), annotations=boxes), "val")
    train, _ = read(tmp_path)
    assert train.offsets.tolist() == [0, 1, 3, 3]
    assert (
        "1 of 4 boxes equal another one of their class and image, and are left out, first"
        in train.notes[1]
    )
    write_coco(
        tmp_path,
        ids=(4, 5, 6),
        annotations=boxes,
        change=lambda c: c["images"][1].update(file_name="4.jpg"),
    )
    train, _ = read(tmp_path)
    assert train.image_ids.tolist() == [4, 6] and get_boxes(train, 0) == [
        [1, 2, 11, 10],
        [3, 4, 13, 12],
    ]
    assert (
        "1 of 2 images are listed several times, and have the boxes of all entries, first"
        in train.notes[0]
    )
    train, _ = read(write_voc(tmp_path / "voc", {"train": "abda", "val": "c"}))
    assert len(train) == 3 and train.offsets.tolist() == [0, 2, 2, 3]


def test_the_category_above_all_others_is_left_out(tmp_path):
    """As Roboflow exports a project; one that objects have is a class."""
    categories = [{"id": n, "name": "cell", "supercategory": "cell"} for n in (0, 1)]
    categories[0]["supercategory"] = "none"
    flat = [category | {"supercategory": "none"} for category in categories]
    for name, used, given in (
        ("flat", 1, flat),
        ("unused", 1, categories),
        ("used", 0, categories),
    ):
        for split in ("train", "val"):
            write_coco(
                tmp_path / name,
                split,
                annotations=[build_annotation(4, [1, 2, 3, 4], used)],
                categories=given,
            )
    assert read(tmp_path / "flat")[0].category_ids.tolist() == [1]
    train, val = read(tmp_path / "unused")
    assert train.classes == val.classes == ("cell",) and train.category_ids.tolist() == [1]
    assert (
        "the category 0, cell, is left out: it is above others, and no object is of it"
        in train.notes[0]
    )
    assert "2 categories with the name cell; give each its own (ids 0, 1)" in read_refusal(
        tmp_path / "used"
    )


def test_the_file_of_a_data_set_can_be_given_itself(tmp_path):
    write_coco(
        write_coco(
            tmp_path / "coco",
            ids=range(8),
            annotations=[build_annotation(n, [1, 2, 3, 4]) for n in range(8)],
        ),
        "val",
    )
    assert [len(source) for source in read(tmp_path / "coco/train.json")] == [6, 2]
    assert len(load_split(tmp_path / "coco/val.json")) == 3
    write_yolo(tmp_path / "yolo")
    assert [len(source) for source in read(tmp_path / "yolo/data.yaml")] == [3, 1]
    assert "nothing is there" in read_refusal(tmp_path / "coco/trian.json")


# ---- EXIF


@pytest.mark.parametrize("upright", [False, True])
def test_rotated_images_turn_their_boxes(tmp_path, upright):
    """The size of those on their side says how they were annotated; those upside down follow."""
    stored = (8, 4, 24, 12)
    images = []
    boxes = []
    for number, orientation in enumerate(range(1, 9)):
        for part in ("train", "val"):
            image = open_rgb(
                draw_picture(tmp_path / part / f"{number}.jpg", (40, 30), stored, orientation)
            )
        width, height = image.size if upright else (40, 30)
        left, top, right, bottom = find_red_box(image) if upright else stored
        images.append(
            {"id": number, "file_name": f"{number}.jpg", "width": width, "height": height}
        )
        boxes.append(build_annotation(number, [left, top, right - left, bottom - top]))
    for part in ("train", "val"):
        write_coco(tmp_path, part, (), boxes, change=partial(dict.update, images=images))
    train, _ = read(tmp_path)
    for index in range(8):
        assert (
            train.load_image(index).size
            == tuple(train.sizes[index])
            == ((40, 30) if index < 4 else (30, 40))
        )
        assert get_boxes(train, index) == [find_red_box(train.load_image(index))]
    turned = 0 if upright else 7
    assert (
        f"7 of 8 images are rotated by their EXIF tag, and the boxes of {turned} with them"
        in train.notes[0]
    )


# ---- Pascal VOC


def test_voc_counts_from_one_and_difficult_objects_as_crowd(tmp_path):
    train, val = read(write_voc(tmp_path))
    check_columns(train)
    assert train.classes == val.classes == ("cat", "dog") and train.offsets.tolist() == [0, 2, 2, 3]
    assert get_boxes(train, 0) == [[0, 0, 40, 30], [4, 5, 10, 12]] and train.crowd.tolist() == [
        False,
        True,
        False,
    ]
    assert train.labels.tolist() == [1, 0, 1] and train.areas[0] == 1200
    assert train.get_name(0) == f"{tmp_path}/JPEGImages/a.jpg" and val.load_image(0).size == (
        40,
        30,
    )
    zero, _ = read(
        write_voc(tmp_path / "zero", a=[("dog", (0, 1, 20, 30), 0), ("cat", (1, 1, 3, 3), 0)])
    )
    assert get_boxes(zero, 0)[0] == [0, 1, 20, 30]  # somebody counted from 0


def test_voc_is_evaluated_on_val_or_on_test_if_asked(tmp_path):
    lists = {"train": "a", "val": "c", "trainval": "abe", "test": "d", "dog_train": "a"}
    root = write_voc(tmp_path, lists, e=[])
    train, val = read(root)
    assert (len(train), len(val), val.get_name(0)[-5:]) == (1, 1, "c.jpg")
    assert val.split_text == "ImageSets/Main/val.txt; ImageSets/Main/test.txt: for --split test"
    train, val = read(root, split="test")
    assert (len(train), len(val), val.get_name(0)[-5:]) == (3, 1, "d.jpg")
    (root / "Annotations/d.xml").unlink()  # as in 2012, whose test part is kept secret
    assert "d.xml: missing, but its image is listed" in read_refusal(root, split="test")
    for name in ("train", "val"):
        (root / f"ImageSets/Main/{name}.txt").unlink()
    (root / "ImageSets/Main/trainval.txt").write_text("a -1\nc 1\nb 1\n")
    # A second one, as c has.
    (root / "Annotations/a.xml").write_text(format_voc_xml([("cat", (5, 6, 10, 12), 0)]))
    train, val = read(root, val_share=0.4)
    assert (len(train), len(val)) == (2, 1) and val.split_text.startswith(
        "40 % held out of ImageSets/Main/trainval.txt; "
    )
    assert len(read(write_voc(tmp_path / "bare", {"other": ""}), val_share=0.5, seed=1)[0]) == 2


# ---- YOLO


def test_yolo_boxes_are_shares_of_the_image(tmp_path):
    train, val = read(write_yolo(tmp_path, {"train/e": "1 0.1 0.2 0.5 0.2 0.3 0.6"}))
    check_columns(train)
    assert train.classes == ("cat", "dog") and [len(train), len(val)] == [4, 1]
    assert get_boxes(train, 0) == [[10, 9, 30, 21], [0, 0, 20, 30]] and train.labels.tolist() == [
        0,
        1,
        1,
    ]
    assert np.allclose(get_boxes(train, 3), [[4, 6, 20, 18]])  # of an outline
    # Without a file, or with an empty one: an image without objects.
    assert train.offsets.tolist() == [0, 2, 2, 2, 3]
    assert train.get_name(0) == f"{tmp_path}/images/train/a.jpg" and train.areas[0] == 240


def test_yolo_boxes_are_of_the_upright_image(tmp_path):
    write_yolo(tmp_path)
    upright = open_rgb(draw_picture(tmp_path / "images/train/a.jpg", (40, 30), (8, 4, 24, 12), 6))
    left, top, right, bottom = find_red_box(upright)
    line = (
        f"0 {(left + right) / 60} {(top + bottom) / 80} {(right - left) / 30} {(bottom - top) / 40}"
    )
    (tmp_path / "labels/train/a.txt").write_text(line)
    train, _ = read(tmp_path)
    assert train.sizes[0].tolist() == [30, 40] and np.allclose(
        get_boxes(train, 0), [find_red_box(train.load_image(0))]
    )


def test_yolo_folders_are_found_in_their_common_shapes(tmp_path):
    write_yolo(tmp_path / "bare", content={})
    assert read(tmp_path / "bare")[0].classes == ("0", "1")
    (tmp_path / "bare/classes.txt").write_text("cat\ndog\n")
    assert read(tmp_path / "bare")[1].classes == ("cat", "dog")
    eight = {f"train/{n}": "0 .5 .5 .1 .1" for n in range(8)}
    flat_folder = write_yolo(
        tmp_path / "one", eight, {"train": "images", "names": {0: "cat", 1: "dog"}}
    )
    assert [len(part) for part in read(flat_folder)] == [9, 3]
    lists = write_yolo(tmp_path / "lists", content={})
    (lists / "train.txt").write_text("./images/train/a.jpg\n./images/train/b.jpg\n")
    (lists / "coco.yaml").write_text(
        "path: elsewhere\ntrain: train.txt\nval: [images/val]\nnames: {0: cat, 1: dog}\n"
    )
    assert [len(part) for part in read(lists)] == [2, 1]
    above = {"train": "../images/train", "val": "../images/val", "names": ["cat", "dog"]}
    assert len(read(write_yolo(tmp_path / "above", content=above))[0]) == 3


# ---- Hugging Face


LABEL = datasets.ClassLabel(names=["cat", "dog"])
XYWH = [[[20, 10, 15, 10], [1, 2, 3, 4]], [], [[5, 5, 10, 10]], [[0, 0, 40, 30]]]


def build_table(
    boxes=None, shape="struct", label=LABEL, labels=None, **columns
) -> datasets.Dataset:
    boxes = XYWH if boxes is None else boxes
    labels = [[box % 2 for box in range(len(row))] for row in boxes] if labels is None else labels
    number = datasets.Value("float32")
    if shape == "struct":
        kind = {"bbox": datasets.List(datasets.List(number)), "category": datasets.List(label)}
        objects = [{"bbox": b, "category": c} for b, c in zip(boxes, labels, strict=True)]
    else:
        kind = datasets.List({"bbox": datasets.List(number, length=4), "category": label})
        rows = (zip(*row, strict=True) for row in zip(boxes, labels, strict=True))
        objects = [[{"bbox": b, "category": c} for b, c in row] for row in rows]
    features = datasets.Features({"image": datasets.Image(), "objects": kind})
    with io.BytesIO() as jpeg:
        Image.new("RGB", (40, 30)).save(jpeg, "JPEG")
        # No two are the same.
        images = [{"bytes": jpeg.getvalue() + b"%06d" % next(_NUMBERS)} for _ in boxes]
    dataset = datasets.Dataset.from_dict({"image": images, "objects": objects}, features)
    for name, values in columns.items():
        dataset = dataset.add_column(name, values)
    return dataset


def save_table(root: Path, train: datasets.Dataset, val: datasets.Dataset | None = None) -> Path:
    datasets.DatasetDict({"train": train} | ({"validation": val} if val else {})).save_to_disk(root)
    return root


@pytest.mark.parametrize("shape", ["struct", "list"])
def test_objects_become_columns_in_either_shape(tmp_path, shape):
    train, val = read(
        save_table(
            tmp_path / "t",
            build_table(shape=shape, image_id=[9, 7, 5, 3]),
            build_table(shape=shape),
        )
    )
    check_columns(train)
    assert (
        train.classes == ("cat", "dog")
        and train.image_ids.tolist() == [9, 7, 5, 3]
        and len(val) == 4
    )
    assert get_boxes(train, 0) == [[20, 10, 35, 20], [1, 2, 4, 6]] and train.offsets.tolist() == [
        0,
        2,
        2,
        3,
        4,
    ]
    assert train.labels.tolist() == [0, 1, 0, 0] and train.load_image(0).size == (40, 30)
    assert (
        "the boxes can only be xywh" in train.notes[0]
        and train.get_name(2) == f"{tmp_path}/t train[2]"
    )
    train, val = read(save_table(tmp_path / "one", build_table(shape=shape)), val_share=0.5, seed=2)
    assert len(train) == len(val) == 2
    assert np.array_equal(
        get_boxes(val, 1), [[*b[:2], b[0] + b[2], b[1] + b[3]] for b in XYWH[val.images.rows[1]]]
    )


def test_boxes_are_read_in_the_only_format_or_the_named_one(tmp_path):
    corners = [[[20, 10, 35, 20]], [[1, 2, 30, 30]]]
    either = [[[2, 3, 5, 6]], [[2, 3, 9, 9]]]
    train, _ = read(save_table(tmp_path / "xyxy", build_table(corners), build_table(corners)))
    assert get_boxes(train, 0) == corners[0] and "the boxes can only be xyxy" in train.notes[0]
    save_table(tmp_path / "either", build_table(either), build_table(either))
    for name, expected in {
        "xywh": [2, 3, 7, 9],
        "xyxy": [2, 3, 5, 6],
        "cxcywh": [0, 0, 4.5, 6],
    }.items():
        train, _ = read(tmp_path / "either", box_format=name)
        assert get_boxes(train, 0) == [expected] and not any(
            "can only be" in note for note in train.notes
        )


def test_classes_without_names_are_those_found(tmp_path):
    labels = [["owl", "ant"], [], ["ant"], ["ant"]]
    text = [build_table(label=datasets.Value("string"), labels=labels) for _ in range(2)]
    train, _ = read(save_table(tmp_path / "text", *text))
    assert train.classes == ("ant", "owl") and train.labels.tolist() == [1, 0, 0, 0]
    numbers = [
        build_table(label=datasets.Value("int64"), labels=[[8, 3], [], [3], [3]]) for _ in range(2)
    ]
    train, _ = read(save_table(tmp_path / "numbers", *numbers))
    assert train.classes == ("3", "8") and train.category_ids.tolist() == [3, 8]


# ---- refusals


def change_first_box(root, **values):
    return write_coco(root, change=lambda content: content["annotations"][0].update(values))


def change_second_image(root, **values):
    return write_coco(root, change=lambda content: content["images"][1].update(values))


def write_annotations(root, make, name, text):
    """A good folder, but for one file."""
    (make(root) / name).write_text(text)
    return root


def store_table(root, val=None, **columns):
    dataset = build_table(**columns)
    return save_table(root, dataset, val or dataset)


def write_two_columns(root):
    dataset = build_table()
    return save_table(
        root, dataset.add_column("more", dataset["objects"][:], feature=dataset.features["objects"])
    )


COW = [*CATEGORIES[:2], {"id": 90, "name": "cow"}]
NUMBERS = {"label": datasets.Value("int64"), "labels": [[8, 3], [], [3], [3]]}
NEW = build_table(label=NUMBERS["label"], labels=[[8, 5], [], [3], [3]])
NARROW = [build_annotation(4, [n, 2, width, 4]) for n, width in enumerate((0, 5, 0))]
OTHER = build_table(label=datasets.ClassLabel(names=["dog", "cat"]))
SHARES = [[[0.1, 0.2, 0.3, 0.4]]] * 2
EITHER = [[[2, 3, 5, 6]], [[2, 3, 9, 9]]]
CSV = "image,xmin,ymin,xmax,ymax,label\ntrain/4.jpg,1,2,3,4,cat\n"
BAD = [
    (
        partial(write_coco, change=lambda content: content["images"][1].pop("file_name")),
        "1 entries of images lack",
    ),
    (
        partial(change_second_image, file_name="gone.jpg"),
        "gone.jpg: 1 of 3 annotated images are missing",
    ),
    (partial(change_second_image, id=10), "2 images with the id 10; give each its own"),
    (
        partial(change_second_image, width=41),
        "4.jpg: 41 x 30 in the annotations, 40 x 30 in the file",
    ),
    (
        partial(change_first_box, bbox=[9, 2, -4, 5]),
        "1 of 3 boxes end before they begin (right < left",
    ),
    (partial(change_first_box, bbox=[9, None, 4, 5]), "missing or no finite number, first"),
    (
        partial(change_first_box, bbox=[9, 1, 4]),
        "annotations[0] has a bbox of other than 4 numbers",
    ),
    (
        partial(change_first_box, category_id=5),
        "4.jpg: category_id 5; the classes are cat, dog, bird",
    ),
    (
        partial(change_first_box, image_id=1.5),
        "train.json: annotations[0]: image_id is 1.5, which is not",
    ),
    (
        partial(change_first_box, image_id=5),
        "1 annotations of images that are not in it, first annotations[0] with image_id 5",
    ),
    (
        partial(change_first_box, bbox=[1, 2, "x", 4]),
        "annotations[0]: bbox is [1, 2, 'x', 4], which is not of the type",
    ),
    (
        partial(change_second_image, width="wide"),
        "images[1]: width is 'wide', which is not of the type",
    ),
    (
        partial(write_coco, change=lambda content: content.update(annotations=None)),
        "lacks the key annotations with a list",
    ),
    (
        partial(write_coco, categories=[{"id": 5, "name": "cat"}, {"id": 3, "name": "cat"}]),
        "each its own (ids 5, 3)",
    ),
    (
        partial(write_coco, annotations=[build_annotation(4, [1, 2, 3, 4], iscrowd=1)]),
        "all of its 1 boxes are crowds (iscrowd) or diff",
    ),
    (
        partial(write_coco, annotations=[build_annotation(4, [0.1, 0.2, 0.3, 0.4])]),
        "1 of 1 boxes are in shares of the image (0 to 1)",
    ),
    (
        partial(write_coco, annotations=NARROW),
        "most of its 3 boxes would be left out: 2 (no area inside their image), first",
    ),
    (
        partial(write_coco, file_name="far/4.jpg"),
        "train/4.jpg is alike: move the images, or correct file_name",
    ),
    (
        partial(write_voc, **{name: [("dog", (0.1, 0.2, 0.5, 0.9), 0)] for name in "abd"}),
        "boxes are in shares of the image",
    ),
    (
        partial(write_coco, annotations=[build_annotation(4, [25, 20, 39, 29])]),
        "1 of 1 boxes reach beyond their",
    ),
    (
        partial(write_annotations, make=write_coco, name="train.json", text='{"images": ['),
        "train.json: not readable as JSON",
    ),
    (
        lambda root: write_coco(write_coco(root), "val", categories=COW),
        "4.jpg: cow; the classes are cat, dog, bird",
    ),
    (partial(write_voc, c=[("cow", (2, 3, 4, 5), 0)]), "c.jpg: cow; the classes are cat, dog"),
    (partial(write_voc, a=[("dog", ("x", 3, 4, 5), 0)]), "a.xml: a size or corner is no number"),
    (
        partial(write_voc, a="<a><object><name>dog</name></object></a>"),
        "a.xml: an object lacks its name or",
    ),
    (
        partial(write_yolo, labels={"train/a": "5 .5 .5 .1 .1"}),
        "a.txt:1: unknown class 5; there are 2 from 0",
    ),
    (
        partial(write_yolo, labels={"train/a": "0 .5 .5 .1 .1 .9"}),
        "a.txt:1: 6 numbers; needs 5, or",
    ),
    (
        partial(write_annotations, make=write_yolo, name="data.yaml", text="train: images/train"),
        "lacks the key names",
    ),
    (
        partial(write_yolo, content={"train": "nowhere", "names": ["a"]}),
        "train: nowhere is not there",
    ),
    (partial(write_yolo, content={"train": "labels/train", "names": ["a"]}), "no images in train"),
    (
        lambda root: save_table(root, build_table().remove_columns("objects")),
        "no column with boxes and their classes",
    ),
    (
        lambda root: write_annotations(root, write_coco, "rows.csv", CSV) / "rows.csv",
        "of an image (image, xmin, ymin, xmax, ymax, label); a file with a row for each box is "
        "not read",
    ),
    (write_two_columns, "objects, more could each hold the boxes; name it with --objects_column"),
    (partial(store_table, labels=[[0], [], [0], [0]]), "row 0 has 2 boxes and 1 of category"),
    (partial(store_table, boxes=[[[1, 2, 3]]]), "other than 4 numbers"),
    (partial(store_table, val=OTHER), "names other classes in objects than train"),
    (partial(store_table, val=NEW, **NUMBERS), "validation[0]: 5; the classes are 3, 8"),
    (partial(store_table, boxes=SHARES), "in shares of the image"),
    (
        partial(store_table, boxes=EITHER),
        "could be either of xywh (left, top, width, height) and xyxy",
    ),
    (lambda root: root / "nowhere", "nothing is there"),
    (lambda root: root, "of a kind that is not known; expected digits, a folder with train.json"),
]


@pytest.mark.parametrize("make, text", BAD, ids=[text[:30] for _, text in BAD])
def test_bad_data_are_refused_in_one_line_that_names_the_folder(tmp_path, make, text):
    message = read_refusal(make(tmp_path))
    assert text in message and str(tmp_path) in message


def test_flags_that_do_not_fit_the_data_are_refused(tmp_path):
    write_coco(tmp_path / "few")
    assert "--val_share 0.01 of 3 images holds out none" in read_refusal(
        tmp_path / "few", val_share=0.01
    )
    assert "is no table, so leave out" in read_refusal(tmp_path / "few", box_format="xywh")
    save_table(tmp_path / "table", build_table(), build_table())
    assert "--objects_column things: is no column of" in read_refusal(
        tmp_path / "table", objects_column="things"
    )
    assert "--box_format yxyx: is none of xywh, xyxy, cxcywh" in read_refusal(
        tmp_path / "table", box_format="yxyx"
    )
    assert read(write_two_columns(tmp_path / "two"), objects_column="more")[0].classes == (
        "cat",
        "dog",
    )


# ---- one part, to evaluate


def test_samples_of_a_tar_may_lack_what_others_have(tmp_path):
    labelled_object = {"bbox": [1, 2, 10, 9], "category": "a"}
    crowd = {"bbox": [1, 2, 10, 9], "category": "a", "crowd": 1}
    shards = (
        [{"objects": [labelled_object]}],
        [
            {"caption": "nothing"},
            {"objects": [labelled_object]},
            {"objects": [labelled_object, crowd]},
        ],
    )
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "PNG")
    for part in ("train", "val"):
        for number, samples in enumerate(shards):
            with tarfile.open(tmp_path / f"{part}-{number}.tar", "w") as tar:
                for i, described in enumerate(samples):
                    add(tar, f"{i}.png", file.getvalue())
                    add(tar, f"{i}.json", json.dumps(described).encode())
    for source in load(Spec(str(tmp_path), seed=0, val_share=0.2, box_format="xywh")):
        assert source.offsets.tolist() == [0, 1, 1, 2, 4] and source.crowd.tolist() == [
            False,
            False,
            False,
            True,
        ]


def test_a_part_is_evaluated_alone_in_every_format(tmp_path):
    for name, ids in (("train", range(8)), ("Valid", (3, 4)), ("test", (4,))):
        write_coco(tmp_path / "coco", name, ids, [build_annotation(4, [1, 2, 3, 4])])
    write_voc(tmp_path / "voc", {"train": "abd", "val": "c", "test": "ac"})
    write_yolo(tmp_path / "yolo", {"Test/z": "0 .5 .5 .1 .1"}, content={})
    datasets.DatasetDict({"train": build_table(), "testing": build_table()}).save_to_disk(
        tmp_path / "table"
    )
    for name, counts in {"coco": (2, 1), "voc": (1, 2), "yolo": (1, 1), "table": (4, 4)}.items():
        for split, count in zip(("", "test"), counts, strict=True):
            for held_out in (False, True):
                if (name, held_out) != ("table", True):
                    assert (
                        len(load_split(tmp_path / name, split, is_training_data=held_out)) == count
                    ), (
                        name,
                        split,
                    )
            if split or name != "table":
                assert len(read(tmp_path / name, split=split)[1]) == count
    assert (
        len(load_split(tmp_path / "table", is_training_data=True))
        == len(read(tmp_path / "table")[1])
        == 1
    )
    assert load_split(tmp_path / "yolo", "test").split_text == "images/Test"
    with pytest.raises(
        Refused, match=r"--split more: --data .* has no such split; there is Valid, test, train"
    ):
        load_split(tmp_path / "coco", "more")


def test_the_folder_of_a_part_has_the_names_beside_it(tmp_path):
    """As Roboflow exports them."""
    write_coco(tmp_path, "test")
    (tmp_path / "test.json").rename(tmp_path / "test/_annotations.coco.json")
    assert (len(load_split(tmp_path / "test")), load_split(tmp_path / "test").classes) == (
        3,
        ("cat", "dog", "bird"),
    )
    (tmp_path / "test").rename(tmp_path / "mine")
    assert (
        len(load_split(tmp_path / "mine")) == 3
        and len(load_split(tmp_path / "mine", is_training_data=True)) == 1
    )
    parts = {"train": "../train/images", "val": "../valid/images", "test": "../test/images"}
    root = write_yolo(tmp_path / "yolo", content=parts | {"names": ["owl", "tit"]})
    for name, folder in (("train", "train"), ("valid", "val")):
        for kind in ("images", "labels"):
            (root / name).mkdir(exist_ok=True)
            (root / kind / folder).rename(root / name / kind)
    for kind in ("images", "labels"):
        (root / kind).rmdir()
    # The test part, which is listed, was never there.
    assert [len(source) for source in read(root)] == [3, 1]
    assert (len(load_split(root, "val")), load_split(root, "val").classes) == (1, ("owl", "tit"))
    (root / "data.yaml").unlink()
    assert [source.split_text for source in read(root)] == ["train/images", "valid/images"]


def test_data_without_parts_are_evaluated_whole(tmp_path):
    root = write_coco(
        tmp_path, ids=range(8), annotations=[build_annotation(n, [1, 2, 3, 4]) for n in range(8)]
    )
    assert [len(load_split(root, split)) for split in ("", "all", "val")] == [8, 8, 2]
    assert [
        len(load_split(root, split, is_training_data=True)) for split in ("", "all", "train")
    ] == [
        2,
        8,
        6,
    ]
    assert (
        load_split(root, is_training_data=True).image_ids.tolist()
        == read(root)[1].image_ids.tolist()
    )
    assert load_split("digits").fingerprint == read("digits")[1].fingerprint


def load_split(data, split="", seed=0, val_share=0.25, **options):
    source, _ = load(Spec(str(data), seed, val_share, split, is_eval_only=True, **options))
    return source
