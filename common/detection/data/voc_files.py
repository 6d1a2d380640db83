"""Folders of Pascal VOC: JPEGImages/NAME.jpg, Annotations/NAME.xml, lists of names in ImageSets/Main.

Source: Everingham et al., "The Pascal Visual Object Classes Challenge", 2010, and its development kit.
"""

import os
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa

from common.data.splits import kind_of
from common.detection.data.annotated import AnnotatedImages, image_files
from common.detection.data.box_checks import FoundBoxes, check_files, class_ids
from common.detection.data.folders import Folder, is_image, refusing, text_of
from common.detection.data.stamps import Stamps
from common.errors import Refused
from common.files import SMALL, read_bytes

_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def voc_folder(root: Path) -> Folder | None:
    """The folder `root`, if it has Annotations/ and JPEGImages/.

    Its parts are the lists in ImageSets/Main, such as train or val; without lists, one part of all images.
    """
    if not ((root / "Annotations").is_dir() and (root / "JPEGImages").is_dir()):
        return None
    lists: dict[str, Path | None] = {file.stem: file for file in sorted((root / "ImageSets/Main").glob("*.txt"))}
    if any(map(kind_of, lists)):  # but no lists of one class, aeroplane_train.txt
        lists = {name: file for name, file in lists.items() if kind_of(name) or not kind_of(name.rpartition("_")[2])}
    else:
        lists = {"train": None}
    labels = {name: str(file.relative_to(root)) if file else "all images" for name, file in lists.items()}
    return Folder(("VOC", root, lists), labels, dict.fromkeys(lists, root / "Annotations"), partial(_read, root, lists))


def _read(
    root: Path, lists: dict[str, Path | None], part: str, classes: tuple[str, ...] | None, stamps: Stamps
) -> AnnotatedImages:
    """The images of a list, or all of them. The classes are these, or else the sorted names found.

    Objects marked difficult become `crowd`. Corners are of pixels counted from 1, unless one is 0.
    """
    names_file = lists[part]
    stamps.take_files([root / "Annotations", root / "JPEGImages", *([names_file] if names_file else [])])
    if names_file:
        names = [line.split()[0] for line in text_of(names_file).splitlines() if line.strip()]
    else:
        names = sorted(file.stem for file in (root / "Annotations").glob("*.xml"))
    files = {os.path.splitext(name)[0]: name for name in sorted(os.listdir(root / "JPEGImages")) if is_image(name)}
    stamps.take(f"{root}/Annotations", pa.array([os.fsencode(f"{name}.xml") for name in names], pa.large_binary()))
    sizes, objects = [], []  # objects: row of the image, class, corners, whether it is difficult
    for row, name in enumerate(names):
        size, found_there = _read_xml(root / "Annotations" / f"{name}.xml")
        sizes.append(size)
        objects += [(row, *found) for found in found_there]
    rows, labels, corners, difficult = zip(*objects, strict=True) if objects else ((),) * 4
    classes = classes or tuple(sorted(set(labels)))
    boxes = np.array(corners, np.float64).reshape(-1, 4)
    if not (boxes == 0).any():
        boxes[:, :2] -= 1  # pixels are counted from 1, the last one included
    boxes[:, 2:] -= boxes[:, :2]
    paths = pa.array([os.fsencode(files.get(name, f"{name}.jpg")) for name in names], pa.large_binary())
    title, images = f"{root} {part}", image_files(f"{root}/JPEGImages", paths)
    found = FoundBoxes(
        title=title,
        images=images,
        classes=classes,
        sizes=np.array(sizes, np.int64).reshape(-1, 2),
        rows=np.array(rows, np.int64),
        boxes=boxes,
        labels=class_ids(title, images, np.array(rows), pa.array(labels, pa.string()), pa.array(classes, pa.string())),
        crowd=np.array(difficult, bool),
    )
    return check_files(found, stamps)


def _read_xml(file: Path) -> tuple[tuple[int, int], list[tuple[str, list[float], bool]]]:
    """Width and height (0 if unknown); class, corners and True if difficult, of each object of a file."""
    try:
        with refusing(file, "XML"):
            tree = ElementTree.fromstring(read_bytes(file, SMALL))
    except FileNotFoundError:
        raise Refused(f"{file}: missing, but its image is listed; add it, or take the image from the list") from None
    try:
        width, height = (int(float(tree.findtext(f"size/{side}") or 0)) for side in ("width", "height"))
        if not (0 <= width < 2**31 and 0 <= height < 2**31):
            raise Refused(f"{file}: a size of {width} x {height} pixels; correct it")
        objects = []
        for entry in tree.iter("object"):
            name, box = entry.findtext("name"), [entry.findtext(f"bndbox/{corner}", "") for corner in _CORNERS]
            if not name or not all(box):
                raise Refused(f"{file}: an object lacks its name or one of bndbox/{', '.join(_CORNERS)}")
            is_difficult = entry.findtext("difficult", "").strip() == "1"
            objects.append((name.strip(), [float(corner) for corner in box], is_difficult))
    except (ValueError, OverflowError) as error:
        raise Refused(f"{file}: a size or corner is no number: {error}") from None
    return (width, height), objects
