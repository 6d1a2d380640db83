"""Small annotated images in COCO's, VOC's and YOLO's formats, and their comparison."""

import copy
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageDraw

from common.detection.data.annotated import AnnotatedImages


def check_same(actual: AnnotatedImages, expected: AnnotatedImages):
    for field in dataclasses.fields(AnnotatedImages):
        value = getattr(actual, field.name)
        target = getattr(expected, field.name)
        if isinstance(value, np.ndarray):
            assert (
                value.dtype == target.dtype
                and target.flags.writeable
                and np.array_equal(value, target)
            ), field.name
        elif field.name == "images":
            assert value.root == target.root and value.paths.equals(target.paths)
        elif field.name == "masks" and value:
            assert value.shapes.equals(target.shapes) and np.array_equal(
                value.orientations, target.orientations
            )
        else:
            assert value == target and type(value) is type(target), field.name
    everything = np.arange(len(actual))
    assert actual.fingerprint == expected.fingerprint == expected.select(everything).fingerprint
    assert expected.hash_images(7).tolist() == actual.hash_images(7).tolist()


def draw_picture(path: Path, size=(40, 30), box=None, orientation=1) -> Path:
    """Grey with a red box, saved in an EXIF orientation; box and size are of the stored pixels."""
    image = Image.new("RGB", size, (90, 90, 90))
    if box:
        left, top, right, bottom = box
        ImageDraw.Draw(image).rectangle((left, top, right - 1, bottom - 1), fill=(255, 0, 0))
    exif = Image.Exif()
    if orientation != 1:
        exif[ExifTags.Base.Orientation] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(
        path, exif=exif, **({"quality": 100, "subsampling": 0} if path.suffix == ".jpg" else {})
    )
    with path.open("ab") as file:  # decoders ignore it, and no two pictures are the same file
        file.write(os.fsencode(path).rjust(200))
    return path


CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}, {"id": 90, "name": "bird"}]


def build_annotation(image_id, box, category_id=3, **more):
    return {
        "image_id": image_id,
        "bbox": box,
        "category_id": category_id,
        "area": 12.5,
        "iscrowd": 0,
    } | more


def write_coco(
    root: Path,
    part="train",
    ids=(10, 4, 25),
    annotations=None,
    categories=CATEGORIES,
    change=None,
    **image,
) -> Path:
    for number in ids:
        draw_picture(root / part / f"{number}.jpg")
    if annotations is None:
        annotations = [
            build_annotation(4, [1, 2, 10, 8], 90, segmentation=[[1, 2, 3, 4, 5, 6]]),
            build_annotation(
                25, [0, 0, 40, 30], 7, iscrowd=1, segmentation={"counts": [1, 2], "size": [30, 40]}
            ),
            build_annotation(4, [3.5, 4.25, 5, 6]),
        ]
    images = [{"id": n, "file_name": f"{n}.jpg", "width": 40, "height": 30} | image for n in ids]
    content = {
        "info": {},
        "images": images,
        "annotations": annotations,
        "categories": copy.deepcopy(categories),
    }
    if change:
        change(content)
    (root / f"{part}.json").write_text(json.dumps(content))
    return root


def write_voc(root: Path, parts=None, **changes) -> Path:
    objects = {
        "a": [("dog", (1, 1, 40, 30), 0), ("cat", (5, 6, 10, 12), 1)],
        "b": [],
        "c": [("cat", (2, 3, 4, 5), 0)],
        "d": [("dog", (2, 3, 4, 5), 0)],
    } | changes
    for name, content in objects.items():
        draw_picture(root / "JPEGImages" / f"{name}.jpg")
        (root / "Annotations").mkdir(exist_ok=True)
        (root / "Annotations" / f"{name}.xml").write_text(
            content if isinstance(content, str) else format_voc_xml(content)
        )
    for part, names in (parts or {"train": "abd", "val": "c"}).items():
        (root / "ImageSets/Main").mkdir(parents=True, exist_ok=True)
        (root / "ImageSets/Main" / f"{part}.txt").write_text("".join(f"{name}\n" for name in names))
    return root


def write_yolo(root: Path, labels=None, content=None) -> Path:
    labels = {
        "train/a": "0 0.5 0.5 0.5 0.4\n1 .25 .5 .5 1\n",
        "train/b": None,
        "train/c": "",
        "val/d": "1 .5 .5 .1 .1",
    } | (labels or {})
    for name, text in labels.items():
        draw_picture(root / "images" / f"{name}.jpg")
        if text is not None:
            (root / "labels" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "labels" / f"{name}.txt").write_text(text)
    content = (
        {"train": "images/train", "val": "images/val", "names": ["cat", "dog"]}
        if content is None
        else content
    )
    if content:
        (root / "data.yaml").write_text(json.dumps(content))
    return root


def format_voc_xml(objects, size=(40, 30)) -> str:
    lines = "".join(
        f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>"
        + "".join(
            f"<{key}>{value}</{key}>"
            for key, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
        )
        + "</bndbox><part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
        for name, box, difficult in objects
    )
    return f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{lines}</annotation>"
