"""Size and orientation of image files, read from their headers without decoding."""

import io
import os
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from PIL import Image

from common.data.decoding import read_jpeg_size
from common.data.images import BrokenImage, check_size, read_geometry, report_as_broken
from common.detection.data.stamps import each_of
from common.errors import Refused
from common.files import OddFile, open_regular

_HEAD = 8_192  # bytes in which nearly every JPEG has its size


def headers_of_files(folder: str, paths: pa.Array, *, may_miss: bool = False) -> np.ndarray:
    """int64[N, 4]: width and height as stored, EXIF orientation 1 to 8, bytes of files below `folder`.

    Width 0 if the file is no readable image. If files are missing, raises `Refused`, or with
    `may_miss` gives width 0 and size -1 for them.
    """
    headers = each_of(folder, paths, _header_of_file, 4)
    if not may_miss and (missing := np.flatnonzero(headers[:, 3] < 0)).size:
        first = os.path.join(
            folder, paths[int(missing[0])].as_py().decode(errors="backslashreplace")
        )
        raise Refused(
            f"{first}: {missing.size} of {len(paths)} annotated images are missing or may not be "
            "read, this one first; add them, or take them out of the annotations"
        )
    return headers


def header_of(content: bytes) -> tuple[int, int, int, int]:
    """The same four numbers of an image's bytes."""
    return (*_stored(content[:_HEAD], io.BytesIO(content)), len(content))


def _header_of_file(path: bytes) -> tuple[int, int, int, int]:
    try:
        with report_as_broken(), open_regular(path) as file:
            head, size = os.read(file.fileno(), _HEAD), os.fstat(file.fileno()).st_size
            return (*_stored(head, file), size)
    except BrokenImage as error:
        return 0, 0, 1, 0 if isinstance(error.__cause__, OddFile) else -1


def _stored(head: bytes, file: BinaryIO) -> tuple[int, int, int]:
    """Width, height and orientation of an image that begins with `head`; width 0 if it can't be read."""
    if size := read_jpeg_size(head):  # a JPEG without EXIF data, for which Pillow would take 90 µs
        return (*size[::-1], 1)
    try:
        with Image.open(file) as image:
            check_size(*image.size)
            return read_geometry(image)
    except Exception:
        # A damaged file makes Pillow raise almost anything; decoding it will give the reason.
        return 0, 0, 1


def upright_sizes(headers: np.ndarray) -> np.ndarray:
    """int64[N, 2] width and height of the upright images."""
    return np.where(headers[:, 2:3] >= 5, headers[:, 1::-1], headers[:, :2])


def rotate_boxes(boxes: np.ndarray, headers: np.ndarray) -> np.ndarray:
    """Boxes [M, 4] (left, top, width, height) in stored pixels -> in pixels of the upright image.

    `headers` [M, 4] are of each box's image. EXIF's orientations 5 to 8 also exchange the axes.
    """
    orientation = headers[:, 2]
    boxes = np.where(orientation[:, None] >= 5, boxes[:, [1, 0, 3, 2]], boxes)
    start, span = boxes[:, :2], boxes[:, 2:]
    mirrored = np.stack(
        [np.isin(orientation, [2, 3, 6, 7]), np.isin(orientation, [3, 4, 7, 8])], axis=1
    )
    return np.concatenate(
        [np.where(mirrored, upright_sizes(headers) - start - span, start), span], axis=1
    )
