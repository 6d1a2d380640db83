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
from common.data.source import encode_paths
from common.data.splits import get_split_kind
from common.detection.data.annotated import AnnotatedImages, image_files
from common.detection.data.box_checks import RawBoxes, check_files, find_class_ids
from common.detection.data.folders import (
    Folder,
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


class _Object(NamedTuple):
    """An object of an image."""

    label: str
    corners: list[float]
    is_difficult: bool


def voc_folder(root: Path) -> Folder | None:
    """The folder `root`, if it has Annotations/ and JPEGImages/.

    Its parts are the lists in ImageSets/Main, such as train or val; without lists, one part of all images.
    """
    folders = root / "Annotations", root / "JPEGImages"
    if not all(folder.is_dir() for folder in folders):
        return None
    files = sorted((root / "ImageSets/Main").glob("*.txt"))
    parts = {file.stem: _Part(*folders, file) for file in files}
    if not any(map(get_split_kind, parts)):
        return _make_folder(root, {"train": _Part(*folders)})
    for name in list(parts):
        is_of_one_class = not get_split_kind(name) and get_split_kind(
            name.rpartition("_")[2]
        )  # aeroplane_train
        if is_of_one_class:
            del parts[name]
    return _make_folder(root, parts)


def xml_folder(root: Path) -> Folder | None:
    """As other tools write the format: XML files beside the images, or in a folder of their own.

    The parts are train/, val/, ... or else there is one, which is `root`.
    """
    folders = [folder for folder in sorted(root.glob("*/")) if get_split_kind(folder.name)]
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
    image_names = {
        os.path.splitext(name)[0]: name
        for name in sorted(os.listdir(image_folder))
        if is_image(name)
    }
    if list_file:
        names, notes = drop_repeated(title, _read_list(list_file, stems))
    else:
        names = sorted(stems)
        notes = _note_unlabelled(title, image_names, stems)
    stamps.take_files(f"{annotations}/{name}.xml" for name in names)
    sizes = []
    rows = []
    objects: list[_Object] = []
    for row, name in enumerate(names):
        size, image_objects = _read_xml(annotations / f"{name}.xml")
        sizes.append(size)
        rows += [row] * len(image_objects)
        objects += image_objects
    labels = [entry.label for entry in objects]
    classes = classes or tuple(sorted(set(labels)))
    paths = encode_paths(image_names.get(name, f"{name}.jpg") for name in names)
    images = image_files(str(image_folder), paths)
    text = pa.string()
    raw = RawBoxes(
        title=title,
        images=images,
        classes=classes,
        sizes=np.array(sizes, np.int64).reshape(-1, 2),
        rows=np.array(rows, np.int64),
        boxes=_to_boxes(objects),
        labels=find_class_ids(
            title, images, np.array(rows), pa.array(labels, text), pa.array(classes, text)
        ),
        crowd=np.array([entry.is_difficult for entry in objects], bool),
        file_notes=notes,
    )
    return check_files(raw, stamps)


def _read_list(file: Path, stems: set[str]) -> list[str]:
    """The names in a list of images without their suffixes; `stems` are those that have annotations."""
    names = []
    for line in text_of(file).splitlines():
        name = line.strip()
        # Names may have spaces, and a list of one class has a column of -1, 0 or 1.
        if name not in stems:
            name = re.sub(r"\s+-?\d+$", "", name)
        if name not in stems and is_image(name):
            name = os.path.splitext(name)[0]
        if name:
            names.append(name)
    return names


def _note_unlabelled(title: str, image_names: dict[str, str], stems: set[str]) -> tuple[str, ...]:
    notes = Notes(title, "images")
    unlabelled = sorted(image_names.keys() - stems)
    if unlabelled:
        notes.leave_out(
            "no XML file has their name", image_names[unlabelled[0]], count=len(unlabelled)
        )
    return notes.format_lines(len(image_names))


def _to_boxes(objects: list[_Object]) -> np.ndarray:
    """float64[M, 4] left, top, width, height."""
    boxes = np.array([entry.corners for entry in objects], np.float64).reshape(-1, 4)
    if not (boxes == 0).any():
        boxes[:, :2] -= 1  # pixels are counted from 1, the last one included
    boxes[:, 2:] -= boxes[:, :2]
    return boxes


def _read_xml(file: Path) -> tuple[tuple[int, int], list[_Object]]:
    """Width and height of the image, 0 if unknown, and the objects of a file."""
    try:
        with refusing(file, "XML"):
            tree = ElementTree.fromstring(read_bytes(file, SMALL))
    except FileNotFoundError:
        raise Refused(
            f"{file}: missing, but its image is listed; add it, or take the image from the list"
        ) from None
    try:
        width, height = (
            int(float(tree.findtext(f"size/{side}") or 0)) for side in ("width", "height")
        )
        if not (0 <= width < 2**31 and 0 <= height < 2**31):
            raise Refused(f"{file}: a size of {width} x {height} pixels; correct it")
        objects = []
        for entry in tree.iter("object"):
            name = entry.findtext("name")
            corners = [entry.findtext(f"bndbox/{corner}", "") for corner in _CORNERS]
            if not name or not all(corners):
                raise Refused(
                    f"{file}: an object lacks its name or one of bndbox/{', '.join(_CORNERS)}"
                )
            is_difficult = entry.findtext("difficult", "").strip().lower() in ("1", "true", "yes")
            objects.append(_Object(name.strip(), list(map(float, corners)), is_difficult))
    except (ValueError, OverflowError) as error:
        raise Refused(f"{file}: a size or corner is no number: {error}") from None
    return (width, height), objects
