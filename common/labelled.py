"""What does every source of labelled images have, wherever the images come from?"""

import hashlib
import json
from typing import Protocol

import numpy as np
import pyarrow as pa
from PIL import Image

from common.images import open_rgb


class Source(Protocol):
    """A fixed list of labelled images; can be pickled and survives a fork."""

    classes: tuple[str, ...]  # names, by class id
    labels: np.ndarray  # int64[N] class ids, or bool[N, C] where an image may show several classes
    fingerprint: str  # hex; equal for the same list of images (names, sizes) with the same labels and classes
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


def fingerprint_of(
    classes: tuple[str, ...], labels: np.ndarray, contents: np.ndarray, names: pa.Array | pa.ChunkedArray | None = None
) -> str:
    """32 hex digits of a list of images: classes, labels, `contents` (pixels, or sizes in bytes) and file names."""
    digest = hashlib.blake2b(json.dumps([classes, labels.shape]).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(labels))
    digest.update(np.ascontiguousarray(contents))
    for start in range(0, 0 if names is None else len(names), 65536):  # in pieces: never a list of all names
        digest.update(repr(names[start : start + 65536].to_pylist()).encode())
    return digest.hexdigest()
