"""Sources of images without labels, for the recipes' own loaders."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from common.data.cache import Cache
from common.data.source import Source, join_path
from common.detection.data.annotated import Annotated
from common.detection.data.image_headers import compute_upright_sizes, read_file_headers
from common.segmentation.masks import IGNORED
from common.segmentation.source import Masked, Pair

if TYPE_CHECKING:
    from common.shards import Shards  # imported late: most images lie in files

_UNREADABLE_SIZE = (32, 32)  # width and height that stand for those of an unreadable image


@dataclass(frozen=True)
class FileList:
    """Files by index."""

    # A list of strings would be copied page by page into every data worker.
    paths: pa.LargeBinaryArray

    def get_name(self, index: int) -> str:
        return join_path("", self.paths, index)

    get_content = get_name

    @property
    def headers(self) -> np.ndarray:
        """int64[N, 4] as `image_headers` reads them."""
        return read_file_headers("", self.paths, allow_missing=True)

    def prefetch(self, indices: np.ndarray) -> None:
        return

    def __len__(self) -> int:
        return len(self.paths)


def build_file_list(files: Sequence[str]) -> FileList:
    return FileList(pa.array([os.fsencode(file) for file in files], pa.large_binary()))


class NamedByIndex:
    """Images whose names are their indices, so that `Batch.broken` says which could not be read."""

    files: "FileList | Shards"
    fingerprint = split_text = ""

    def get_name(self, index: int) -> str:
        return str(index)

    def get_content(self, index: int) -> str | bytes:
        return self.files.get_content(index)

    def prefetch(self, indices: np.ndarray) -> None:
        self.files.prefetch(indices)


@dataclass(frozen=True)
class Images(NamedByIndex, Source):
    """Images to classify."""

    classes: tuple[str, ...]
    files: "FileList | Shards"
    labels: np.ndarray  # all 0 or False: not used
    notes = ()


@dataclass(frozen=True, eq=False)
class Scenes(NamedByIndex, Annotated):
    """Images in which to detect, with their sizes from `read_sizes`."""

    files: "FileList | Shards" = field(kw_only=True)


@dataclass(frozen=True, eq=False)
class Unmasked(NamedByIndex, Masked):
    """Images whose pixels are to be classified, with their sizes from `read_sizes`."""

    classes: tuple[str, ...]
    files: "FileList | Shards"
    sizes: np.ndarray  # int64[N, 2] width and height
    notes = ()

    def __len__(self) -> int:
        return len(self.files)

    def load_pair(self, index: int, position: int, cache: Cache | None = None) -> Pair:
        return Pair(self.load_picture(index), self.load_mask(index))

    def load_mask(self, index: int) -> np.ndarray:
        """No label in any pixel."""
        width, height = self.sizes[index].tolist()
        return np.full((height, width), IGNORED, np.int16)


def build_images(files: "FileList | Shards", classes: tuple[str, ...], multi_label: bool) -> Images:
    """Build the source of images to classify; its labels take no memory."""
    if multi_label:
        labels = np.broadcast_to(np.bool_(False), (len(files), len(classes)))
    else:
        labels = np.broadcast_to(np.int64(0), (len(files),))
    return Images(classes, files, labels)


def read_sizes(files: "FileList | Shards") -> np.ndarray:
    """int64[N, 2]: width and height of the upright images, read from their headers.

    An image that can't be read gets 32 x 32.
    """
    sizes = compute_upright_sizes(files.headers)
    sizes[sizes[:, 0] == 0] = _UNREADABLE_SIZE
    return sizes
