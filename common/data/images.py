"""Image files: which files are images, and their pixels as upright 8-bit RGB, as a person sees them.

An image that can't be decoded is a `BrokenImage` with its reason.
"""

import errno
import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from mimetypes import MimeTypes
from os import PathLike
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps, PngImagePlugin, UnidentifiedImageError

from common.data.notes import Notes
from common.data.pixels import MAX_PIXELS, BrokenImage, to_8_bit
from common.data.tiff import open_tiff
from common.files import open_regular, read_bytes

if TYPE_CHECKING:
    import torch

_MAX_BYTES = 2**30  # of a file: as many pixels of 8 bytes, and room for metadata
# Larger images are refused.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Of a PNG's text and colour profile, which Pillow reads with the image: a workflow or XMP is larger
# than Pillow's 1 MiB.
PngImagePlugin.MAX_TEXT_CHUNK = 2**26
PngImagePlugin.MAX_TEXT_MEMORY = 2**26

_TAIL = 2**12  # bytes at the end of a PNG that may hold its orientation
# Text and chunks of a PNG.
_MAY_HAVE_ORIENTATION = {"exif", "Raw profile type exif", "XML:com.adobe.xmp"}


def _refuse_heic(*_: object) -> Image.Image:
    raise BrokenImage(
        "HEIC, which needs pillow-heif: pip install pillow-heif, or convert it to JPEG"
    )


# Pillow would start Ghostscript for EPS. It can't decode the others.
_EXCLUDED_FORMATS = {"EPS", "BUFR", "GRIB", "HDF5", "MPEG", "WMF"}
Image.preinit()  # the common formats first: they are tried in this order
Image.init()
Image.register_open("TIFF", open_tiff, Image.OPEN["TIFF"][1])  # type: ignore[arg-type]
try:
    import pillow_heif

    pillow_heif.register_heif_opener()
except ImportError:
    Image.register_open(
        "HEIF",
        _refuse_heic,  # type: ignore[arg-type]
        lambda prefix: prefix[4:10] in (b"ftyphe", b"ftypmi", b"ftypms"),
    )
_FORMATS = tuple(name for name in Image.ID if name not in _EXCLUDED_FORMATS)
_FORMAT_BY_SUFFIX = Image.registered_extensions()
SUFFIXES = frozenset(name for name in _FORMAT_BY_SUFFIX if _FORMAT_BY_SUFFIX[name] in _FORMATS)

# Errors caused by the file. Others (too many open files, a failing disk) are the machine's: they
# stop the run, since replacing the image would make the samples depend on the machine.
_FILE_ERRNOS = {
    None,
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}

# The value of white in modes that hold more than 8 bits; black is 0.
_WHITE = {"I;16": 65535, "I;16B": 65535, "I;16L": 65535, "I;16N": 65535, "I": 65535, "F": 1.0}

# How a file shows that it is an image, or one of a kind that is not read.
_HEAD = re.compile(rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF....WEBP|BM....\0\0\0\0", re.DOTALL)
# HEIC, TIFF, JPEG XL.
_UNREAD_HEAD = re.compile(rb"....ftyp(hei|hev|mif|msf)|II\*\0|MM\0\*|\0\0\0\x0cJXL", re.DOTALL)
_UNREAD_SUFFIXES = re.compile(r"\.(heic|heif|jxl|jxr|raw|dng|cr[23]|nef|arw|orf|rw2)")
_TYPES = MimeTypes()  # without the files of the machine
UNREAD_ADVICE = (
    "they can't be read as images: convert them to JPEG or PNG; for HEIC, pip install pillow-heif "
    "will do, too"
)

# A path, the bytes of a file, an image, or pixels uint8[C, H, W].
Content: TypeAlias = "str | PathLike | bytes | Image.Image | torch.Tensor"


def open_rgb(source: Content, reduction: int = 1) -> Image.Image:
    """Decode `source` to an upright image of mode RGB.

    - A tensor shows its first three channels, one channel in grey.
    - Transparent pixels are blended with white: the colour stored there is arbitrary.
    - 16-bit grey is scaled from 0..65535 and floats from 0..1. If values lie outside (32-bit
      integers, floats in another unit), the white is unknown, and the image's own minimum and
      maximum become black and white.
    - The camera's rotation (orientation 1 to 8 in EXIF, or else in XMP) is applied, a colour profile is not.
    - An animation or a TIFF of several pages gives its first image.
    - With `reduction` 2, 4 or 8 a JPEG becomes smaller by that factor, sides rounded up, for much less work.

    Raises `BrokenImage` for a file that is missing, no image, truncated, empty, or by its header
    larger than `MAX_PIXELS`.
    """
    with open_image(source) as image:
        if reduction > 1:
            image.draft(None, (image.width // reduction, image.height // reduction))
        image.load()
        if get_orientation(image) != 1:
            image = ImageOps.exif_transpose(image)
        return _to_rgb(image)


@contextmanager
def open_image(source: Content) -> Iterator[Image.Image]:
    """The image, with its header read. Errors that the file causes are raised as `BrokenImage`."""
    with report_as_broken("can't be decoded: "), warnings.catch_warnings(), ExitStack() as stack:
        # Pillow warns of sizes, which are checked below, and of odd EXIF tags.
        warnings.simplefilter("ignore")
        if hasattr(source, "numpy"):
            channels = source[np.arange(3) % len(source)]  # type: ignore[arg-type, index]
            source = Image.fromarray(channels.permute(1, 2, 0).numpy())  # type: ignore[union-attr]
        if not isinstance(source, Image.Image):
            file: IO[bytes]
            if isinstance(source, bytes):
                file = io.BytesIO(source)
            else:
                file = stack.enter_context(open_regular(source))
            source = stack.enter_context(Image.open(file, formats=_FORMATS))
        check_size(*source.size)
        yield source


def check_size(width: int, height: int) -> None:
    """Raise `BrokenImage` for an image of no pixels, or of more than `MAX_PIXELS`."""
    if width * height == 0:
        raise BrokenImage(f"{width} x {height} pixels: the image has no pixels")
    if width * height > MAX_PIXELS:
        raise BrokenImage(
            f"{width} x {height} = {width * height} pixels, the limit is {MAX_PIXELS}"
        )


def read_geometry(image: ImageFile.ImageFile) -> tuple[int, int, int]:
    """Width and height as stored, and orientation 1 to 8, of an image whose pixels have not been read."""
    if image.format == "PNG" and not _has_late_metadata(image.fp):
        if _MAY_HAVE_ORIENTATION.isdisjoint(image.info):
            return image.size + (1,)
        image.info.setdefault("exif", None)  # or Pillow decodes the pixels to look behind them
    orientation = get_orientation(image)
    if hasattr(image, "tag_v2"):  # the size of a TIFF is that of the upright image
        return image.tag_v2[256], image.tag_v2[257], orientation
    return image.size + (orientation,)


def _has_late_metadata(png: Any) -> bool:
    """True if the end of the file may have an orientation, where exiftool writes it."""
    position = png.tell()
    png.seek(max(0, png.seek(0, io.SEEK_END) - _TAIL))
    tail = png.read()
    png.seek(position)
    return any(name in tail for name in (b"eXIf", b"com.adobe.xmp", b"Raw profile"))


def read_file(path: str | PathLike) -> bytes:
    """The bytes of the file. Raises `BrokenImage` if the file is the reason for a failure."""
    with report_as_broken():
        return read_bytes(path, _MAX_BYTES)


@contextmanager
def report_as_broken(title: str = "") -> Iterator[None]:
    """Errors in the block that an image's file causes are raised as `BrokenImage`.

    `title` precedes the messages of libraries.
    """
    try:
        yield
    except (BrokenImage, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise BrokenImage(
            "not an image: empty, cut off in its header, or of an unknown format"
        ) from error
    except Image.DecompressionBombError as error:
        raise BrokenImage(
            f"more than {2 * MAX_PIXELS} pixels, the limit is {MAX_PIXELS}"
        ) from error
    except OSError as error:
        if error.errno not in _FILE_ERRNOS:
            raise
        raise BrokenImage(_join_lines(error.strerror or f"{title}{error}")) from error
    except Exception as error:  # a damaged file makes Pillow raise almost anything
        raise BrokenImage(_join_lines(f"{title}{type(error).__name__}: {error}")) from error


def get_orientation(image: Image.Image) -> int:
    """EXIF orientation of the image, 1 (upright) to 8, from its EXIF data or else from XMP."""
    with suppress(Exception):  # metadata that can't be read is no reason to lose good pixels
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        if orientation in range(1, 9):
            return int(orientation)
    return 1


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _WHITE:
        image = Image.fromarray(to_8_bit(np.asarray(image), _WHITE[image.mode]))
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


# ---- which files are images


def has_image_suffix(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def is_image_file(path: str, notes: Notes) -> bool:
    """True for a regular file with an image's suffix, or with its first bytes.

    `notes` count the files without the suffix.
    """
    if has_image_suffix(path):
        return True
    suffix = os.path.splitext(path)[1].lower()
    mime_type, _ = _TYPES.guess_type(path)
    head = b""
    if mime_type is None or mime_type.startswith("image"):
        with open_regular(path) as file:
            head = file.read(16)
    name = suffix if re.fullmatch(r"\.[a-z]\w{1,11}", suffix) else "without a suffix"
    if _HEAD.match(head):
        notes.change(f"({name}) are known by their first bytes", path)
        return True
    if _UNREAD_SUFFIXES.fullmatch(suffix) or _UNREAD_HEAD.match(head):
        notes.leave_out(name, path)
    else:
        notes.skip(name, path)
    return False
