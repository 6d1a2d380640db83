"""Data in the layouts and spellings of other tools are read right, or refused in one line that
names what is there.
"""

import json
import unicodedata
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from tests.detection.data.test_sources import read, read_refusal
from tests.harness.annotations import (
    build_annotation,
    draw_picture,
    format_voc_xml,
    write_coco,
    write_voc,
    write_yolo,
)

BOM = b"\xef\xbb\xbf"
LINE = "0 .5 .5 .25 .2\n"


def write(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def write_scenes(
    folder: Path,
    labels: Path | None = None,
    num_images: int = 4,
    suffix: str = ".txt",
    text: str = LINE,
) -> None:
    """Images 0.jpg, ... in `folder`, and a label file for each."""
    for number in range(num_images):
        draw_picture(folder / f"{number}.jpg")
        write((labels or folder) / f"{number}{suffix}", text)


# ---- names of classes


@pytest.mark.parametrize(
    "names, classes",
    [
        ("[off, on]", ("off", "on")),
        ("[yes, no]", ("yes", "no")),
        ("[~, null]", ("~", "null")),
        ("[1, 0.5]", ("1", "0.5")),
        ("{1: on, 0: off}", ("off", "on")),
        ("\n  0: 'true '\n  1: 2024-01-01", ("true", "2024-01-01")),
    ],
)
def test_names_of_classes_are_read_as_written(tmp_path, names, classes):
    write_yolo(tmp_path, content={})
    write(
        tmp_path / "data.yaml",
        f"train: images/train\nval: images/val\ntest:\nnc: 2\nnames: {names}\n",
    )
    assert read(tmp_path)[0].classes == classes


@pytest.mark.parametrize(
    "names, text",
    [
        ("cup, plate", "names is 'cup, plate'; it needs a list, names: [a, b]"),
        ("'[cup, plate]'", "names is '[cup, plate]'; it needs a list"),
        ("\n  0:cup\n  1:plate", "names is '0:cup 1:plate'; it needs a list"),
        ("[cup: , plate]", "names is [{'cup': ''}, 'plate']; it needs a list"),
        ("{1: cup, 2: plate}", "class 0 has no name; number the names from 0 up"),
        ("{0: cup, 1: }", "class 1 has no name"),
        ("[cup, ' cup']", "2 classes are named cup; give each its own name"),
        ("[cup, plate]\nnc: 3", "nc is 3, but names has 2; correct one of them"),
    ],
)
def test_names_of_another_form_are_refused(tmp_path, names, text):
    write_yolo(tmp_path, content={})
    write(tmp_path / "data.yaml", f"train: images/train\nval: images/val\nnames: {names}\n")
    assert f"{tmp_path}/data.yaml: {text}" in read_refusal(tmp_path)


def test_lists_of_names_agree_and_name_each_class_once(tmp_path):
    write_yolo(tmp_path, content={})
    write(tmp_path / "classes.txt", "cat\ncat\n")
    assert "classes.txt: 2 classes are named cat" in read_refusal(tmp_path)
    write(tmp_path / "classes.txt", BOM + b"cat\r\ndog\r\n")
    assert read(tmp_path)[0].classes == ("cat", "dog")
    write(tmp_path / "labels/train/classes.txt", "dog\ncat\n")
    assert "classes.txt name other classes; make them the same" in read_refusal(tmp_path)


def test_the_yaml_file_with_names_and_parts_is_read(tmp_path):
    write_yolo(tmp_path, content={})
    content = "train: images/train\nval: images/val\nnames: [off, on]\n"
    birds = write(tmp_path / "birds.yaml", content)
    write(tmp_path / "args.yaml", "epochs: 3\n")
    write(tmp_path / "._birds.yaml", b"\x00\x05\x16\x07")
    assert read(tmp_path)[0].classes == read(birds)[0].classes == ("off", "on")
    write(tmp_path / "more.yml", content)
    assert "birds.yaml, more.yml each describe data; name one of them by --data" in read_refusal(
        tmp_path
    )
    assert len(read(birds)[0]) == 3


# ---- bytes


def test_byte_order_marks_are_no_content(tmp_path):
    for root in (
        write_yolo(tmp_path / "yolo"),
        write_voc(tmp_path / "voc"),
        write_coco(write_coco(tmp_path / "coco"), "val"),
    ):
        before = read(root)
        for file in root.rglob("*.*"):
            if file.suffix in (".txt", ".yaml", ".json", ".xml"):
                write(file, BOM + file.read_bytes())
        assert [part.fingerprint for part in read(root)] == [part.fingerprint for part in before]
    write(tmp_path / "yolo/labels/train/a.txt", LINE.encode("utf-16"))
    assert "a.txt: not readable as text: it is in UTF-16; save it in UTF-8" in read_refusal(
        tmp_path / "yolo"
    )


def test_files_that_systems_leave_are_no_data(tmp_path):
    junk = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        "
    for root in (
        write_yolo(tmp_path / "yolo", content={}),
        write_voc(tmp_path / "voc"),
        write_coco(write_coco(tmp_path / "coco"), "val"),
    ):
        before = read(root)
        for file in list(root.rglob("*.*")):
            write(file.with_name(f"._{file.name}"), junk)
            write(file.parent / "@eaDir" / file.name / "SYNOPHOTO_THUMB_M.jpg", junk)
        after = read(root)
        assert [part.fingerprint for part in after] == [part.fingerprint for part in before]
        assert [part.notes for part in after] == [part.notes for part in before]


# ---- images and annotations without the other


def test_unmatched_label_files_and_images_have_rows(tmp_path):
    write_yolo(tmp_path, {f"train/{number}": LINE for number in range(6)})
    write(tmp_path / "labels/train/gone.txt", LINE)
    write(tmp_path / "images/train/phone.heic", b"")
    write(tmp_path / "labels/train/phone.txt", LINE)
    train, val = read(tmp_path)
    assert len(train) == 9 and val.notes == ()
    assert set(train.notes) >= {
        f"{tmp_path}/data.yaml train: 1 of 9 images have no label file and are background, "
        f"first {tmp_path}/images/train/b.jpg",
        f"{tmp_path}/data.yaml train: 10 label files, left out: 2 (no image that can be read has "
        f"their name), first {tmp_path}/labels/train/gone.txt",
    }


def test_a_part_that_is_trained_on_is_not_evaluated(tmp_path):
    write_yolo(
        tmp_path, content={"train": "images/train", "val": "images/train", "names": ["cat", "dog"]}
    )
    assert "images/train: 3 of 3 images are in images/train, too, by path or bytes" in read_refusal(
        tmp_path
    )


@pytest.mark.parametrize(
    "rename",
    [
        lambda stem: quote(stem),
        lambda stem: unicodedata.normalize("NFD", stem),
        lambda stem: stem.upper(),
    ],
)
def test_names_that_do_not_match_are_refused(tmp_path, rename):
    write_yolo(tmp_path, {f"train/photo_é {number}": LINE for number in range(5)})
    for file in sorted((tmp_path / "labels/train").glob("photo*")):
        file.rename(file.with_stem(rename(file.stem)))
    message = read_refusal(tmp_path)
    assert "5 (no image that can be read has their name), first" in message and "%C3%A9" in message


def test_a_list_may_name_a_few_images_of_a_folder(tmp_path):
    write_yolo(
        tmp_path,
        {f"train/{number}": LINE for number in range(6)},
        {"train": "a.txt", "val": "images/val", "names": ["x", "y"]},
    )
    write(tmp_path / "a.txt", "./images/train/1.jpg\nimages/train/0.jpg\nimages/train/1.jpg\n")
    train, _ = read(tmp_path)
    assert len(train) == 2
    assert train.notes == (
        f"{tmp_path}/data.yaml train: 1 of 3 lines name an image again, which is read once, "
        f"first {tmp_path}/images/train/1.jpg",
    )


def test_kinds_of_files_that_are_no_images_are_named(tmp_path):
    write_yolo(tmp_path)
    for file in (tmp_path / "images/val").iterdir():
        file.rename(file.with_suffix(".heic"))
    assert f"no images in val, that is {tmp_path}/images/val, which has .heic" in read_refusal(
        tmp_path
    )


def test_labels_in_another_folder_are_named(tmp_path):
    write_yolo(tmp_path)
    (tmp_path / "labels/train").rename(tmp_path / "labels/train_labels")
    message = read_refusal(tmp_path)
    assert (
        f"none of its 3 images has a label file: that of {tmp_path}/images/train/a.jpg is not at"
        in message
    )
    assert message.endswith(
        f"{tmp_path}/labels/train/a.txt; nearest: {tmp_path}/labels/train_labels/a.txt"
    )


def test_voc_lists_may_have_spaces_repeats_and_columns(tmp_path):
    write_voc(
        tmp_path,
        {"train": "", "val": "c"},
        **{"my dog 1": [("big dog", (1.0, "2.5", 40, 30), "true")]},
    )
    write(tmp_path / "ImageSets/Main/train.txt", "my dog 1\na -1\nb.jpg  1\nmy dog 1.jpg\n")
    train, _ = read(tmp_path)
    assert [Path(train.get_name(index)).stem for index in range(3)] == ["my dog 1", "a", "b"]
    assert train.classes == ("big dog", "cat", "dog") and train.crowd.tolist() == [
        True,
        False,
        True,
    ]
    assert (
        f"{tmp_path} train: 1 of 4 lines name an image again, which is read once, first my dog 1"
        in train.notes
    )


def test_voc_images_without_xml_have_a_row(tmp_path):
    write_voc(tmp_path)
    for file in (tmp_path / "ImageSets/Main").iterdir():
        file.unlink()
    draw_picture(tmp_path / "JPEGImages/e.jpg")
    train, _ = read(tmp_path)
    assert (
        f"{tmp_path} train: 5 images, left out: 1 (no XML file has their name), first e.jpg"
        in train.notes
    )


def test_a_confidence_is_no_part_of_a_label(tmp_path):
    write_yolo(tmp_path, {"train/a": "0 .5 .5 .1 .1 .9"})
    assert "a.txt:1: 6 numbers; needs 5" in read_refusal(
        tmp_path
    ) and "confidence: remove it" in read_refusal(tmp_path)


# ---- layouts


def make_coco(root: Path, json_name: str, images: str) -> None:
    for part in ("train", "val"):
        names = [{"id": number, "file_name": f"{part}{number}.jpg"} for number in (10, 4, 25)]
        write_coco(root, part, change=partial(dict.update, images=names))
        write(root / json_name.format(part), (root / f"{part}.json").read_bytes())
        if json_name != "{}.json":
            (root / f"{part}.json").unlink()
        folder = root / images.format(part)
        folder.mkdir(parents=True, exist_ok=True)
        for file in list((root / part).glob("[0-9]*.jpg")):
            file.rename(folder / f"{part}{file.name}")


def make_voc(folder: Path, annotations: str, images: str) -> None:
    write_scenes(
        folder / images,
        folder / annotations,
        suffix=".xml",
        text=format_voc_xml([("cat", (11, 10, 20, 15), 0)]),
    )


def make_mixed(root: Path, *parts: str, names: str = "classes.txt") -> None:
    for part in parts:
        write_scenes(root / part)
        write(root / part / names, "cat\n")


LAYOUTS = {
    "COCO": lambda root: make_coco(root, "annotations/instances_{}2017.json", "{}2017"),
    "COCO, images/": lambda root: make_coco(
        root, "annotations/instances_{}2017.json", "images/{}2017"
    ),
    "COCO of parts": lambda root: make_coco(root, "annotations/{}.json", "images/{}"),
    "COCO, images of all parts": lambda root: make_coco(root, "annotations/{}.json", "images"),
    "COCO, all in a folder": lambda root: make_coco(root, "{}.json", "."),
    "COCO of Roboflow": lambda root: make_coco(root, "{}/_annotations.coco.json", "{}"),
    "COCO of FiftyOne": lambda root: make_coco(root, "{}/labels.json", "{}/data"),
    "COCO of Supervisely": lambda root: make_coco(root, "{}/annotations/instances.json", "{}/img"),
    "COCO, train_annotations.json": lambda root: make_coco(
        root, "annotations/{}_annotations.json", "images"
    ),
    "COCO, train.coco.json": lambda root: make_coco(root, "{}.coco.json", "{}"),
    "VOC of Roboflow": lambda root: [
        make_voc(root / part, ".", ".") for part in ("train", "valid")
    ],
    "VOC of Kaggle": lambda root: make_voc(root, "annotations", "images"),
    "VOC of LabelImg": lambda root: make_voc(root, ".", "."),
    "VOC of FiftyOne": lambda root: make_voc(root, "labels", "data"),
    "VOC, XML beside images/": lambda root: make_voc(root, "Annotations", "."),
    "YOLO of LabelImg": lambda root: make_mixed(root, "."),
    "YOLO of LabelImg, parts": lambda root: make_mixed(root, "train", "val"),
    "Darknet of Roboflow": lambda root: make_mixed(root, "train", "valid", names="_darknet.labels"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_tools_are_read(tmp_path, name):
    LAYOUTS[name](tmp_path)
    train, val = read(tmp_path)
    if "COCO" in name:
        assert len(train) == len(val) == 3 and train.load_image(0).size == val.load_image(
            2
        ).size == (40, 30)
    else:
        assert len(train) + len(val) == (8 if (tmp_path / "train").is_dir() else 4)
        assert train.classes == ("cat",) and len(train.boxes) == len(train)
        assert np.allclose(train.boxes[0], [10, 9, 20, 15] if "VOC" in name else [15, 12, 25, 18])


def test_the_folder_of_cvat_is_read(tmp_path):
    write_scenes(tmp_path / "obj_train_data")
    write(tmp_path / "obj.names", "cat\n")
    write(
        tmp_path / "obj.data",
        "classes = 1\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n",
    )
    write(
        tmp_path / "train.txt",
        "".join(f"data/obj_train_data/{number}.jpg\n" for number in range(4)),
    )
    train, val = read(tmp_path)
    assert (
        len(train) + len(val) == 4
        and train.classes == ("cat",)
        and np.allclose(train.boxes[0], [15, 12, 25, 18])
    )


def test_a_folder_with_metadata_is_read(tmp_path):
    objects = {"bbox": [[10, 9, 10, 6]], "categories": [0]}
    for part in ("train", "validation"):
        write_scenes(tmp_path / part, tmp_path / "other")
        rows = [
            json.dumps({"file_name": f"{number}.jpg", "objects": objects}) for number in range(4)
        ]
        write(tmp_path / part / "metadata.jsonl", "\n".join(rows))
    train, val = read(tmp_path, box_format="xywh")
    assert (len(train), len(val)) == (4, 4) and train.boxes[0].tolist() == [10, 9, 20, 15]


def test_a_folder_without_parts_is_called_all_images(tmp_path):
    make_mixed(tmp_path, ".")
    assert [source.split_text for source in read(tmp_path)] == [
        "75 % of all images",
        "25 % held out of all images",
    ]


def test_one_file_of_fiftyone_is_divided(tmp_path):
    boxes = [build_annotation(number, [1, 2, 10, 8]) for number in range(8)]
    write_coco(tmp_path, "data", ids=range(8), annotations=boxes)
    (tmp_path / "data.json").rename(tmp_path / "labels.json")
    train, val = read(tmp_path)
    assert (len(train), len(val)) == (6, 2)


@pytest.mark.parametrize(
    "file, name",
    [
        ("training/label_2/0.txt", "KITTI"),
        ("ds0/ann/0.jpg.json", "Supervisely"),
        ("train/_annotations.createml.json", "CreateML"),
        ("train-annotations-bbox.csv", "Open Images"),
        ("annotations.xml", "CVAT for images"),
        ("train/a.json", "LabelMe"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path, file, name):
    write(tmp_path / file, "{}")
    if name in ("LabelMe", "Supervisely"):
        write(tmp_path / "meta.json", "{}")
    message = read_refusal(tmp_path)
    assert f"in the format of {name}" in message and "convert it" in message


def test_what_lies_in_an_unknown_folder_is_named(tmp_path):
    write(tmp_path / "b.npy", "")
    write(tmp_path / "a.mat", "")
    assert "a folder or file (a.mat, b.npy) of a kind that is not known" in read_refusal(tmp_path)
