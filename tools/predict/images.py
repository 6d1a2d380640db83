"""Sources of images without labels, for the recipes' own loaders."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from common.data.source import Source, path_of
from common.detection.data.annotated import Annotated
from common.detection.data.image_headers import compute_upright_sizes, read_file_headers

if TYPE_CHECKING:
    from common.shards import Shards  # imported late: most images lie in files

_PLACEHOLDER = 32, 32  # size of an image that can't be read


@dataclass(frozen=True)
class FileList:
    """Files by number."""

    # A list of strings would be copied page by page into every data worker.
    paths: pa.LargeBinaryArray

    def name(self, index: int) -> str:
        return path_of("", self.paths, index)

    content = name

    @property
    def headers(self) -> np.ndarray:
        """int64[N, 4] as `image_headers` reads them."""
        return read_file_headers("", self.paths, allow_missing=True)

    def expect(self, indices: np.ndarray) -> None:
        return

    def __len__(self) -> int:
        return len(self.paths)


def file_list(files: Sequence[str]) -> FileList:
    return FileList(pa.array([os.fsencode(file) for file in files], pa.large_binary()))


class Numbered:
    """Images by number. An image's name is its number, so that `Batch.broken` says which one could
    not be read.
    """

    files: "FileList | Shards"
    fingerprint = part = ""

    def name(self, index: int) -> str:
        return str(index)

    def content(self, index: int) -> str | bytes:
        return self.files.content(index)

    def expect(self, indices: np.ndarray) -> None:
        self.files.expect(indices)


@dataclass(frozen=True)
class Images(Numbered, Source):
    """Images to classify."""

    classes: tuple[str, ...]
    files: "FileList | Shards"
    labels: np.ndarray  # all 0 or False: not used
    notes = ()


@dataclass(frozen=True, eq=False)
class Scenes(Numbered, Annotated):
    """Images in which to detect, with their sizes from `sizes_of`."""

    files: "FileList | Shards" = field(kw_only=True)


def images(files: "FileList | Shards", classes: tuple[str, ...], multi_label: bool) -> Images:
    shape, kind = (
        ((len(files), len(classes)), np.bool_) if multi_label else ((len(files),), np.int64)
    )
    return Images(classes, files, np.broadcast_to(np.zeros((), kind), shape))


def sizes_of(files: "FileList | Shards") -> np.ndarray:
    """int64[N, 2]: width and height of the upright images, read from their headers; 32 x 32 of one
    that can't be read.
    """
    sizes = compute_upright_sizes(files.headers)
    sizes[sizes[:, 0] == 0] = _PLACEHOLDER
    return sizes
