"""Folders in the format of YOLO. Source: https://docs.ultralytics.com/datasets/detect

images/…/NAME.jpg stands beside labels/…/NAME.txt with a line `class x y width height` for each
object, centres and sizes as shares of the image, or `class x1 y1 x2 y2 …` for an outline.
"""

import os
import re
from array import array
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from common.data.splits import kind_of
from common.detection.data.annotated import AnnotatedImages, ImageFiles
from common.detection.data.box_checks import FoundBoxes, check_files
from common.detection.data.folders import Folder, is_image, refusing, text_of
from common.detection.data.stamps import Stamps
from common.errors import Refused
from common.files import SMALL, read_yaml, walk

_MOST_CLASSES = 2**20  # if no list of names says how many there are


@dataclass(frozen=True)
class _Yolo:
    """Where the parts of a data set are, and which classes it names."""

    title: str
    parts: dict[str, list[Path]]  # by name: folders of images, or text files that list images
    names: dict[int, str] | None
    has_keypoints: bool = False  # after the four numbers of the box


def yolo_folder(path: Path) -> Folder | None:
    """The data set that `data.yaml` in `path` (or the only YAML file there) describes, or else images/ beside labels/."""
    if not (found := _find(path)):
        return None
    labels = {name: ", ".join(os.path.relpath(place, path) for place in places) for name, places in found.parts.items()}

    origins = {name: places[0] for name, places in found.parts.items()}
    return Folder(("YOLO", path, found), labels, origins, partial(_read, found))


def _find(root: Path) -> _Yolo | None:
    file = root / "data.yaml"
    if not file.exists():
        others = [other for pattern in ("*.yaml", "*.yml") for other in root.glob(pattern)] if root.is_dir() else []
        file = others[0] if len(others) == 1 else None
    if file:
        return _described(root, file)
    parts = _part_folders(root)
    if not parts:
        return None
    listed = next((root / name for name in ("classes.txt", "labels/classes.txt") if (root / name).exists()), None)
    lines = enumerate(text_of(listed).split("\n")) if listed else ()
    names = {place: name.strip() for place, name in lines if name.strip()} if listed else None
    above = root.parent / "data.yaml"
    if names is None and kind_of(root.name) and above.exists():  # a single part: the file beside it names its classes
        content = _content(above)
        return _Yolo(str(root), parts, _names(above, content), "kpt_shape" in content)
    return _Yolo(str(root), parts, names)


def _part_folders(root: Path) -> dict[str, list[Path]]:
    """images/train beside labels/train, or train/images beside train/labels, and so on; or all of images/ beside labels/."""
    if (root / "images").is_dir() and (root / "labels").is_dir():
        folders = [folder for folder in sorted((root / "images").iterdir()) if folder.is_dir()]
        is_parted = any(kind_of(folder.name) for folder in folders)
        return {folder.name: [folder] for folder in folders} if is_parted else {"train": [root / "images"]}
    folders = sorted(root.iterdir()) if root.is_dir() else []
    found = [folder for folder in folders if (folder / "images").is_dir() and (folder / "labels").is_dir()]
    return {folder.name: [folder / "images"] for folder in found if any(kind_of(each.name) for each in found)}


def _described(root: Path, file: Path) -> _Yolo | None:
    content = _content(file)
    keys = [key for key in content if kind_of(key) and content[key]]
    if not keys and "names" not in content:
        return None
    if not keys:
        raise Refused(f"{file}: lacks the key train")
    names, starts = _names(file, content), [Path(str(content.get("path") or ".")), Path(".")]
    parts = {}
    for key in keys:
        entries = content[key] if isinstance(content[key], list) else [content[key]]
        # Many test parts are published without images.
        with suppress(Refused) if kind_of(key) == "test" else nullcontext():
            parts[key] = [_place(file, root, starts, key, str(entry)) for entry in entries]
    return _Yolo(str(file), parts, names, "kpt_shape" in content)


def _content(file: Path) -> dict:
    """Keys and values of a YAML file; {} if it holds something else."""
    with refusing(file, "YAML"):
        content = read_yaml(file, SMALL)
    return content if isinstance(content, dict) else {}


def _names(file: Path, content: dict) -> dict[int, str]:
    names = content.get("names")
    if not names:
        raise Refused(f"{file}: lacks the key names")
    names = dict(enumerate(names)) if isinstance(names, list) else names
    if isinstance(names, dict):
        names = {int(place) if re.fullmatch("[0-9]{1,9}", str(place)) else place: name for place, name in names.items()}
    if not isinstance(names, dict) or set(names) != set(range(len(names))):
        raise Refused(f"{file}: names must be a list, or give each class from 0 up its name")
    return {place: str(name) for place, name in names.items()}


def _place(file: Path, root: Path, starts: list[Path], key: str, entry: str) -> Path:
    """Paths are relative to the file's own folder or to `path` in it, or (Roboflow) have one `../` too many."""
    places = [root / start / entry for start in starts] + [root / entry.removeprefix("../")]
    for place in places:
        if place.exists():
            return Path(os.path.abspath(place))
    raise Refused(f"{file}: {key}: {entry} is not there; looked at {', '.join(map(str, dict.fromkeys(places)))}")


def _read(folder: _Yolo, part: str, classes: tuple[str, ...] | None, stamps: Stamps) -> AnnotatedImages:
    """A part, with these classes if the data name none. Boxes are of the upright image, as YOLO's own readers take them."""
    names, places = folder.names or (classes and dict(enumerate(classes))), folder.parts[part]
    files = sorted({file for place in places for file in _images(place, stamps)})
    if not files:
        raise Refused(f"{folder.title}: no images in {part}, that is {', '.join(map(str, places))}")
    stamps.take_files(map(_labels_of, files))
    rows, labels, boxes = array("q"), array("q"), array("d")
    for row, file in enumerate(files):
        for label, box in _read_labels(_labels_of(file), len(names) if names else None, folder.has_keypoints):
            rows.append(row)
            labels.append(label)
            boxes.extend(box)
    if names is None:
        names = {label: str(label) for label in range(max(labels, default=-1) + 1)}
    root = os.path.commonpath([os.path.dirname(file) for file in files])
    paths = pa.array([os.fsencode(os.path.relpath(file, root)) for file in files], pa.large_binary())
    found = FoundBoxes(
        title=f"{folder.title} {part}",
        images=ImageFiles(root, paths),
        classes=tuple(names[label] for label in range(len(names))),
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
    """The label file: the last folder named images in the path becomes labels; if there is none, it lies beside the image."""
    stem = os.path.splitext(image)[0]
    above, found, below = stem.rpartition("/images/")
    return f"{above}/labels/{below}.txt" if found else f"{stem}.txt"


def _class_of(word: str) -> int:
    if not (value := float(word)).is_integer():
        raise ValueError
    return int(value)


def _read_labels(file: str, classes: int | None, has_keypoints: bool) -> list[tuple[int, tuple[float, ...]]]:
    """Class and left, top, width, height of each line, as shares of the image; no file means no objects."""
    try:
        lines = text_of(file).splitlines()
    except FileNotFoundError:
        return []
    objects = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        try:
            label, values = _class_of(words[0]), [float(word) for word in words[1:]]
        except (ValueError, OverflowError):
            raise Refused(f"{file}:{number}: {line[:60]!r} are no numbers: class x y width height") from None
        if not 0 <= label < (classes or _MOST_CLASSES):
            raise Refused(f"{file}:{number}: unknown class {label}; there are {classes or 'classes'} from 0 up")
        if len(values) == 4 or (has_keypoints and len(values) > 4):
            x, y, width, height = values[:4]
            objects.append((label, (x - width / 2, y - height / 2, width, height)))
        elif len(values) >= 6 and len(values) % 2 == 0:
            left, top = min(values[::2]), min(values[1::2])
            objects.append((label, (left, top, max(values[::2]) - left, max(values[1::2]) - top)))
        else:
            raise Refused(f"{file}:{number}: {len(words)} numbers; needs 5, or a class and the corners of an outline")
    return objects
