"""Folders in the format of YOLO. Source: https://docs.ultralytics.com/datasets/detect

images/…/NAME.jpg stands beside labels/…/NAME.txt with a line `class x y width height` for each
object, centres and sizes as shares of the image, or `class x1 y1 x2 y2 …` for an outline.
"""

import os
from array import array
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from common.data.splits import kind_of
from common.detection.data.annotated import AnnotatedImages, image_files
from common.detection.data.box_checks import FoundBoxes, check_files
from common.detection.data.folders import Folder, is_image, refusing, text_of
from common.detection.data.stamps import Stamps
from common.errors import Refused
from common.files import SMALL, read_yaml, walk

_MOST_CLASSES = 2**20  # if no list of names says how many there are


class _Yolo(NamedTuple):
    """Where the parts of a data set are, and which classes it names."""

    title: str
    parts: dict[str, list[Path]]  # by name: folders of images, or text files that list images
    names: tuple[str, ...] | None
    has_keypoints: bool = False  # True if they stand after the four numbers of the box


def yolo_folder(root: Path) -> Folder | None:
    """The data set that the only YAML file, or data.yaml, describes; or else images/ beside labels/."""
    files = [root / "data.yaml"]
    if not files[0].exists():
        files = [file for pattern in ("*.yaml", "*.yml") for file in root.glob(pattern)]
    found = _described(root, *files) if len(files) == 1 else _undescribed(root)
    if not found:
        return None
    labels = {name: ", ".join(os.path.relpath(place, root) for place in places) for name, places in found.parts.items()}
    origins = {name: places[0] for name, places in found.parts.items()}
    return Folder(("YOLO", root, found), labels, origins, partial(_read, found))


def _undescribed(root: Path) -> _Yolo | None:
    parts = _part_folders(root)
    if not parts:
        return None
    listed = next((root / name for name in ("classes.txt", "labels/classes.txt") if (root / name).exists()), None)
    names = tuple(line.strip() for line in text_of(listed).strip().split("\n")) if listed else None
    return _Yolo(str(root), parts, names)


def _part_folders(root: Path) -> dict[str, list[Path]]:
    """images/train beside labels/train, train/images beside train/labels, ...; or images/ beside labels/."""
    if (root / "images").is_dir() and (root / "labels").is_dir():
        folders = [folder for folder in sorted((root / "images").iterdir()) if folder.is_dir()]
        is_parted = any(kind_of(folder.name) for folder in folders)
        return {folder.name: [folder] for folder in folders} if is_parted else {"train": [root / "images"]}
    folders = sorted(root.iterdir()) if root.is_dir() else []
    found = [folder for folder in folders if (folder / "images").is_dir() and (folder / "labels").is_dir()]
    return {folder.name: [folder / "images"] for folder in found if any(kind_of(each.name) for each in found)}


def _described(root: Path, file: Path) -> _Yolo | None:
    with refusing(file, "YAML"):
        content = read_yaml(file, SMALL)
    content = content if isinstance(content, dict) else {}
    keys = [key for key in content if kind_of(key) and content[key]]
    if not keys and "names" not in content:
        return None
    if not keys:
        raise Refused(f"{file}: lacks the key train")
    names = content.get("names")
    if isinstance(names, dict):
        names = [names.get(str(number)) for number in range(len(names))]
    if not isinstance(names, list) or not names or None in names:
        raise Refused(f"{file}: lacks the key names, with a list, or the name of each class from 0 up")
    starts, parts = [Path(str(content.get("path") or ".")), Path(".")], {}
    for key in keys:
        entries = content[key] if isinstance(content[key], list) else [content[key]]
        # Many test parts are published without images.
        with suppress(Refused) if kind_of(key) == "test" else nullcontext():
            parts[key] = [_place(file, root, starts, key, str(entry)) for entry in entries]
    return _Yolo(str(file), parts, tuple(map(str, names)), "kpt_shape" in content)


def _place(file: Path, root: Path, starts: list[Path], key: str, entry: str) -> Path:
    """Paths are relative to the file's folder or to `path` in it, or (Roboflow) have one `../` too many."""
    places = [root / start / entry for start in starts] + [root / entry.removeprefix("../")]
    for place in places:
        if place.exists():
            return Path(os.path.abspath(place))
    raise Refused(f"{file}: {key}: {entry} is not there; looked at {', '.join(map(str, dict.fromkeys(places)))}")


def _read(folder: _Yolo, part: str, classes: tuple[str, ...] | None, stamps: Stamps) -> AnnotatedImages:
    """A part, with these classes if the data name none. Boxes are of upright images, as YOLO reads them."""
    names, places = folder.names or classes or (), folder.parts[part]
    files = sorted({file for place in places for file in _images(place, stamps)})
    if not files:
        raise Refused(f"{folder.title}: no images in {part}, that is {', '.join(map(str, places))}")
    stamps.take_files(map(_labels_of, files))
    rows, labels, boxes = array("q"), array("q"), array("d")
    for row, file in enumerate(files):
        for label, box in _read_labels(_labels_of(file), len(names), folder.has_keypoints):
            rows.append(row)
            labels.append(label)
            boxes.extend(box)
    root = os.path.commonpath([os.path.dirname(file) for file in files])
    paths = pa.array([os.fsencode(os.path.relpath(file, root)) for file in files], pa.large_binary())
    found = FoundBoxes(
        title=f"{folder.title} {part}",
        images=image_files(root, paths),
        classes=names or tuple(map(str, range(max(labels, default=-1) + 1))),
        rows=np.array(rows, np.int64),
        boxes=np.array(boxes).reshape(-1, 4),
        labels=np.array(labels, np.int64),
        upright=True,
        relative=True,
    )
    return check_files(found, stamps)


def _images(place: Path, stamps: Stamps) -> list[str]:
    stamps.take_files([place])
    if place.is_dir():
        found = []
        for _, entries in walk(place):
            stamps.take_files(entry.path for entry in entries if entry.is_dir())  # before the walk enters them
            found += [entry.path for entry in entries if not entry.is_dir() and is_image(entry.name)]
        return found
    lines = (line.strip() for line in text_of(place).splitlines())
    return [os.path.normpath(place.parent / line) for line in lines if line]


def _labels_of(image: str) -> str:
    """The label file: the last folder images/ in the path becomes labels/; else it lies beside the image."""
    stem = os.path.splitext(image)[0]
    above, found, below = stem.rpartition("/images/")
    return f"{above}/labels/{below}.txt" if found else f"{stem}.txt"


def _read_labels(file: str, classes: int, has_keypoints: bool) -> list[tuple[int, tuple[float, ...]]]:
    """Class and left, top, width, height of each line, in shares of the image; no file means no objects.

    `classes` is how many there are, 0 if that is unknown.
    """
    try:
        lines = text_of(file).splitlines()
    except FileNotFoundError:
        return []
    objects: list[tuple[int, tuple[float, ...]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            label, *values = map(float, line.split())
            if not label.is_integer():
                raise ValueError
        except ValueError:
            raise Refused(f"{file}:{number}: {line[:60]!r} are no numbers: class x y width height") from None
        if not 0 <= label < (classes or _MOST_CLASSES):
            raise Refused(f"{file}:{number}: unknown class {label:.0f}; there are {classes or 'classes'} from 0 up")
        if len(values) == 4 or (has_keypoints and len(values) > 4):
            x, y, width, height = values[:4]
            box = (x - width / 2, y - height / 2, width, height)
        elif len(values) >= 6 and len(values) % 2 == 0:
            left, top = min(values[::2]), min(values[1::2])
            box = (left, top, max(values[::2]) - left, max(values[1::2]) - top)
        else:
            raise Refused(
                f"{file}:{number}: {1 + len(values)} numbers; needs 5, or a class and the corners of an outline"
            )
        objects.append((int(label), box))
    return objects
