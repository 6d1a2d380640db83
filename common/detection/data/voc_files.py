"""Folders of Pascal VOC: JPEGImages/NAME.jpg, Annotations/NAME.xml, lists of names in ImageSets/Main.

Source: Everingham et al., "The Pascal Visual Object Classes Challenge", 2010, and its development kit.
"""

import os
import re
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa

from common.data.notes import Notes
from common.data.source import encode_paths
from common.data.splits import get_split_kind
from common.detection.data.annotated import AnnotatedImages, build_image_files
from common.detection.data.box_checks import RawBoxes, check_files, find_class_ids
from common.detection.data.file_stats import FileStats
from common.detection.data.folders import (
    Folder,
    drop_repeated,
    format_relative,
    has_pairs,
    is_image_name,
    read_text_file,
    refuse_unreadable,
)
from common.errors import Refused
from common.files import SMALL, is_junk, read_bytes

_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class _Split(NamedTuple):
    """Where a split's files are, and the list of its images; None for all that have annotations."""

    annotations: Path
    images: Path
    list_file: Path | None = None


class _Object(NamedTuple):
    """An object of an image."""

    label: str
    corners: list[float]
    is_difficult: bool


def find_voc_folder(root: Path) -> Folder | None:
    """The folder `root`, if it has Annotations/ and JPEGImages/.

    Its splits are the lists in ImageSets/Main, such as train or val; without lists, one split of
    all images.
    """
    annotations = root / "Annotations"
    images = root / "JPEGImages"
    if not annotations.is_dir() or not images.is_dir():
        return None
    files = sorted((root / "ImageSets/Main").glob("*.txt"))
    splits = {file.stem: _Split(annotations, images, file) for file in files}
    if not any(get_split_kind(name) for name in splits):
        return _open_folder(root, {"train": _Split(annotations, images)})
    for name in list(splits):
        is_of_one_class = not get_split_kind(name) and get_split_kind(
            name.rpartition("_")[2]
        )  # aeroplane_train
        if is_of_one_class:
            del splits[name]
    return _open_folder(root, splits)


def find_xml_folder(root: Path) -> Folder | None:
    """As other tools write the format: XML files beside the images, or in a folder of their own.

    The splits are train/, val/, ... or else there is one, which is `root`.
    """
    splits = {}
    for folder in sorted(root.glob("*/")):
        if get_split_kind(folder.name):
            split = _find_xml(folder)
            if split:
                splits[folder.name] = split
    if not splits:
        split = _find_xml(root)
        if split is None:
            return None
        splits = {"train": split}
    return _open_folder(root, splits)


def _find_xml(folder: Path) -> _Split | None:
    image_folders = ("JPEGImages", "images", "data", ".")
    xml_folders = ("Annotations", "annotations", "labels", ".")
    for images, annotations in product(image_folders, xml_folders):
        if has_pairs(folder / images, folder / annotations, ".xml"):
            return _Split(folder / annotations, folder / images)
    return None


def _open_folder(root: Path, splits: dict[str, _Split]) -> Folder:
    split_texts = {}
    for name, split in splits.items():
        split_texts[name] = format_relative(root, split.list_file or split.annotations)
    return Folder(
        identity=("VOC", root, splits),
        split_texts=split_texts,
        origins={name: split.annotations for name, split in splits.items()},
        read_split=partial(_read_split, root, splits),
    )


def _read_split(
    root: Path,
    splits: dict[str, _Split],
    name: str,
    classes: tuple[str, ...] | None,
    stats: FileStats,
) -> AnnotatedImages:
    """The images of a list, or all of them. The classes are these, or else the sorted names of objects.

    Objects marked difficult become `crowd`. Corners are of pixels counted from 1, unless one is 0.
    """
    annotations, image_folder, list_file = splits[name]
    title = f"{root} {name}"
    stats.add_files([annotations, image_folder])
    if list_file:
        stats.add_files([list_file])
    stems = {file.stem for file in annotations.glob("*.xml") if not is_junk(file.name)}
    image_names = _list_images(image_folder)
    if list_file:
        names, notes = drop_repeated(title, _read_list(list_file, stems))
    else:
        names = sorted(stems)
        notes = _note_unlabelled(title, image_names, stems)
    stats.add_files(f"{annotations}/{name}.xml" for name in names)
    contents = [_read_xml(annotations / f"{name}.xml") for name in names]
    sizes = [size for size, _ in contents]
    objects = list(chain.from_iterable(image_objects for _, image_objects in contents))
    object_counts = [len(image_objects) for _, image_objects in contents]
    image_indices = np.repeat(np.arange(len(names)), np.array(object_counts, np.int64))
    labels = [entry.label for entry in objects]
    classes = classes or tuple(sorted(set(labels)))
    paths = encode_paths(image_names.get(name, f"{name}.jpg") for name in names)
    images = build_image_files(str(image_folder), paths)
    raw = RawBoxes(
        title=title,
        images=images,
        classes=classes,
        sizes=np.array(sizes, np.int64).reshape(-1, 2),
        image_indices=image_indices,
        boxes=_to_boxes(objects),
        labels=find_class_ids(
            title,
            images,
            image_indices,
            box_classes=pa.array(labels, pa.string()),
            classes=pa.array(classes, pa.string()),
        ),
        crowd=np.array([entry.is_difficult for entry in objects], bool),
        file_notes=notes,
    )
    return check_files(raw, stats)


def _list_images(folder: Path) -> dict[str, str]:
    """The names of the images in a folder, by the names without suffixes."""
    names = {}
    for name in sorted(os.listdir(folder)):
        if is_image_name(name):
            names[os.path.splitext(name)[0]] = name
    return names


def _read_list(file: Path, stems: set[str]) -> list[str]:
    """The names in a list of images without their suffixes; `stems` are those that have annotations."""
    names = []
    for line in read_text_file(file).splitlines():
        name = line.strip()
        # Names may have spaces, and a list of one class has a column of -1, 0 or 1.
        if name not in stems:
            name = re.sub(r"\s+-?\d+$", "", name)
        if name not in stems and is_image_name(name):
            name = os.path.splitext(name)[0]
        if name:
            names.append(name)
    return names


def _note_unlabelled(title: str, image_names: dict[str, str], stems: set[str]) -> tuple[str, ...]:
    notes = Notes(title, "images")
    unlabelled = sorted(image_names.keys() - stems)
    if unlabelled:
        first = image_names[unlabelled[0]]
        notes.leave_out("no XML file has their name", first, count=len(unlabelled))
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
        with refuse_unreadable(file, "XML"):
            tree = ElementTree.fromstring(read_bytes(file, SMALL))
    except FileNotFoundError:
        raise Refused(
            f"{file}: missing, but its image is listed; add it, or take the image from the list"
        ) from None
    try:
        width = int(float(tree.findtext("size/width") or 0))
        height = int(float(tree.findtext("size/height") or 0))
        if not (0 <= width < 2**31 and 0 <= height < 2**31):
            raise Refused(f"{file}: a size of {width} x {height} pixels; correct it")
        objects = []
        for entry in tree.iter("object"):
            name = entry.findtext("name")
            corner_texts = [entry.findtext(f"bndbox/{corner}", "") for corner in _CORNERS]
            if not name or not all(corner_texts):
                raise Refused(
                    f"{file}: an object lacks its name or one of bndbox/{', '.join(_CORNERS)}"
                )
            is_difficult = entry.findtext("difficult", "").strip().lower() in ("1", "true", "yes")
            corners = [float(corner) for corner in corner_texts]
            objects.append(_Object(name.strip(), corners, is_difficult))
    except (ValueError, OverflowError) as error:
        raise Refused(f"{file}: a size or corner is no number: {error}") from None
    return (width, height), objects
