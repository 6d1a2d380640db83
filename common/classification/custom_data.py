"""Custom data sets: an object with a length, items and class names becomes a source of labelled images."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import pyarrow as pa
from PIL import Image

from common.data.images import BrokenImage, faults_of_the_file, open_rgb
from common.data.source import Source, fingerprint_of, name_of, path_of, spread
from common.data.splits import draws_of
from common.errors import Refused
from common.randomness import mix

_ITEM = "an item is a pair: a path, the bytes of a file or a PIL image, and its label"


class CustomDataset(Protocol):
    """What a data set of your own has; torchvision's data sets have it, too.

    An item is a function of its index alone. Each item is read once at the start, to know its label, unless `labels` (or
    `targets`) holds the labels of all. Where items are images, data workers inherit the object: open files in `__getitem__`.
    """

    classes: Sequence[str]  # names, by class id

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[str | os.PathLike | bytes | Image.Image, int | str | Sequence[bool]]:
        """The image, or the path or the bytes of its file, and its class id, its class name, or for several labels per
        image a 0 or 1 for each class."""
        ...


@dataclass(frozen=True, eq=False)
class CustomSource(Source):
    """Items of a `CustomDataset`: paths as a column, without the object; or the object, whose items are images."""

    title: str  # its class
    data: CustomDataset | None
    root: str  # the folder that all paths have in common
    paths: pa.LargeBinaryArray | None  # below root; bytes, since a file's name need not be valid text
    sizes: np.ndarray  # int64[N] bytes of the files, -1 if a file is missing
    rows: np.ndarray  # int64[N] the items' places in `data`
    labels: np.ndarray
    classes: tuple[str, ...]
    origin: str = ""
    notes: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        if self.paths is not None:
            return fingerprint_of(self.classes, self.labels, self.sizes, self.paths)
        seen = (self._pixels(index) for index in spread(len(self)))
        contents = np.frombuffer(b"".join(hashlib.blake2b(pixels, digest_size=8).digest() for pixels in seen), "<u8")
        return fingerprint_of(self.classes, self.labels, np.append(contents, len(self)))

    def name(self, index: int) -> str:
        if self.paths is None:
            return f"{self.title}[{self.rows[index]}]"
        return name_of(self.root, self.paths, index)

    def content(self, index: int) -> str | bytes | Image.Image:
        if self.paths is not None:
            return path_of(self.root, self.paths, index)
        with faults_of_the_file():
            return _checked(self.title, int(self.rows[index]), self.data[int(self.rows[index])])[0]

    @property
    def missing(self) -> np.ndarray:
        return np.flatnonzero(self.sizes < 0)

    def draws(self, key: int) -> np.ndarray:
        """uint64[N] random numbers, each a function of `key` and of its path, or of an image's place."""
        return mix(self.rows, key) if self.paths is None else draws_of(self.paths, key)

    def part(self, rows: np.ndarray) -> "CustomSource":
        paths = None if self.paths is None else self.paths.take(pa.array(rows))
        return replace(self, paths=paths, sizes=self.sizes[rows], rows=self.rows[rows], labels=self.labels[rows])

    def _pixels(self, index: int) -> bytes:
        try:
            return open_rgb(self.content(index)).tobytes()
        except BrokenImage:
            return b""


class CustomParts:
    """A data set, or one for each part. Raises `Refused` for items and labels that are not as `CustomDataset` says."""

    def __init__(self, name: str, data: CustomDataset | Mapping[str, CustomDataset], least_classes: int) -> None:
        self._parts, self._least = dict(data) if isinstance(data, Mapping) else {"train": data}, least_classes
        for part in self._parts.values():
            title = type(part).__name__
            if lacks := [name for name in ("__len__", "__getitem__", "classes") if not hasattr(part, name)]:
                raise Refused(
                    f"--data {name}: {title} has no {' and no '.join(lacks)}; a custom data set has __len__, __getitem__ -> "
                    "(image or path, label), and classes, the names of its classes"
                )
        is_single = len(self._parts) == 1
        self.labels = {name: type(part).__name__ if is_single else name for name, part in self._parts.items()}

    def read(self, name: str, first: Source | None) -> CustomSource:
        return _read_part(self._parts[name], first, self._least)


def _read_part(data: CustomDataset, first: Source | None, least: int) -> CustomSource:
    """The source of one part, which has the classes of `first`, if there is one, and else at least `least`."""
    title, classes = type(data).__name__, tuple(map(str, data.classes))
    if len({*classes}) < max(least, len(classes)):
        raise Refused(f"{title} has the classes {', '.join(classes) or 'none'}; it needs {least} or more, named once")
    if first is not None and classes != first.classes:
        raise Refused(
            f"{title} has other classes to evaluate than to train on ({', '.join(classes)}, and "
            f"{', '.join(first.classes)}); give both parts the same, in the same order"
        )
    if not len(data):
        raise Refused(f"{title} has no items; add some")
    content, _ = _checked(title, 0, data[0])
    labels = getattr(data, "labels", getattr(data, "targets", None))
    root, paths, sizes = "", None, np.zeros(len(data), np.int64)
    if isinstance(content, str):
        root, paths, sizes, found = _columns(title, data)
        labels = found if labels is None else labels
    elif labels is None:
        labels = [_checked(title, index, data[index])[1] for index in range(len(data))]
    labels = _labels(title, labels, len(data), classes)
    kept = data if paths is None else None
    return CustomSource(title, kept, root, paths, sizes, np.arange(len(data)), labels, classes)


def _columns(title: str, data: CustomDataset) -> tuple[str, pa.LargeBinaryArray, np.ndarray, list]:
    """The folder that all paths lie in, the paths below it, the sizes of the files, and the labels."""
    paths, labels = [], []
    for index in range(len(data)):
        content, label = _checked(title, index, data[index])
        if not isinstance(content, str):
            raise Refused(f"{title}: item {index} is no path, as item 0 is; give paths only, or images only")
        paths.append(os.path.abspath(os.path.expanduser(content)))
        labels.append(label)
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    below = pa.array([os.fsencode(path[len(root) :].lstrip("/")) for path in paths], pa.large_binary())
    return root, below, np.array([_size(path) for path in paths], np.int64), labels


def _checked(title: str, index: int, item: object) -> tuple[str | bytes | Image.Image, object]:
    """An item, its path as text."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise Refused(f"{title}: item {index} is a {type(item).__name__}; {_ITEM}")
    content, label = item
    if not isinstance(content, (str, os.PathLike, bytes, Image.Image)):
        instead = "; an array becomes one by Image.fromarray, and no transform of your own is needed"
        raise Refused(f"{title}: the image of item {index} is a {type(content).__name__}; {_ITEM}{instead}")
    return os.fspath(content) if isinstance(content, os.PathLike) else content, label


def _labels(title: str, labels: Sequence, count: int, classes: tuple[str, ...]) -> np.ndarray:
    """int64[N] class ids, or bool[N, C]."""
    try:
        column = np.asarray(labels)
    except ValueError:
        column = np.zeros(0, object)  # rows of several lengths
    if column.dtype.kind == "O" and all(isinstance(label, str) for label in column.flat):  # as pandas keeps text
        column = column.astype(str)
    if column.dtype.kind == "U" and column.ndim == 1:
        ids = {name: number for number, name in enumerate(classes)}
        if unknown := sorted({*column.tolist()} - ids.keys()):
            raise Refused(f"{title} has the label {unknown[0]}, which is none of its classes: {', '.join(classes)}")
        column = np.array([ids[name] for name in column.tolist()])
    if column.shape == (count, len(classes)) and column.dtype.kind in "biu" and np.isin(column, (0, 1)).all():
        return column.astype(bool)
    if column.shape != (count,) or column.dtype.kind not in "iu":
        raise Refused(
            f"{title}: the labels are {column.dtype} {list(column.shape)}; each of its {count} items has a class id, "
            "a class name, or a 0 or 1 for each class"
        )
    if len(wrong := np.flatnonzero((column < 0) | (column >= len(classes)))):
        raise Refused(
            f"{title}: item {wrong[0]} has the label {column[wrong[0]]}; its {len(classes)} classes are 0 to "
            f"{len(classes) - 1}"
        )
    return column.astype(np.int64)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
