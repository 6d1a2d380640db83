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

_ITEM_ADVICE = (
    "an item is a pair: a path, the bytes of a file, an image or a tensor uint8[C, H, W], and its "
    "label"
)
_ARRAY_ADVICE = (
    "an array in grey or RGB becomes one by Image.fromarray; one of other channels, [H, W, C], by "
    "torch.from_numpy(array).permute(2, 0, 1), with in_chans=C in build_model "
    "(docs/change_it.md); no transform of your own is needed"
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
        """The image, or the path or bytes of its file; and its label.

        A label is a class id, a class name, or a 0 or 1 for each class.
        """
        ...


@dataclass(frozen=True, eq=False)
class Items(Columns):
    """Items of a `CustomDataset` that are images, or the bytes of files."""

    title: str  # the class of `data`
    data: CustomDataset
    indices: np.ndarray  # int64[N] in `data`

    @cached_property
    def fingerprint(self) -> str:
        digests = []
        for index in sample_evenly(len(self)):
            digests.append(hashlib.blake2b(self._read_pixels(index), digest_size=8).digest())
        contents = np.frombuffer(b"".join(digests), "<u8")
        return hash_source(self.classes, self.labels, np.append(contents, len(self)))

    def get_name(self, index: int) -> str:
        return f"{self.title}[{self.indices[index]}]"

    def get_content(self, index: int) -> Content:
        data_index = int(self.indices[index])
        with report_as_broken():
            content, _ = _check_item(self.title, data_index, self.data[data_index])
            return content

    def hash_images(self, key: int) -> np.ndarray:
        return mix(self.indices, key)

    def _read_pixels(self, index: int) -> bytes:
        try:
            content = self.get_content(index)
            pixels = content.numpy() if hasattr(content, "numpy") else open_rgb(content)
            return pixels.tobytes()
        except BrokenImage:
            return b""


def open_custom(
    data: CustomDataset | Mapping[str, CustomDataset], min_classes: int
) -> DataSplits[Files | Items]:
    """A data set, or one for each split. Raises `Refused`."""
    datasets = dict(data) if isinstance(data, Mapping) else {"train": data}
    split_texts = {name: name for name in datasets}
    if len(datasets) == 1:
        split_texts = {name: type(dataset).__name__ for name, dataset in datasets.items()}

    def read(names: Sequence[str]) -> list[Files | Items]:
        return _read_all([datasets[name] for name in names], min_classes)

    return DataSplits(split_texts, read)


def _read_all(datasets: Sequence[CustomDataset], min_classes: int) -> list[Files | Items]:
    classes = _get_class_names(datasets[0])
    if len(set(classes)) < max(min_classes, len(classes)):
        title = type(datasets[0]).__name__
        raise Refused(
            f"{title} has the classes {', '.join(classes) or 'none'}; it needs {min_classes} or "
            "more, named once"
        )
    for dataset in datasets[1:]:
        other_classes = _get_class_names(dataset)
        if other_classes != classes:
            raise Refused(
                f"{type(dataset).__name__} has other classes to evaluate than to train on "
                f"({', '.join(other_classes)}, and {', '.join(classes)}); give both parts the "
                "same, in the same order"
            )
    return [_read(type(dataset).__name__, dataset, classes) for dataset in datasets]


def _get_class_names(dataset: CustomDataset) -> tuple[str, ...]:
    return tuple(str(name) for name in dataset.classes)


def _read(title: str, data: CustomDataset, classes: tuple[str, ...]) -> Files | Items:
    """The source of one split: of files, if the first item is a path."""
    num_items = len(data)
    if not num_items:
        raise Refused(f"{title} has no items; add some")
    labels = getattr(data, "labels", getattr(data, "targets", None))
    first_content, _ = _check_item(title, 0, data[0])
    are_paths = isinstance(first_content, str)
    paths = []
    if are_paths or labels is None:
        labels = []
        for index in range(num_items):
            content, label = _check_item(title, index, data[index])
            labels.append(label)
            if isinstance(content, str):
                paths.append(os.path.abspath(os.path.expanduser(content)))
        if are_paths and len(paths) < num_items:
            raise Refused(
                f"{title}: {num_items - len(paths)} items are no paths, as item 0 is; give paths "
                "only, or images only"
            )
    label_array = _convert_labels(title, labels, num_items, classes)
    if not are_paths:
        return Items(title, data, np.arange(num_items), labels=label_array, classes=classes)
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    return Files(
        root,
        paths=encode_paths(path[len(root) :].lstrip("/") for path in paths),
        sizes=np.array(get_file_sizes(paths), np.int64),
        labels=label_array,
        classes=classes,
    )


def _check_item(title: str, index: int, item: object) -> tuple[Content, object]:
    """An item, its path as text. Raises `Refused`."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise Refused(f"{title}: item {index} is a {type(item).__name__}; {_ITEM_ADVICE}")
    content, label = item
    if isinstance(content, os.PathLike):
        content = os.fspath(content)
    is_tensor = str(getattr(content, "dtype", "")) == "torch.uint8"
    if not (is_tensor or isinstance(content, str | bytes | Image.Image)):
        raise Refused(
            f"{title}: the image of item {index} is a {type(content).__name__}; {_ITEM_ADVICE}; "
            f"{_ARRAY_ADVICE}"
        )
    return content, label


def _convert_labels(
    title: str, labels: Sequence, num_items: int, classes: tuple[str, ...]
) -> np.ndarray:
    """int64[N] class ids, or bool[N, C]. Raises `Refused`."""
    try:
        # Of a column of pandas, or a tensor.
        column = np.asarray(labels.tolist() if hasattr(labels, "tolist") else labels)
    except ValueError:
        column = np.zeros(0, object)  # rows of several lengths
    if column.dtype.kind == "U" and column.ndim == 1:
        column = _find_class_ids(title, column.tolist(), classes)
    is_matrix = column.shape == (num_items, len(classes)) and column.dtype.kind in "biu"
    if is_matrix and np.isin(column, (0, 1)).all():
        return column.astype(bool)
    if column.shape != (num_items,) or column.dtype.kind not in "iu":
        raise Refused(
            f"{title}: the labels are {column.dtype} {list(column.shape)}; each of its "
            f"{num_items} items has a class id, a class name, or a 0 or 1 for each class"
        )
    invalid = np.flatnonzero((column < 0) | (column >= len(classes)))
    if len(invalid):
        first = invalid[0]
        raise Refused(
            f"{title}: item {first} has the label {column[first]}; its {len(classes)} classes are "
            f"0 to {len(classes) - 1}"
        )
    return column.astype(np.int64)


def _find_class_ids(title: str, names: list[str], classes: tuple[str, ...]) -> np.ndarray:
    class_ids = {name: class_id for class_id, name in enumerate(classes)}
    unknown = sorted(set(names) - class_ids.keys())
    if unknown:
        raise Refused(
            f"{title} has the label {unknown[0]}, which is none of its classes: "
            f"{', '.join(classes)}"
        )
    return np.array([class_ids[name] for name in names])
