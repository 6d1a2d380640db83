"""Decoding of a part of an image, with as little work as possible.

The header of a JPEG has the size, so the crop is drawn before anything is decoded. Of a large
photograph libjpeg decodes only a half, a quarter or an eighth of the resolution. Other formats are
decoded whole.
"""

import re

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from simplejpeg import decode_jpeg, decode_jpeg_header

from common.data.images import MAX_PIXELS, Content, open_rgb, opened, orientation_of, read_file

_ORIENTATION = re.compile(rb"Exif\0|tiff:Orientation")
REDUCTIONS = (8, 4, 2)  # that libjpeg decodes to directly
_SPARE = 2.0  # a reduced image is at least this many times the wanted size, and then resized


class Picture:
    """An upright image: pixels uint8[C, H, W], or a JPEG of which only the header has been read.

    Raises `BrokenImage`, here or when pixels are read.
    """

    def __init__(self, content: Content):
        self._pixels: torch.Tensor | None = None
        self._jpeg = b""
        if isinstance(content, torch.Tensor):
            self._pixels = content
        elif isinstance(content, Image.Image):
            self._pixels = pixels_of(open_rgb(content))
        else:
            self._open(content if isinstance(content, bytes) else read_file(content))
        if self._pixels is not None:
            self.height, self.width = self._pixels.shape[1:]

    def _open(self, data: bytes) -> None:
        if size := size_of_usual(data):
            self._jpeg, self._is_turned, (self.height, self.width) = data, False, size
            return
        with opened(data) as image:
            # CMYK is left to Pillow.
            if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
                self._jpeg, orientation = data, orientation_of(image)
                self.width, self.height = image.size[::-1] if 5 <= orientation <= 8 else image.size
                self._is_turned = orientation != 1
            else:
                self._pixels = pixels_of(open_rgb(image))

    def region(
        self,
        top: int,
        left: int,
        height: int,
        width: int,
        size: tuple[int, int],
        interpolation: str,
    ) -> torch.Tensor:
        """uint8[3, *size]: a part of the image, resized with anti-aliasing (`bilinear`; anything
        else is `bicubic`).

        If the part is 4 times as large as `size` or more, its edges are moved to multiples of 2, 4
        or 8 pixels.
        """
        reduction = self.reduction(height, width, size)
        part = self.part(
            reduction,
            *(round(edge / reduction) for edge in (top, left, top + height, left + width)),
        )
        return resized(part, size, interpolation)

    def reduction(self, height: float, width: float, size: tuple[int, int]) -> int:
        """1, 2, 4 or 8: the reduction that suffices for a part of `height` x `width` shown at `size`."""
        wanted = _SPARE * max(size[0] / height, size[1] / width)
        return (
            next((factor for factor in REDUCTIONS if factor * wanted <= 1), 1) if self._jpeg else 1
        )

    def whole(self) -> torch.Tensor:
        """uint8[3, H, W]: all of the image at its full resolution."""
        return self.part(1, 0, 0, self.height, self.width)

    def part(self, reduction: int, top: int, left: int, bottom: int, right: int) -> torch.Tensor:
        """uint8[3, bottom - top, right - left]; a JPEG is smaller by `reduction`, its sides rounded up."""
        if self._pixels is not None:
            return self._pixels[:, top:bottom, left:right]
        if not self._is_turned:
            height, width = (-(-side // reduction) for side in (self.height, self.width))
            try:  # the smallest size that is at least this large is the requested reduction
                pixels = decode_jpeg(self._jpeg, min_height=height, min_width=width, min_factor=1)
                return torch.from_numpy(pixels[top:bottom, left:right]).permute(2, 0, 1)
            except ValueError:
                pass  # Pillow reads it all the same, or names the fault
        return pixels_of(open_rgb(self._jpeg, reduction=reduction).crop((left, top, right, bottom)))


def resized(part: torch.Tensor, size: tuple[int, int], interpolation: str) -> torch.Tensor:
    """uint8[3, H, W] -> uint8[3, *size], with anti-aliasing (`bilinear`; anything else is `bicubic`)."""
    if part.shape[1:] == size:
        return part
    mode = "bilinear" if interpolation == "bilinear" else "bicubic"
    # The copy makes resizing three times as fast.
    batch = part[None].contiguous(memory_format=torch.channels_last)
    return F.interpolate(batch, size, mode=mode, antialias=True)[0]


def size_of_usual(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG in the usual colours that is stored upright, ten times as fast as
    with Pillow.
    """
    if data[:2] != b"\xff\xd8":
        return None
    try:
        if _may_be_turned(data):
            return None
        height, width, colours, _ = decode_jpeg_header(data)
    except (IndexError, ValueError):
        return None
    return (
        (height, width)
        if colours in ("YCbCr", "Gray") and 0 < height * width <= MAX_PIXELS
        else None
    )


def _may_be_turned(jpeg: bytes) -> bool:
    """True if a segment before the pixels may have an orientation, or is damaged. IndexError if the
    pixels are not there.
    """
    position = 2
    while jpeg[position + 1] != 0xDA:
        end = position + 2 + (jpeg[position + 2] << 8) + jpeg[position + 3]
        has_metadata = jpeg[position + 1] == 0xE1 and _ORIENTATION.search(jpeg, position, end)
        if has_metadata or jpeg[position] != 0xFF:
            return True
        position = end
    return False


def pixels_of(image: Image.Image) -> torch.Tensor:
    """RGB image -> uint8[3, H, W]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
