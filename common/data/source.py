"""Lists of labelled images: the protocol of a source, the source of files, and checks of any source."""

import copy
import hashlib
import json
import os
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from common.data.images import BrokenImage, Content, open_image, open_rgb
from common.data.splits import hash_paths
from common.data.stream import Blocks
from common.errors import Refused, make_printable

_NUM_TRIED = 16  # images, one of which must be readable
_uses_absolute_names = False  # see `compute_legacy_fingerprint`


@dataclass(frozen=True)
class ModelClasses:
    """The classes of a trained model, where they differ from those of the data that it is evaluated on."""

    names: tuple[str, ...]  # the model's, by its class ids
    ids: tuple[int, ...]  # the model's class id of each class of the data

    @property
    def absent_ids(self) -> list[int]:
        """The model's class ids that the data do not have."""
        return sorted(set(range(len(self.names))) - set(self.ids))


class ImageList(Protocol):
    """A fixed list of images, of any task. It can be pickled, and works after a fork."""

    classes: tuple[str, ...]  # names by class id
    notes: tuple[str, ...]  # for people: how the data were read
    split_text: (
        str  # which split of the data it is, for people: "val/" or "20 % held out of train/"
    )
    model_classes: ModelClasses | None = None  # with --eval_only, those of the evaluated model
    # True if each position of the stream has a new image instead of one of the list.
    fresh: bool = False
    counted_items: ClassVar[str] = "images"  # what `class_counts` counts, for people
    has_audit: ClassVar[bool] = True  # whether tools.audit can look for wrong labels in it

    @property
    def fingerprint(self) -> str:
        """Hex; equal for the same list of images (names, sizes) with the same labels and classes."""
        raise NotImplementedError

    def get_name(self, index: int) -> str:
        """The image's name for people, such as its path or `digits[17]`."""
        raise NotImplementedError

    def get_listed_name(self, index: int) -> str:
        """The name for a list of all images: unlike `get_name`, it reads nothing from shards."""
        return self.get_name(index)

    def get_content(self, index: int) -> Content:
        """Path or bytes of the image's file, or the image. Raises `BrokenImage` if there is none."""
        raise NotImplementedError

    @property
    def blocks(self) -> Blocks | None:
        """Neighbours that are read together, if their order matters for the pace."""
        return None

    def prefetch(self, indices: np.ndarray) -> None:
        """These images will be asked for soon."""
        return

    def list_files(self) -> tuple[pa.LargeBinaryArray | None, np.ndarray] | None:
        """Paths of the images and sizes int64[N] in bytes; None if these are unknown.

        The paths are None if the data have the images' bytes.
        """
        return None


class Source(ImageList, Protocol):
    """A list of labelled images."""

    labels: np.ndarray  # int64[N] class ids, or bool[N, C] if an image may show several classes

    def load_image(self, index: int) -> Image.Image:
        """The image, RGB and upright. Raises `images.BrokenImage` if it can't be decoded."""
        return open_rgb(self.get_content(index))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def multi_label(self) -> bool:
        return self.labels.ndim == 2

    @property
    def strata(self) -> np.ndarray:
        """Classes, of each of which the same share is held out: int64[N].

        Of images with several labels: int64[M, 2], image and class.
        """
        return np.argwhere(self.labels) if self.multi_label else self.labels

    @property
    def class_counts(self) -> np.ndarray:
        """int64[C]: how many `counted_items` are of each class."""
        if self.multi_label:
            return self.labels.sum(axis=0)
        return np.bincount(self.labels, minlength=len(self.classes))

    @property
    def missing(self) -> np.ndarray:
        """int64[...] indices of the images whose file is known to be missing."""
        return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns(Source):
    """A source of columns, arrays with a value per image, whose memory data workers share."""

    labels: np.ndarray
    classes: tuple[str, ...]
    split_text: str = ""
    notes: tuple[str, ...] = ()
    model_classes: ModelClasses | None = None
    # int64[N], equal for images with the same value of --group_column; None without that column.
    groups: np.ndarray | None = None

    def select(self, indices: np.ndarray) -> Self:
        """The source of these images alone."""
        selected: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            if isinstance(column, np.ndarray):
                selected[field.name] = column[indices]
            elif isinstance(column, pa.Array):
                selected[field.name] = column.take(pa.array(indices))
        return replace(self, **selected)


@dataclass(frozen=True, eq=False)
class Files(Columns):
    """Image files."""

    root: str
    paths: pa.LargeBinaryArray  # below root; bytes, since a file name may be invalid text
    sizes: np.ndarray  # int64[N] bytes, -1 for a missing file

    @cached_property
    def fingerprint(self) -> str:
        return hash_source(self.classes, self.labels, self.sizes, self.paths)

    def get_name(self, index: int) -> str:
        return format_path(self.root, self.paths, index)

    def get_content(self, index: int) -> str:
        return join_path(self.root, self.paths, index)

    def list_files(self) -> tuple[pa.LargeBinaryArray, np.ndarray]:
        root = pa.scalar(os.fsencode(os.path.join(self.root, "")), pa.large_binary())
        separator = pa.scalar(b"", pa.large_binary())
        return pc.binary_join_element_wise(root, self.paths, separator), self.sizes

    @property
    def missing(self) -> np.ndarray:
        return np.flatnonzero(self.sizes < 0)

    def hash_images(self, key: int) -> np.ndarray:
        return hash_paths(self.paths, key)


def group_by_folder(files: Files) -> np.ndarray:
    """int64[N] ids of the folders that hold the files, below their class folder if there are classes."""
    pattern = "^([^/]*/)?(.*/)?[^/]*$" if files.classes else "^()(.*/)?[^/]*$"
    folders = pc.replace_substring_regex(files.paths, pattern, r"\2")
    return folders.dictionary_encode().indices.to_numpy().astype(np.int64)


def refuse_broken(data: str, source: Source, max_broken_share: float) -> None:
    """Raise `Refused` if too many files are missing, or if none of a few images can be read."""
    num_images = len(source)
    missing = source.missing
    if not num_images:
        raise Refused(
            f"--data {data}: a split of it has no images; add some, or name another by --split"
        )
    if len(missing) > max_broken_share * num_images or len(missing) == num_images:
        first = source.get_name(missing[0])
        problem = f"{len(missing):,} of {num_images:,} images are missing, the first is {first}"
        raise Refused(
            f"--data {data}: {problem}{_find_similar_path(first)}; the limit is "
            f"--max_broken_share {max_broken_share}: correct the paths, or raise it"
        )
    indices = sample_evenly(num_images)
    reasons = []
    for index in indices:
        try:
            with open_image(source.get_content(index)):
                return
        except BrokenImage as error:
            reasons.append(f"{source.get_name(index)}: {error}")
    problem = f"none of {len(indices)} images tried, all over its {num_images:,}, can be read"
    raise Refused(f"--data {data}: {problem}, such as {reasons[0]}")


def _find_similar_path(path: str) -> str:
    """How a file that is there differs from the missing `path`, in brackets; "" without one."""
    text = ""
    if any(os.path.exists(unicodedata.normalize(form, path)) for form in ("NFC", "NFD")):
        text += (
            " (there with its letters composed otherwise, Unicode's NFC or NFD: rename one or "
            "the other)"
        )
    if os.path.exists(path.replace("\\", "/")):
        text += " (there with / for each \\: replace them in the list)"
    return text


def sample_evenly(num_images: int, max_indices: int = _NUM_TRIED) -> np.ndarray:
    """int64[n] indices, evenly spaced among `num_images`: all of them, or `max_indices`."""
    num_indices = min(num_images, max_indices)
    return np.unique(np.linspace(0, num_images - 1, num_indices).astype(np.int64))


def hash_source(
    classes: tuple[str, ...],
    labels: np.ndarray,
    contents: np.ndarray,
    names: pa.Array | pa.ChunkedArray | None = None,
) -> str:
    """32 hex digits of classes, labels, `contents` (pixels, or sizes in bytes) and file names.

    Of absolute names, what lies below their common folder counts: data that have moved are the same.
    """
    digest = hashlib.blake2b(json.dumps([classes, labels.shape]).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(labels).data)
    digest.update(np.ascontiguousarray(contents).data)
    if names is not None:
        prefix_length = 0 if _uses_absolute_names else _measure_common_folder(names)
        for start in range(0, len(names), 65536):  # in chunks: never a list of all names
            chunk = names[start : start + 65536].to_pylist()
            if prefix_length:
                chunk = [None if name is None else name[prefix_length:] for name in chunk]
            digest.update(repr(chunk).encode())
    return digest.hexdigest()


def compute_legacy_fingerprint(source: Any) -> str:
    """The fingerprint of `source` in runs of before 0.3.0, in which absolute names counted whole."""
    global _uses_absolute_names
    _uses_absolute_names = True
    try:
        duplicate = copy.copy(source)
        vars(duplicate).pop("fingerprint", None)  # it is cached
        return duplicate.fingerprint
    finally:
        _uses_absolute_names = False


def _measure_common_folder(names: pa.Array | pa.ChunkedArray) -> int:
    """The length of the folder that all `names` begin with, if they are absolute; else 0."""
    bounds = pc.min_max(names).as_py()
    if not bounds["min"] or not os.path.isabs(bounds["min"]):
        return 0
    prefix = os.path.commonprefix(list(bounds.values()))  # noqa: RUF071  (of characters: its last name may be cut off)
    return len(os.path.dirname(prefix))


def encode_paths(paths: Iterable[str | os.PathLike]) -> pa.LargeBinaryArray:
    """A column of paths, as bytes: a file's name may be invalid text."""
    return pa.array([os.fsencode(path) for path in paths], pa.large_binary())


def join_path(root: str | os.PathLike, paths: pa.LargeBinaryArray, index: int) -> str:
    """The file at `index` of a column of paths below `root`, which are bytes."""
    return os.path.join(root, os.fsdecode(paths[int(index)].as_py()))


def format_path(root: str | os.PathLike, paths: pa.LargeBinaryArray, index: int) -> str:
    """The file at `index` of a column of paths below `root`, for people."""
    return make_printable(f"{root}/{paths[int(index)].as_py().decode(errors='backslashreplace')}")
