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
from typing import Any, NamedTuple

import numpy as np

from common.data.notes import Notes
from common.data.source import encode_paths
from common.data.splits import get_split_kind
from common.detection.data.annotated import AnnotatedImages, build_image_files
from common.detection.data.box_checks import RawBoxes, check_files
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
from common.files import SMALL, is_junk, read_yaml, walk

_MAX_CLASSES = 2**20  # if no list of names says how many there are
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
    """Where the splits of a data set are, and which classes it names."""

    root: Path
    title: str
    splits: dict[str, list[Path]]  # by name: folders of images, or text files that list images
    class_names: tuple[str, ...] | None
    has_keypoints: bool = False  # True if they stand after the four numbers of the box


def find_yolo_folder(path: Path) -> Folder | None:
    """The data set that a YAML file, or the one in a folder, describes; else images and labels."""
    root = path
    file = None
    if path.suffix in (".yaml", ".yml", ".data") and path.is_file():
        root = path.parent
        file = path
    else:
        file = _find_description(root)
    data = _read_description(root, file) if file else _find_undescribed(root)
    if not data:
        return None
    split_texts = {}
    for name, paths in data.splits.items():
        split_texts[name] = ", ".join(format_relative(root, path) for path in paths)
    return Folder(
        identity=("YOLO", root, data),
        split_texts=split_texts,
        origins={name: paths[0] for name, paths in data.splits.items()},
        read_split=partial(_read_split, data),
    )


def _find_undescribed(root: Path) -> _Yolo | None:
    splits = _find_split_folders(root)
    if not splits:
        return None
    files = {}
    for pattern in _NAME_LISTS:
        for file in sorted(root.glob(pattern)):
            files[_read_names(file)] = str(file)
    if len(files) > 1:
        raise Refused(f"{' and '.join(files.values())} name other classes; make them the same")
    return _Yolo(root, str(root), splits, class_names=next(iter(files), None))


def _find_split_folders(root: Path) -> dict[str, list[Path]]:
    """Folders of images by split.

    They are images/train beside labels/train, train/images beside train/labels, or train/ with
    both; else, as one split, images/ beside labels/, or `root` with both.
    """
    for pattern, level, has_labels in (
        ("images/*/", 1, _has_label_files),
        ("*/images/", 0, _has_label_files),
        ("*/", 0, _is_mixed),
    ):
        folders = [folder for folder in sorted(root.glob(pattern)) if not is_junk(folder.name)]
        splits = {folder.relative_to(root).parts[level]: [folder] for folder in folders}
        has_names = any(get_split_kind(name) for name in splits)
        if has_names and any(has_labels(folder) for folder in folders):
            return splits
    if _has_label_files(root / "images"):
        return {"train": [root / "images"]}
    return {"train": [root]} if _is_mixed(root) else {}


def _has_label_files(images: Path) -> bool:
    """True if there are label files where those of a folder of images must be."""
    return any(_get_label_folder(str(images)).rglob("*.txt"))


def _is_mixed(folder: Path) -> bool:
    return has_pairs(folder, folder, ".txt")


def _find_description(root: Path) -> Path | None:
    """data.yaml, the only YAML file, the only one that names classes and splits, or CVAT's obj.data."""
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
        with refuse_unreadable(file, "YAML"):
            content = read_yaml(file, SMALL, only_text=True)
        return content if isinstance(content, dict) else {}
    text = read_text_file(file)
    content = dict(re.findall(r"^\s*(\w+)\s*=\s*(.*?)\s*$", text, flags=re.MULTILINE))
    if "names" in content:
        names_file = _resolve(file, file.parent, [Path(".")], "names", content["names"])
        content["names"] = list(_read_names(names_file))
    return content


def _read_description(root: Path, file: Path) -> _Yolo | None:
    content = _load_description(file)
    keys = [key for key in content if get_split_kind(key) and str(content[key]) not in _NULLS]
    if not keys and "names" not in content:
        return None
    if not keys:
        raise Refused(f"{file}: lacks the key train")
    class_names = _parse_names(file, content.get("names"))
    num_classes = content.get("nc") or str(len(class_names))
    if num_classes != str(len(class_names)):
        problem = f"nc is {num_classes}, but names has {len(class_names)}"
        raise Refused(f"{file}: {problem}; correct one of them")
    starts = [Path(str(content.get("path") or ".")), Path(".")]
    splits = {}
    for key in keys:
        entries = content[key] if isinstance(content[key], list) else [content[key]]
        # Many test splits are published without images.
        with suppress(Refused) if get_split_kind(key) == "test" else nullcontext():
            splits[key] = [_resolve(file, root, starts, key, str(entry)) for entry in entries]
    return _Yolo(root, str(file), splits, class_names, has_keypoints="kpt_shape" in content)


def _parse_names(file: Path, names: Any) -> tuple[str, ...]:
    """The names of classes: a list, or a mapping from class ids as texts. Raises `Refused`."""
    if isinstance(names, dict):
        names = [names.get(str(class_id), "") for class_id in range(len(names))]
    if not names or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problem = f"names is {names!r:.60}" if names else "lacks the key names"
        advice = "it needs a list, names: [a, b], or a line `0: a` for each class from 0 up"
        raise Refused(f"{file}: {problem}; {advice}")
    return _check_names(file, names)


def _read_names(file: Path) -> tuple[str, ...]:
    return _check_names(file, read_text_file(file).strip().splitlines())


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


def _resolve(file: Path, root: Path, starts: list[Path], key: str, entry: str) -> Path:
    """The path of an entry. Raises `Refused` if nothing is there.

    Paths are relative to the file's folder or to `path` in it, or have one `../` (Roboflow) or
    data/ (CVAT) too many.
    """
    candidates = [root / start / entry for start in starts]
    candidates.append(root / entry.removeprefix("../").removeprefix("data/"))
    for path in candidates:
        if path.exists():
            return Path(os.path.abspath(path))
    searched = ", ".join(str(path) for path in dict.fromkeys(candidates))
    raise Refused(f"{file}: {key}: {entry} is not there; looked at {searched}")


def _read_split(
    data: _Yolo, name: str, classes: tuple[str, ...] | None, stats: FileStats
) -> AnnotatedImages:
    """A split, with these classes if the data name none.

    Boxes are of upright images, as YOLO reads them.
    """
    class_names = data.class_names or classes or ()
    title = f"{data.title} {name}"
    files, notes = _list_images(data, name, stats)
    label_files = [_get_label_file(file) for file in files]
    label_folders = sorted({os.path.dirname(file) for file in label_files})
    stats.add_files(label_files + label_folders)
    existing, label_notes = _match_labels(data.root, title, files, label_files)
    image_indices = array("q")
    labels = array("q")
    boxes = array("d")
    for i, file in enumerate(label_files):
        if file not in existing:
            continue
        for label, box in _read_labels(file, len(class_names), data.has_keypoints):
            image_indices.append(i)
            labels.append(label)
            boxes.extend(box)
    if not class_names:
        num_classes = max(labels, default=-1) + 1
        class_names = tuple(str(class_id) for class_id in range(num_classes))
    root = os.path.commonpath([os.path.dirname(file) for file in files])
    paths = encode_paths(file.removeprefix(f"{root}/") for file in files)
    raw = RawBoxes(
        title=title,
        images=build_image_files(root, paths),
        classes=class_names,
        image_indices=np.array(image_indices, np.int64),
        boxes=np.array(boxes).reshape(-1, 4),
        labels=np.array(labels, np.int64),
        upright=True,
        relative=True,
        file_notes=notes + label_notes,
    )
    return check_files(raw, stats)


def _list_images(data: _Yolo, name: str, stats: FileStats) -> tuple[list[str], tuple[str, ...]]:
    """The sorted images of a split, each once, and notes on them. Raises `Refused` if there are none."""
    paths = data.splits[name]
    images = []
    for path in paths:
        images += _find_images(path, stats)
    if not images:
        message = f"{data.title}: no images in {name}, that is {', '.join(map(str, paths))}"
        suffixes = sorted({file.suffix for file in paths[0].glob("*.*")})
        if suffixes:
            message += f", which has {', '.join(suffixes)}"
        raise Refused(message)
    return drop_repeated(f"{data.title} {name}", sorted(images))


def _match_labels(
    root: Path, title: str, images: Sequence[str], labels: Sequence[str]
) -> tuple[set[str], tuple[str, ...]]:
    """The label files beside `labels`, and notes on images and label files that have no partner.

    Raises `Refused` if most label files have no image, or nearly half of the images no label file.
    """
    existing: set[str] = set()
    folders = {os.path.dirname(image) for image in images}
    for folder in folders:
        label_folder = str(_get_label_folder(folder))
        existing.update(glob.glob(f"{glob.escape(label_folder)}/*.txt"))
    unlabelled = []
    for image, label in zip(images, labels, strict=True):
        if label not in existing:
            unlabelled.append(image)
    if len(unlabelled) == len(images):
        pattern = glob.escape(os.path.basename(labels[0]))
        nearest = next(root.rglob(pattern), "no other folder has such a file")
        raise Refused(
            f"{title}: none of its {len(images):,} images has a label file: that of {images[0]} "
            f"is not at {labels[0]}; nearest: {nearest}"
        )
    unmatched = existing.difference(labels)
    if unmatched:
        for folder in folders:  # a list of images may leave out some
            files = glob.glob(f"{glob.escape(folder)}/*")
            unmatched.difference_update(
                _get_label_file(file) for file in files if is_image_name(file)
            )
    unread = sorted(file for file in unmatched if not file.endswith("/classes.txt"))
    image_notes = Notes(title, "images")
    label_notes = Notes(title, "label files")
    if unlabelled:
        image_notes.change("have no label file and are background", unlabelled[0], len(unlabelled))
    if unread:
        label_notes.leave_out("no image that can be read has their name", unread[0], len(unread))
    num_labels = len(images) - len(unlabelled) + len(unread)
    lines = image_notes.format_lines(len(images)) + label_notes.format_lines(num_labels, _ADVICE)
    if min(len(unread), len(unlabelled)) > _MAX_UNMATCHED * len(images):
        raise Refused(f"{title}: {'; '.join(lines)}; {_ADVICE}")
    return existing, lines


def _find_images(path: Path, stats: FileStats) -> list[str]:
    """The images below a folder, or in a text file that lists them."""
    stats.add_files([path])
    if path.is_dir():
        images = []
        for _, entries in walk(path):
            # Before the walk enters them.
            stats.add_files(entry.path for entry in entries if entry.is_dir())
            for entry in entries:
                if not entry.is_dir() and is_image_name(entry.name):
                    images.append(entry.path)
        return images
    text = read_text_file(path)
    if not (path.parent / "data").is_dir():  # darknet's and CVAT's lists begin at the folder above
        text = re.sub(r"^\s*data/", "", text, flags=re.MULTILINE)
    lines = [line.strip() for line in text.splitlines()]
    return [os.path.normpath(path.parent / line) for line in lines if line]


def _get_label_file(image: str) -> str:
    """The label file: the last folder images/ in the path becomes labels/; else it lies beside the image."""
    stem = os.path.splitext(image)[0]
    above, separator, below = stem.rpartition("/images/")
    if not separator:
        return f"{stem}.txt"
    return f"{above}/labels/{below}.txt"


def _get_label_folder(image_folder: str) -> Path:
    return Path(_get_label_file(f"{image_folder}/")).parent


def _read_labels(
    file: str, num_classes: int, has_keypoints: bool
) -> list[tuple[int, tuple[float, ...]]]:
    """Class and left, top, width, height of each line, in shares of the image.

    `num_classes` is 0 if it is unknown.
    """
    objects: list[tuple[int, tuple[float, ...]]] = []
    for number, line in enumerate(read_text_file(file).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = [float(value) for value in line.split()]
            label = values.pop(0)
            if not label.is_integer():
                raise ValueError
        except ValueError:
            raise Refused(
                f"{file}:{number}: {line[:60]!r} are no numbers: class x y width height"
            ) from None
        if not 0 <= label < (num_classes or _MAX_CLASSES):
            raise Refused(
                f"{file}:{number}: unknown class {label:.0f}; there are "
                f"{num_classes or 'classes'} from 0 up"
            )
        box = _parse_box(values, has_keypoints)
        if box is None:
            raise Refused(
                f"{file}:{number}: {1 + len(values)} numbers; needs 5, or a class and the corners "
                "of an outline (a sixth may be a detector's confidence: remove it)"
            )
        objects.append((int(label), box))
    return objects


def _parse_box(values: list[float], has_keypoints: bool) -> tuple[float, ...] | None:
    """Left, top, width, height from the numbers after the class; None for another count of them."""
    if len(values) == 4 or (has_keypoints and len(values) > 4):
        x, y, width, height = values[:4]
        return x - width / 2, y - height / 2, width, height
    if len(values) >= 6 and len(values) % 2 == 0:
        left = min(values[::2])
        top = min(values[1::2])
        return left, top, max(values[::2]) - left, max(values[1::2]) - top
    return None
