"""Custom data sets: an object with a length, items and class names becomes a source."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from PIL import Image

from common.data.data_spec import DataSplits
from common.data.images import BrokenImage, Content, open_rgb, report_as_broken
from common.data.source import Columns, Files, encode_paths, hash_source, sample_evenly
from common.errors import Refused
from common.files import get_file_sizes
from common.randomness import mix

_ITEM = (
    "an item is a pair: a path, the bytes of a file, an image or a tensor uint8[C, H, W], and its "
    "label"
)


class CustomDataset(Protocol):
    """A data set of your own, or of torchvision.

    An item is a function of its index alone. All are read at the start, unless `labels` (or
    `targets`) has their labels. Data workers inherit the object if items are images: open files in
    `__getitem__`.
    """

    classes: Sequence[str]  # names, by class id

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Content, int | str | Sequence[bool]]:
        """The image, or the path or bytes of its file; and its class id, its class name, or a 0 or
        1 for each class.
        """
        ...


@dataclass(frozen=True, eq=False)
class Items(Columns):
    """Items of a `CustomDataset` that are images, or the bytes of files."""

    title: str  # the class of `data`
    data: CustomDataset
    rows: np.ndarray  # int64[N] places in `data`

    @cached_property
    def fingerprint(self) -> str:
        seen = (
            hashlib.blake2b(self._pixels(index), digest_size=8).digest()
            for index in sample_evenly(len(self))
        )
        contents = np.frombuffer(b"".join(seen), "<u8")
        return hash_source(self.classes, self.labels, np.append(contents, len(self)))

    def name(self, index: int) -> str:
        return f"{self.title}[{self.rows[index]}]"

    def content(self, index: int) -> Content:
        row = int(self.rows[index])
        with report_as_broken():
            return _checked(self.title, row, self.data[row])[0]

    def hash_images(self, key: int) -> np.ndarray:
        return mix(self.rows, key)

    def _pixels(self, index: int) -> bytes:
        try:
            content = self.content(index)
            pixels = content.numpy() if hasattr(content, "numpy") else open_rgb(content)
            return pixels.tobytes()
        except BrokenImage:
            return b""


def open_custom(
    data: CustomDataset | Mapping[str, CustomDataset], min_classes: int
) -> DataSplits[Files | Items]:
    """A data set, or one for each part. Raises `Refused`."""
    sets = dict(data) if isinstance(data, Mapping) else {"train": data}
    labels = {name: type(part).__name__ if len(sets) == 1 else name for name, part in sets.items()}
    return DataSplits(labels, lambda names: _read_all([sets[name] for name in names], min_classes))


def _read_all(sets: Sequence[CustomDataset], min_classes: int) -> list[Files | Items]:
    first, *others = [tuple(map(str, data.classes)) for data in sets]
    if len({*first}) < max(min_classes, len(first)):
        found = f"{type(sets[0]).__name__} has the classes {', '.join(first) or 'none'}"
        raise Refused(f"{found}; it needs {min_classes} or more, named once")
    for data, classes in zip(sets[1:], others, strict=True):
        if classes != first:
            both = f"({', '.join(classes)}, and {', '.join(first)})"
            problem = f"{type(data).__name__} has other classes to evaluate than to train on {both}"
            raise Refused(f"{problem}; give both parts the same, in the same order")
    return [_read(type(data).__name__, data, first) for data in sets]


def _read(title: str, data: CustomDataset, classes: tuple[str, ...]) -> Files | Items:
    """The source of one part: of files, if the first item is a path."""
    count = len(data)
    if not count:
        raise Refused(f"{title} has no items; add some")
    labels = getattr(data, "labels", getattr(data, "targets", None))
    are_paths = isinstance(_checked(title, 0, data[0])[0], str)
    paths = []
    if are_paths or labels is None:
        labels = []
        for index in range(count):
            content, label = _checked(title, index, data[index])
            labels.append(label)
            if isinstance(content, str):
                paths.append(os.path.abspath(os.path.expanduser(content)))
        if are_paths and len(paths) < count:
            raise Refused(
                f"{title}: {count - len(paths)} items are no paths, as item 0 is; give paths "
                "only, or images only"
            )
    ids = _labels(title, labels, count, classes)
    if not are_paths:
        return Items(title, data, np.arange(count), labels=ids, classes=classes)
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    below = encode_paths(path[len(root) :].lstrip("/") for path in paths)
    return Files(
        root, below, np.array(get_file_sizes(paths), np.int64), labels=ids, classes=classes
    )


def _checked(title: str, index: int, item: object) -> tuple[Content, object]:
    """An item, its path as text."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise Refused(f"{title}: item {index} is a {type(item).__name__}; {_ITEM}")
    content, label = item
    if isinstance(content, os.PathLike):
        content = os.fspath(content)
    is_tensor = str(getattr(content, "dtype", "")) == "torch.uint8"
    if not (is_tensor or isinstance(content, str | bytes | Image.Image)):
        instead = (
            "an array in grey or RGB becomes one by Image.fromarray; one of other channels, [H, "
            "W, C], by torch.from_numpy(array).permute(2, 0, 1), with in_chans=C in build_model "
            "(docs/change_it.md); no transform of your own is needed"
        )
        raise Refused(
            f"{title}: the image of item {index} is a {type(content).__name__}; {_ITEM}; {instead}"
        )
    return content, label


def _labels(title: str, labels: Sequence, count: int, classes: tuple[str, ...]) -> np.ndarray:
    """int64[N] class ids, or bool[N, C]."""
    try:
        # Of a column of pandas, or a tensor.
        column = np.asarray(getattr(labels, "tolist", lambda: labels)())
    except ValueError:
        column = np.zeros(0, object)  # rows of several lengths
    if column.dtype.kind == "U" and column.ndim == 1:
        ids = {name: number for number, name in enumerate(classes)}
        if unknown := sorted({*column.tolist()} - ids.keys()):
            raise Refused(
                f"{title} has the label {unknown[0]}, which is none of its classes: "
                f"{', '.join(classes)}"
            )
        column = np.array([ids[name] for name in column.tolist()])
    if (
        column.shape == (count, len(classes))
        and column.dtype.kind in "biu"
        and np.isin(column, (0, 1)).all()
    ):
        return column.astype(bool)
    if column.shape != (count,) or column.dtype.kind not in "iu":
        wanted = (
            f"each of its {count} items has a class id, a class name, or a 0 or 1 for each class"
        )
        raise Refused(f"{title}: the labels are {column.dtype} {list(column.shape)}; {wanted}")
    if len(wrong := np.flatnonzero((column < 0) | (column >= len(classes)))):
        found = f"item {wrong[0]} has the label {column[wrong[0]]}"
        raise Refused(f"{title}: {found}; its {len(classes)} classes are 0 to {len(classes) - 1}")
    return column.astype(np.int64)
