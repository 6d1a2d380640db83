"""Folders of Pascal VOC: JPEGImages/NAME.jpg, Annotations/NAME.xml, lists of names in ImageSets/Main.

Source: Everingham et al., "The Pascal Visual Object Classes Challenge", 2010, and its development kit.
"""

import os
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa

from common.data.notes import Notes
from common.data.splits import kind_of
from common.detection.data.annotated import AnnotatedImages, image_files
from common.detection.data.box_checks import FoundBoxes, check_files, class_ids
from common.detection.data.folders import (
    Folder,
    add_notes,
    drop_repeated,
    has_pairs,
    is_image,
    name_below,
    refusing,
    text_of,
)
from common.detection.data.stamps import Stamps
from common.errors import Refused
from common.files import SMALL, is_junk, read_bytes

_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class _Part(NamedTuple):
    """Where a part's files are, and the list of its images; None for all that have annotations."""

    annotations: Path
    images: Path
    list_file: Path | None = None


def voc_folder(root: Path) -> Folder | None:
    """The folder `root`, if it has Annotations/ and JPEGImages/.

    Its parts are the lists in ImageSets/Main, such as train or val; without lists, one part of all images.
    """
    folders = root / "Annotations", root / "JPEGImages"
    if not all(folder.is_dir() for folder in folders):
        return None
    files = sorted((root / "ImageSets/Main").glob("*.txt"))
    parts = {file.stem: _Part(*folders, file) for file in files}
    if not any(map(kind_of, parts)):
        return _make_folder(root, {"train": _Part(*folders)})
    for name in list(parts):
        is_of_one_class = not kind_of(name) and kind_of(name.rpartition("_")[2])  # aeroplane_train
        if is_of_one_class:
            del parts[name]
    return _make_folder(root, parts)


def xml_folder(root: Path) -> Folder | None:
    """As other tools write the format: XML files beside the images, or in a folder of their own.

    The parts are train/, val/, ... or else there is one, which is `root`.
    """
    folders = [folder for folder in sorted(root.glob("*/")) if kind_of(folder.name)]
    parts = {folder.name: _find_xml(folder) for folder in folders}
    if not any(parts.values()):
        parts = {"train": _find_xml(root)}
    found = {name: part for name, part in parts.items() if part}
    return _make_folder(root, found) if found else None


def _find_xml(folder: Path) -> _Part | None:
    image_folders = ("JPEGImages", "images", "data", ".")
    xml_folders = ("Annotations", "annotations", "labels", ".")
    for images, annotations in product(image_folders, xml_folders):
        if has_pairs(folder / images, folder / annotations, ".xml"):
            return _Part(folder / annotations, folder / images)
    return None


def _make_folder(root: Path, parts: dict[str, _Part]) -> Folder:
    labels = {}
    for name, part in parts.items():
        labels[name] = name_below(root, part.list_file or part.annotations)
    origins = {name: part.annotations for name, part in parts.items()}
    return Folder(("VOC", root, parts), labels, origins, partial(_read, root, parts))


def _read(
    root: Path, parts: dict[str, _Part], part: str, classes: tuple[str, ...] | None, stamps: Stamps
) -> AnnotatedImages:
    """The images of a list, or all of them. The classes are these, or else the sorted names found.

    Objects marked difficult become `crowd`. Corners are of pixels counted from 1, unless one is 0.
    """
    annotations, image_folder, list_file = parts[part]
    title = f"{root} {part}"
    stamps.take_files([annotations, image_folder] + ([list_file] if list_file else []))
    stems = {file.stem for file in annotations.glob("*.xml") if not is_junk(file.name)}
    files = {os.path.splitext(name)[0]: name for name in sorted(os.listdir(image_folder)) if is_image(name)}
    if list_file:
        lines = [line.strip() for line in text_of(list_file).splitlines() if line.strip()]
        # A list of one class has a column of -1, 0 or 1; names may have spaces.
        listed = [line if line in stems else re.sub(r"\s+-?\d+$", "", line) for line in lines]
        listed = [os.path.splitext(name)[0] if is_image(name) and name not in stems else name for name in listed]
        names, notes = drop_repeated(title, listed)
    else:
        names = sorted(stems)
        unlabelled = sorted(files.keys() - stems)
        image_notes = Notes(title, "images")
        if unlabelled:
            first = files[unlabelled[0]]
            image_notes.leave_out("no XML file has their name", first, count=len(unlabelled))
        notes = image_notes.texts(len(files))
    stamps.take(str(annotations), pa.array([os.fsencode(f"{name}.xml") for name in names], pa.large_binary()))
    sizes, objects = [], []  # objects: row of the image, class, corners, whether it is difficult
    for row, name in enumerate(names):
        size, found_there = _read_xml(annotations / f"{name}.xml")
        sizes.append(size)
        objects += [(row, *found) for found in found_there]
    rows, labels, corners, difficult = zip(*objects, strict=True) if objects else ((),) * 4
    classes = classes or tuple(sorted(set(labels)))
    boxes = np.array(corners, np.float64).reshape(-1, 4)
    if not (boxes == 0).any():
        boxes[:, :2] -= 1  # pixels are counted from 1, the last one included
    boxes[:, 2:] -= boxes[:, :2]
    paths = pa.array([os.fsencode(files.get(name, f"{name}.jpg")) for name in names], pa.large_binary())
    images = image_files(str(image_folder), paths)
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
    return add_notes(check_files(found, stamps), title, notes)


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
            is_difficult = entry.findtext("difficult", "").strip().lower() in ("1", "true", "yes")
            objects.append((name.strip(), [float(corner) for corner in box], is_difficult))
    except (ValueError, OverflowError) as error:
        raise Refused(f"{file}: a size or corner is no number: {error}") from None
    return (width, height), objects
