"""Size and orientation of image files, read from their headers without decoding."""

import io
import os
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from PIL import Image

from common.data.decoding import read_jpeg_size
from common.data.images import BrokenImage, check_size, read_geometry, report_as_broken
from common.detection.data.file_stats import read_each
from common.errors import Refused
from common.files import OddFile, open_regular

_HEAD_SIZE = 8_192  # bytes in which nearly every JPEG has its size


def read_file_headers(folder: str, paths: pa.Array, *, allow_missing: bool = False) -> np.ndarray:
    """int64[N, 4]: width and height as stored, EXIF orientation 1 to 8, bytes of files below `folder`.

    Width 0 if the file is no readable image. If files are missing, raises `Refused`, or with
    `allow_missing` gives width 0 and size -1 for them.
    """
    headers = read_each(folder, paths, _read_file_header, num_columns=4)
    missing = np.flatnonzero(headers[:, 3] < 0)
    if missing.size and not allow_missing:
        name = paths[int(missing[0])].as_py().decode(errors="backslashreplace")
        raise Refused(
            f"{os.path.join(folder, name)}: {missing.size} of {len(paths)} annotated images are "
            "missing or may not be read, this one first; add them, or take them out of the "
            "annotations"
        )
    return headers


def read_header(content: bytes) -> tuple[int, int, int, int]:
    """The same four numbers of an image's bytes."""
    width, height, orientation = _read_geometry(content[:_HEAD_SIZE], io.BytesIO(content))
    return width, height, orientation, len(content)


def _read_file_header(path: bytes) -> tuple[int, int, int, int]:
    try:
        with report_as_broken(), open_regular(path) as file:
            head = os.read(file.fileno(), _HEAD_SIZE)
            num_bytes = os.fstat(file.fileno()).st_size
            width, height, orientation = _read_geometry(head, file)
            return width, height, orientation, num_bytes
    except BrokenImage as error:
        is_odd = isinstance(error.__cause__, OddFile)
        return 0, 0, 1, 0 if is_odd else -1


def _read_geometry(head: bytes, file: BinaryIO) -> tuple[int, int, int]:
    """Width, height and orientation of an image that begins with `head`; width 0 if it can't be read."""
    size = read_jpeg_size(head)
    if size:  # a JPEG without EXIF data, for which Pillow would take 90 µs
        height, width = size
        return width, height, 1
    try:
        with Image.open(file) as image:
            check_size(*image.size)
            return read_geometry(image)
    except Exception:
        # A damaged file makes Pillow raise almost anything; decoding it will give the reason.
        return 0, 0, 1


def compute_upright_sizes(headers: np.ndarray) -> np.ndarray:
    """int64[N, 2] width and height of the upright images."""
    return np.where(headers[:, 2:3] >= 5, headers[:, 1::-1], headers[:, :2])


def rotate_boxes(boxes: np.ndarray, headers: np.ndarray) -> np.ndarray:
    """Boxes [M, 4] (left, top, width, height) in stored pixels -> in pixels of the upright image.

    `headers` [M, 4] are of each box's image. EXIF's orientations 5 to 8 also exchange the axes.
    """
    orientation = headers[:, 2]
    boxes = np.where(orientation[:, None] >= 5, boxes[:, [1, 0, 3, 2]], boxes)
    corners = boxes[:, :2]
    sides = boxes[:, 2:]
    is_flipped_x = np.isin(orientation, [2, 3, 6, 7])
    is_flipped_y = np.isin(orientation, [3, 4, 7, 8])
    is_flipped = np.stack([is_flipped_x, is_flipped_y], axis=1)
    flipped_corners = compute_upright_sizes(headers) - corners - sides
    return np.concatenate([np.where(is_flipped, flipped_corners, corners), sides], axis=1)
