"""Image files as upright 8-bit RGB pixels, as a person would see them.

An image that can't be decoded is a `BrokenImage` with its reason.
"""

import errno
import io
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from common.files import open_regular, read_bytes

MAX_PIXELS = 89_478_485  # from here on Pillow warns of a decompression bomb: 256 MiB as RGB
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # larger images are refused
_MAX_BYTES = 2**30  # of a file: as many pixels of 8 bytes, and room for metadata

# Pillow would start Ghostscript for EPS. It can't decode the others.
_NEVER = {"EPS", "BUFR", "GRIB", "HDF5", "MPEG", "WMF"}
Image.preinit()  # the common formats first: they are tried in this order
Image.init()
_FORMATS = tuple(name for name in Image.ID if name not in _NEVER)
SUFFIXES = frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in _FORMATS)

# Errors caused by the file. Others (too many open files, a failing disk) are the machine's: they stop the run, since
# replacing the image would make the samples depend on the machine.
_FAULTS_OF_THE_FILE = {None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP}
_FAULTS_OF_THE_FILE |= {errno.ENAMETOOLONG}

# The value of white in modes that hold more than 8 bits; black is 0.
_WHITE = {"I;16": 65535, "I;16B": 65535, "I;16L": 65535, "I;16N": 65535, "I": 65535, "F": 1.0}


Content = str | PathLike | bytes | Image.Image  # a path, the bytes of a file, or an image


class BrokenImage(Exception):
    """An image that can't be decoded; its text is the reason, in one line."""


def open_rgb(source: Content, reduction: int = 1) -> Image.Image:
    """Decode `source` (a path, the bytes of a file, or an image) to an upright image of mode RGB.

    - Transparent pixels are blended with white: the colour stored there is arbitrary.
    - 16-bit grey is scaled from 0..65535 and floats from 0..1. If values lie outside (32-bit integers, floats in another
      unit), the white is unknown, and the image's own minimum and maximum become black and white.
    - The camera's rotation (EXIF orientation 1 to 8) is applied, a colour profile is not. An animation gives its first frame.
    - With `reduction` 2, 4 or 8 a JPEG becomes smaller by that factor, sides rounded up, for much less work.

    Raises `BrokenImage` for a file that is missing, no image, truncated, empty, or by its header larger than `MAX_PIXELS`.
    """
    with opened(source) as image:
        if reduction > 1:
            image.draft(None, (image.width // reduction, image.height // reduction))
        image.load()
        return _to_rgb(image if orientation_of(image) == 1 else ImageOps.exif_transpose(image))


@contextmanager
def opened(source: Content) -> Iterator[Image.Image]:
    """The image, with its header read. Errors that the file causes are raised as `BrokenImage`."""
    with faults_of_the_file(), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # Pillow warns of sizes, which are checked below, and of odd EXIF tags
        if not isinstance(source, Image.Image):
            file = io.BytesIO(source) if isinstance(source, bytes) else stack.enter_context(open_regular(source))
            source = stack.enter_context(Image.open(file, formats=_FORMATS))
        width, height = source.size
        if width * height == 0:
            raise BrokenImage(f"{width} x {height} pixels: the image has no pixels")
        if width * height > MAX_PIXELS:
            raise BrokenImage(f"{width} x {height} = {width * height} pixels, the limit is {MAX_PIXELS}")
        yield source


def read_file(path: str | PathLike) -> bytes:
    """The bytes of the file. Raises `BrokenImage` if the file is the reason for a failure."""
    with faults_of_the_file():
        return read_bytes(path, _MAX_BYTES)


@contextmanager
def faults_of_the_file() -> Iterator[None]:
    """Errors in the block that an image's file causes are raised as `BrokenImage`."""
    try:
        yield
    except (BrokenImage, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise BrokenImage("not an image: empty, cut off in its header, or of an unknown format") from error
    except OSError as error:
        if error.errno not in _FAULTS_OF_THE_FILE:
            raise
        raise BrokenImage(_one_line(error.strerror or str(error))) from error
    except Exception as error:  # a damaged file makes Pillow raise almost anything
        raise BrokenImage(_one_line(f"{type(error).__name__}: {error}")) from error


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation of the image: 1 (upright) to 8."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # EXIF data that can't be read is no reason to lose good pixels
        return 1


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _WHITE:
        image = Image.fromarray(_to_8_bit(np.asarray(image), _WHITE[image.mode]))
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_8_bit(values: np.ndarray, white: float) -> np.ndarray:
    """Scale [height, width] of any type to uint8: from 0..`white`, or from its own range if that is larger."""
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        raise BrokenImage("no finite pixel value")
    low, high = float(finite.min()), float(finite.max())
    if 0 <= low and high <= white:
        low, high = 0.0, float(white)
    values = np.nan_to_num(values.astype(np.float32), nan=low, posinf=high, neginf=low)
    scale = 255 / max(high - low, float(np.finfo(np.float32).tiny))  # a constant image becomes black
    return np.rint(values * np.float32(scale) - np.float32(low * scale)).clip(0, 255).astype(np.uint8)
