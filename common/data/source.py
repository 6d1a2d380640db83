"""Protocol of a source of labelled images, and checks that hold for every source."""

import hashlib
import json
import os
from typing import Protocol

import numpy as np
import pyarrow as pa
from PIL import Image

from common.data.images import BrokenImage, open_rgb, opened
from common.errors import Refused, printable

_TRIED = 16  # images, one of which must be readable


class Source(Protocol):
    """A fixed list of labelled images. It can be pickled, and works after a fork."""

    classes: tuple[str, ...]  # names by class id
    labels: np.ndarray  # int64[N] class ids, or bool[N, C] if an image may show several classes
    fingerprint: str  # hex; equal for the same list of images (names, sizes) with the same labels and classes
    notes: tuple[str, ...]  # what a person should know about how the data were read
    origin: str  # which part of the data it is, for people: "val/" or "20 % held out of train/"

    def name(self, index: int) -> str:
        """The image in words for people, such as its path or `digits[17]`."""
        ...

    def content(self, index: int) -> str | bytes | Image.Image:
        """Path or bytes of the image's file, or the image. Raises `images.BrokenImage` if there is none."""
        ...

    def image(self, index: int) -> Image.Image:
        """The image, RGB and upright. Raises `images.BrokenImage` if it can't be decoded."""
        return open_rgb(self.content(index))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def multi_label(self) -> bool:
        return self.labels.ndim == 2

    @property
    def class_counts(self) -> np.ndarray:
        """int64[C]: how many images show each class."""
        return self.labels.sum(axis=0) if self.multi_label else np.bincount(self.labels, minlength=len(self.classes))

    @property
    def missing(self) -> np.ndarray:
        """int64[...] indices of the images whose file is known to be missing."""
        return np.zeros(0, np.int64)

    def near(self, index: int) -> str:
        """Where the file of a missing image seems to be instead, for people; "" if unknown."""
        return ""


def refuse_broken(data: str, source: Source, max_broken_share: float) -> None:
    """Raise `Refused`, before training, if too many files are missing or none of a few images all over the data can be read."""
    if not len(source):
        raise Refused(f"--data {data}: a part of it has no images; add some, or name another part by --split")
    if len(missing := source.missing) > max_broken_share * len(source) or len(missing) == len(source):
        raise Refused(
            f"--data {data}: {len(missing):,} of {len(source):,} images are missing, the first is {source.name(missing[0])}"
            f"{source.near(missing[0])}; the limit is --max_broken_share {max_broken_share}: correct the paths, or raise it"
        )
    reasons = []
    tried = spread(len(source))
    for index in tried:
        try:
            with opened(source.content(index)):
                return
        except BrokenImage as error:
            reasons.append(f"{source.name(index)}: {error}")
    raise Refused(
        f"--data {data}: none of {len(tried)} images tried, all over its {len(source):,}, can be read, such as {reasons[0]}"
    )


def spread(count: int, limit: int = _TRIED) -> np.ndarray:
    """int64[n] indices all over `count` images: all of them, or `limit`."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).astype(np.int64))


def looked_at(count: int, drawn: int) -> np.ndarray:
    """int64[n] indices of the training images that a run looks at once more, to judge their labels.

    All of `count`, or as many as a tenth of the samples that the run draws, but at least 2,000: little of the run's time.
    """
    return spread(count, max(2_000, drawn // 10))


def fingerprint_of(
    classes: tuple[str, ...], labels: np.ndarray, contents: np.ndarray, names: pa.Array | pa.ChunkedArray | None = None
) -> str:
    """32 hex digits of a list of images: classes, labels, `contents` (pixels, or sizes in bytes) and file names."""
    digest = hashlib.blake2b(json.dumps([classes, labels.shape]).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(labels))
    digest.update(np.ascontiguousarray(contents))
    for start in range(0, 0 if names is None else len(names), 65536):  # in chunks: never a list of all names
        digest.update(repr(names[start : start + 65536].to_pylist()).encode())
    return digest.hexdigest()


def path_of(root: str | os.PathLike, paths: pa.LargeBinaryArray, index: int) -> str:
    """The file at `index` of a column of paths below `root`; these are bytes, since a file name may be invalid text."""
    return os.path.join(root, os.fsdecode(paths[int(index)].as_py()))


def name_of(root: str | os.PathLike, paths: pa.LargeBinaryArray, index: int) -> str:
    """The same path for people."""
    return printable(f"{root}/{paths[int(index)].as_py().decode(errors='backslashreplace')}")
