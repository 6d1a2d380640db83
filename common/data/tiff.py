"""TIFF files: Pillow reads those that it reads right, tifffile the others, by their tags.

Pillow takes 16-bit planes for interleaved pixels, does not invert more than 8 bits where 0 is
white, swaps bytes of compressed big-endian floats, wraps unsigned integers of 32 bits, and takes a
band without a meaning for transparency. It can't open floats in colour. tifffile reads raw pixels
without other packages, and no more than the file has.
"""

import logging
from contextlib import suppress
from typing import IO

import numpy as np
import tifffile
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import TiffImageFile

from common.data.pixels import MAX_PIXELS, BrokenImage, to_8_bit

# They print what is odd about a file.
logging.getLogger("tifffile").disabled = True
logging.getLogger("PIL.TiffImagePlugin").disabled = True

# Values of tags.
_WHITE_IS_0 = 0
_GREY = 1
_RGB = 2
_PLANAR = 2
_UNSIGNED = 1
_RAW = 1


def open_tiff(file: IO[bytes], filename: str | bytes = "") -> Image.Image:
    """Open the first page; what Pillow would misread is decoded at once.

    Raises `BrokenImage` if it can't be read.
    """
    with suppress(Exception):  # an unusual or damaged file makes Pillow raise almost anything
        image = TiffImageFile(file, filename)
        if _is_read_right(image):
            return image
    file.seek(0)
    try:
        with tifffile.TiffFile(file, name="a TIFF") as tiff:
            return _decode(tiff.pages.first)
    except MemoryError as error:  # a damaged header asks for any number of values
        raise BrokenImage("a damaged TIFF") from error


def _is_read_right(image: TiffImageFile) -> bool:
    """True if Pillow reads such pixels right, by a comparison with tifffile for all kinds of samples."""
    tags = image.tag_v2
    num_bands = tags.get(277, 1)
    bits = tags.get(258, (1,))[0]
    photometric = tags.get(262, _WHITE_IS_0)
    is_raw = tags.get(259, _RAW) == _RAW
    if photometric == _RGB and num_bands > 3 and 338 not in tags:
        return False
    if num_bands > 1:
        if tags.get(284) != _PLANAR:
            return True
        if photometric == _GREY:
            return False
        return bits == 8 or (num_bands == 3 and not is_raw)
    if bits > 8 and photometric != _GREY:
        return False
    if tags.get(339, (_UNSIGNED,))[0] == _UNSIGNED:
        return bits <= 8 or bits == 16
    return bits > 8 and (is_raw or tags.prefix == b"II")


def _can_decode(page: tifffile.TiffPage) -> bool:
    """True for raw integers or floats, in grey or RGB without transparency, of a usual size."""
    if page.photometric > _RGB or any(page.extrasamples):
        return False
    # As in Pillow, some bands beside the colours are not used.
    max_bands = 6 if page.photometric == _RGB else 1
    if page.samplesperpixel > max_bands or str(page.dtype)[0] not in "uif":
        return False
    if page.compression != _RAW:
        return False
    return page.size <= 3 * MAX_PIXELS


def _decode(page: tifffile.TiffPage) -> Image.Image:
    """Decode a page to an image of mode L or RGB."""
    num_bands = page.samplesperpixel
    is_rgb = page.photometric == _RGB
    if not _can_decode(page):
        raise BrokenImage(
            f"a TIFF of {num_bands} bands of {page.bitspersample} bits, {page.imagewidth} x "
            f"{page.imagelength} pixels, photometric {page.photometric:d}, compression "
            f"{page.compression:d}, which is not read: save it as RGB without compression, or "
            "choose its bands in a data set of your own (docs/change_it.md)"
        )
    if page.nbytes > page.parent.filehandle.size:  # tifffile would make up what is missing
        raise BrokenImage("a TIFF that is cut off")
    values = page.asarray(maxworkers=1)
    if is_rgb and page.planarconfig == _PLANAR:
        values = np.moveaxis(values, 0, -1)
    if is_rgb:
        values = values[..., :3]
    white = 1.0
    if values.dtype.kind != "f":
        white = 2.0 ** min(page.bitspersample, 16) - 1
    pixels = to_8_bit(values, white)
    if page.photometric == _WHITE_IS_0:
        pixels = 255 - pixels
    image = Image.fromarray(pixels)
    image.getexif()[ExifTags.Base.Orientation] = page.tags.valueof(274, 1)
    return image
