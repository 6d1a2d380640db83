"""Folders in the format of YOLO. Source: https://docs.ultralytics.com/datasets/detect

images/…/NAME.jpg stands beside labels/…/NAME.txt with a line `class x y width height` for each
object, centres and sizes as shares of the image, or `class x1 y1 x2 y2 …` for an outline.
"""

import glob
import os
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.data.notes import Notes
from common.data.source import encode_paths
from common.data.splits import get_split_kind
from common.detection.data.annotated import AnnotatedImages, image_files
from common.detection.data.box_checks import RawBoxes, check_files
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
from common.files import SMALL, is_junk, read_yaml, walk

_MOST_CLASSES = 2**20  # if no list of names says how many there are
# The largest share of images without a label file, if as many label files have no image.
_MAX_UNMATCHED = 0.4
_ADVICE = (
    "a label file needs its image's name: é is not %C3%A9, composed letters are not decomposed "
    "ones, and HEIC is not read"
)
_NULLS = ("", "~", "null", "[]")
# Lists of class names: a line for each. LabelImg, Label Studio, CVAT and Roboflow write them there.
_NAME_LISTS = (
    "classes.txt",
    "*/classes.txt",
    "labels/*/classes.txt",
    "obj.names",
    "*/_darknet.labels",
)


class _Yolo(NamedTuple):
    """Where the parts of a data set are, and which classes it names."""

    root: Path
    title: str
    parts: dict[str, list[Path]]  # by name: folders of images, or text files that list images
    names: tuple[str, ...] | None
    has_keypoints: bool = False  # True if they stand after the four numbers of the box


def yolo_folder(path: Path) -> Folder | None:
    """The data set that a YAML file, or the one in a folder, describes; else images and labels."""
    is_description = path.suffix in (".yaml", ".yml", ".data") and path.is_file()
    root = path.parent if is_description else path
    file = path if is_description else _find_description(root)
    found = _described(root, file) if file else _undescribed(root)
    if not found:
        return None
    labels = {
        name: ", ".join(name_below(root, place) for place in places)
        for name, places in found.parts.items()
    }
    origins = {name: places[0] for name, places in found.parts.items()}
    return Folder(("YOLO", root, found), labels, origins, partial(_read, found))


def _undescribed(root: Path) -> _Yolo | None:
    parts = _part_folders(root)
    if not parts:
        return None
    files = [file for pattern in _NAME_LISTS for file in sorted(root.glob(pattern))]
    lists = {_read_names(file): str(file) for file in files}
    if len(lists) > 1:
        raise Refused(f"{' and '.join(lists.values())} name other classes; make them the same")
    return _Yolo(root, str(root), parts, next(iter(lists), None))


def _part_folders(root: Path) -> dict[str, list[Path]]:
    """Folders of images by part: images/train beside labels/train, train/images beside
    train/labels, or train/ with both; else, as one part, images/ beside labels/, or `root` with
    both.
    """
    for pattern, level, has_labels in (
        ("images/*/", 1, _has_labels),
        ("*/images/", 0, _has_labels),
        ("*/", 0, _is_mixed),
    ):
        folders = [folder for folder in sorted(root.glob(pattern)) if not is_junk(folder.name)]
        parts = {folder.relative_to(root).parts[level]: [folder] for folder in folders}
        if any(map(get_split_kind, parts)) and any(map(has_labels, folders)):
            return parts
    if _has_labels(root / "images"):
        return {"train": [root / "images"]}
    return {"train": [root]} if _is_mixed(root) else {}


def _has_labels(images: Path) -> bool:
    """True if there are label files where those of a folder of images are looked for."""
    return any(Path(_labels_of(f"{images}/")).parent.rglob("*.txt"))


def _is_mixed(folder: Path) -> bool:
    return has_pairs(folder, folder, ".txt")


def _find_description(root: Path) -> Path | None:
    """data.yaml, the only YAML file, the only one that names classes and parts, or CVAT's obj.data."""
    files = [root / "data.yaml"]
    if not files[0].exists():
        files = [file for file in sorted(root.glob("*.y*ml")) if not is_junk(file.name)]
    if len(files) > 1:
        files = [file for file in files if {"names", "train"} <= _load_description(file).keys()]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise Refused(f"{root}: {names} each describe data; name one of them by --data")
    files += root.glob("obj.data")
    return files[0] if files else None


def _load_description(file: Path) -> dict:
    """The keys of a YAML file; or of darknet's .data, `key = value`, which names a list of classes."""
    if file.suffix != ".data":
        with refusing(file, "YAML"):
            content = read_yaml(file, SMALL, only_text=True)
        return content if isinstance(content, dict) else {}
    content = dict(re.findall(r"^\s*(\w+)\s*=\s*(.*?)\s*$", text_of(file), flags=re.MULTILINE))
    if "names" in content:
        names_file = _place(file, file.parent, [Path(".")], "names", content["names"])
        content["names"] = list(_read_names(names_file))
    return content


def _described(root: Path, file: Path) -> _Yolo | None:
    content = _load_description(file)
    keys = [key for key in content if get_split_kind(key) and str(content[key]) not in _NULLS]
    if not keys and "names" not in content:
        return None
    if not keys:
        raise Refused(f"{file}: lacks the key train")
    names = content.get("names")
    if isinstance(names, dict):
        names = [names.get(str(class_id), "") for class_id in range(len(names))]
    if not names or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problem = f"names is {names!r:.60}" if names else "lacks the key names"
        advice = "it needs a list, names: [a, b], or a line `0: a` for each class from 0 up"
        raise Refused(f"{file}: {problem}; {advice}")
    class_names = _check_names(file, names)
    num_classes = content.get("nc") or str(len(names))
    if num_classes != str(len(names)):
        counts = f"nc is {num_classes}, but names has {len(names)}"
        raise Refused(f"{file}: {counts}; correct one of them")
    starts, parts = [Path(str(content.get("path") or ".")), Path(".")], {}
    for key in keys:
        entries = content[key] if isinstance(content[key], list) else [content[key]]
        # Many test parts are published without images.
        with suppress(Refused) if get_split_kind(key) == "test" else nullcontext():
            parts[key] = [_place(file, root, starts, key, str(entry)) for entry in entries]
    return _Yolo(root, str(file), parts, class_names, "kpt_shape" in content)


def _read_names(file: Path) -> tuple[str, ...]:
    return _check_names(file, text_of(file).strip().splitlines())


def _check_names(file: Path, names: Sequence[str]) -> tuple[str, ...]:
    """The names of classes. Raises `Refused` if one is missing, or stands for several."""
    stripped = tuple(name.strip() for name in names)
    for class_id, name in enumerate(stripped):
        if not name:
            advice = "number the names from 0 up, without gaps"
            raise Refused(f"{file}: class {class_id} has no name; {advice}")
    name, count = Counter(stripped).most_common(1)[0]
    if count > 1:
        raise Refused(f"{file}: {count} classes are named {name}; give each its own name")
    return stripped


def _place(file: Path, root: Path, starts: list[Path], key: str, entry: str) -> Path:
    """Paths are relative to the file's folder or to `path` in it, or have one `../` (Roboflow) or
    data/ (CVAT) too many.
    """
    places = [root / start / entry for start in starts]
    places.append(root / entry.removeprefix("../").removeprefix("data/"))
    for place in places:
        if place.exists():
            return Path(os.path.abspath(place))
    raise Refused(
        f"{file}: {key}: {entry} is not there; looked at "
        f"{', '.join(map(str, dict.fromkeys(places)))}"
    )


def _read(
    folder: _Yolo, part: str, classes: tuple[str, ...] | None, stamps: Stamps
) -> AnnotatedImages:
    """A part, with these classes if the data name none. Boxes are of upright images, as YOLO reads them."""
    names, places = folder.names or classes or (), folder.parts[part]
    title = f"{folder.title} {part}"
    listed = [file for place in places for file in _images(place, stamps)]
    if not listed:
        suffixes = sorted({file.suffix for file in places[0].glob("*.*")})
        kinds = f", which has {', '.join(suffixes)}" if suffixes else ""
        folders = ", ".join(map(str, places))
        raise Refused(f"{folder.title}: no images in {part}, that is {folders}{kinds}")
    files, notes = drop_repeated(title, sorted(listed))
    label_files = [_labels_of(file) for file in files]
    stamps.take_files(label_files + sorted({os.path.dirname(file) for file in label_files}))
    existing, label_notes = _match_labels(folder.root, title, files, label_files)
    rows, labels, boxes = array("q"), array("q"), array("d")
    for row, file in enumerate(label_files):
        if file not in existing:
            continue
        for label, box in _read_labels(file, len(names), folder.has_keypoints):
            rows.append(row)
            labels.append(label)
            boxes.extend(box)
    root = os.path.commonpath([os.path.dirname(file) for file in files])
    paths = encode_paths(file.removeprefix(f"{root}/") for file in files)
    raw = RawBoxes(
        title=title,
        images=image_files(root, paths),
        classes=names or tuple(map(str, range(max(labels, default=-1) + 1))),
        rows=np.array(rows, np.int64),
        boxes=np.array(boxes).reshape(-1, 4),
        labels=np.array(labels, np.int64),
        upright=True,
        relative=True,
        file_notes=notes + label_notes,
    )
    return check_files(raw, stamps)


def _match_labels(
    root: Path, title: str, images: Sequence[str], labels: Sequence[str]
) -> tuple[set[str], tuple[str, ...]]:
    """The files of `labels` that exist, and others beside them; and notes on images without a label
    file and on label files without an image.

    Raises `Refused` if these are most label files, or nearly half of the images.
    """
    existing: set[str] = set()
    folders = {os.path.dirname(image) for image in images}
    for folder in folders:
        label_folder = os.path.dirname(_labels_of(f"{folder}/"))
        existing.update(glob.glob(f"{glob.escape(label_folder)}/*.txt"))
    unlabelled = [
        image for image, label in zip(images, labels, strict=True) if label not in existing
    ]
    if len(unlabelled) == len(images):
        pattern = glob.escape(os.path.basename(labels[0]))
        nearest = next(root.rglob(pattern), "no other folder has such a file")
        raise Refused(
            f"{title}: none of its {len(images):,} images has a label file: that of {images[0]} "
            f"is not at {labels[0]}; nearest: {nearest}"
        )
    others = existing.difference(labels)
    if others:
        for folder in folders:  # a list of images may leave out some
            files = glob.glob(f"{glob.escape(folder)}/*")
            others.difference_update(_labels_of(file) for file in files if is_image(file))
    unread = sorted(file for file in others if not file.endswith("/classes.txt"))
    notes = [Notes(title, "images"), Notes(title, "label files")]
    if unlabelled:
        notes[0].change("have no label file and are background", unlabelled[0], len(unlabelled))
    if unread:
        notes[1].leave_out("no image that can be read has their name", unread[0], len(unread))
    num_labels = len(images) - len(unlabelled) + len(unread)
    lines = notes[0].format_lines(len(images)) + notes[1].format_lines(num_labels, _ADVICE)
    if min(len(unread), len(unlabelled)) > _MAX_UNMATCHED * len(images):
        raise Refused(f"{title}: {'; '.join(lines)}; {_ADVICE}")
    return existing, lines


def _images(place: Path, stamps: Stamps) -> list[str]:
    stamps.take_files([place])
    if place.is_dir():
        found = []
        for _, entries in walk(place):
            # Before the walk enters them.
            stamps.take_files(entry.path for entry in entries if entry.is_dir())
            found += [
                entry.path for entry in entries if not entry.is_dir() and is_image(entry.name)
            ]
        return found
    text = text_of(place)
    if not (place.parent / "data").is_dir():  # darknet's and CVAT's lists begin at the folder above
        text = re.sub(r"^\s*data/", "", text, flags=re.MULTILINE)
    lines = (line.strip() for line in text.splitlines())
    return [os.path.normpath(place.parent / line) for line in lines if line]


def _labels_of(image: str) -> str:
    """The label file: the last folder images/ in the path becomes labels/; else it lies beside the image."""
    stem = os.path.splitext(image)[0]
    above, found, below = stem.rpartition("/images/")
    return f"{above}/labels/{below}.txt" if found else f"{stem}.txt"


def _read_labels(
    file: str, classes: int, has_keypoints: bool
) -> list[tuple[int, tuple[float, ...]]]:
    """Class and left, top, width, height of each line, in shares of the image.

    `classes` is how many there are, 0 if that is unknown.
    """
    objects: list[tuple[int, tuple[float, ...]]] = []
    for number, line in enumerate(text_of(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            label, *values = map(float, line.split())
            if not label.is_integer():
                raise ValueError
        except ValueError:
            raise Refused(
                f"{file}:{number}: {line[:60]!r} are no numbers: class x y width height"
            ) from None
        if not 0 <= label < (classes or _MOST_CLASSES):
            raise Refused(
                f"{file}:{number}: unknown class {label:.0f}; there are {classes or 'classes'} "
                "from 0 up"
            )
        if len(values) == 4 or (has_keypoints and len(values) > 4):
            x, y, width, height = values[:4]
            box = (x - width / 2, y - height / 2, width, height)
        elif len(values) >= 6 and len(values) % 2 == 0:
            left, top = min(values[::2]), min(values[1::2])
            box = (left, top, max(values[::2]) - left, max(values[1::2]) - top)
        else:
            raise Refused(
                f"{file}:{number}: {1 + len(values)} numbers; needs 5, or a class and the corners "
                "of an outline (a sixth may be a detector's confidence: remove it)"
            )
        objects.append((int(label), box))
    return objects
