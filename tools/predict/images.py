"""Sources of images without labels, for the recipes' own loaders."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from common.data.images import BrokenImage, opened, orientation_of
from common.data.source import Source, path_of
from common.detection.data.annotated import FixedImages
from common.detection.data.image_headers import headers_of_files, upright_sizes

_PLACEHOLDER = 32, 32  # size of an image that can't be read


def paths_of(files: Sequence[str]) -> pa.LargeBinaryArray:
    """The files as one array: a list of strings would be copied page by page into every data worker."""
    return pa.array([os.fsencode(file) for file in files], pa.large_binary())


class Files:
    """Files by number. An image's name is its number, so that `Batch.broken` says which one could not be read."""

    paths: pa.LargeBinaryArray
    fingerprint = part = ""

    def name(self, index: int) -> str:
        return str(index)

    def content(self, index: int) -> str:
        return path_of("", self.paths, index)


@dataclass(frozen=True)
class Images(Files, Source):
    """Files to classify."""

    classes: tuple[str, ...]
    paths: pa.LargeBinaryArray
    labels: np.ndarray  # all 0 or False: not used
    notes = ()


@dataclass(frozen=True, eq=False)
class Scenes(Files, FixedImages):
    """Files in which to detect."""

    paths: pa.LargeBinaryArray = field(kw_only=True)


def images(files: Sequence[str], classes: tuple[str, ...], multi_label: bool) -> Images:
    shape, kind = ((len(files), len(classes)), np.bool_) if multi_label else ((len(files),), np.int64)
    return Images(classes, paths_of(files), np.broadcast_to(np.zeros((), kind), shape))


def scenes(files: Sequence[str], sizes: np.ndarray, classes: tuple[str, ...]) -> Scenes:
    """`sizes` int[N, 2] come from `sizes_of`."""
    return Scenes(
        classes,
        category_ids=np.arange(len(classes)),
        image_ids=np.arange(len(files)),
        sizes=sizes.astype(np.int32),
        offsets=np.zeros(len(files) + 1, np.int64),
        boxes=np.zeros((0, 4), np.float32),
        labels=np.zeros(0, np.int64),
        crowd=np.zeros(0, bool),
        areas=np.zeros(0, np.float32),
        paths=paths_of(files),
    )


def sizes_of(files: Sequence[str]) -> np.ndarray:
    """int64[N, 2]: width and height of the upright images, read from their headers; 32 x 32 of one that can't be read."""
    sizes = upright_sizes(headers_of_files("", paths_of(files), may_miss=True))
    for index in np.flatnonzero(sizes[:, 0] == 0).tolist():
        sizes[index] = _size_of(files[index])
    return sizes


def _size_of(file: str) -> tuple[int, int]:
    try:
        with opened(file) as image:
            return image.size[::-1] if orientation_of(image) >= 5 else image.size
    except BrokenImage:
        return _PLACEHOLDER
