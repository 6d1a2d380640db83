"""Decoding of a crop of an image, with as little work as possible.

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

from common.data.batch_plan import ceil_div
from common.data.images import (
    MAX_PIXELS,
    Content,
    get_orientation,
    open_image,
    open_rgb,
    read_file,
)

_ORIENTATION = re.compile(rb"Exif\0|tiff:Orientation")
REDUCTIONS = (8, 4, 2)  # that libjpeg decodes to directly
_MIN_OVERSAMPLING = (
    2.0  # a reduced image is at least this many times the target size, and then resized
)


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
            self._pixels = pil_to_tensor(open_rgb(content))
        else:
            self._open(content if isinstance(content, bytes) else read_file(content))
        if self._pixels is not None:
            self.height, self.width = self._pixels.shape[1:]

    def _open(self, data: bytes) -> None:
        size = read_jpeg_size(data)
        if size:
            self._jpeg = data
            self._is_turned = False
            self.height, self.width = size
            return
        with open_image(data) as image:
            # CMYK is left to Pillow.
            if image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
                self._pixels = pil_to_tensor(open_rgb(image))
                return
            orientation = get_orientation(image)
            self._jpeg = data
            self._is_turned = orientation != 1
            self.width, self.height = image.size
            if 5 <= orientation <= 8:  # turned by 90 or 270 degrees
                self.height, self.width = image.size

    def crop_and_resize(
        self,
        top: int,
        left: int,
        height: int,
        width: int,
        size: tuple[int, int],
        interpolation: str,
    ) -> torch.Tensor:
        """uint8[3, *size]: a crop, resized with anti-aliasing (`bilinear`; anything else is `bicubic`).

        If the crop is 4 times as large as `size` or more, its edges are moved to multiples of 2, 4
        or 8 pixels.
        """
        reduction = self.choose_reduction(height, width, size)
        edges = (top, left, top + height, left + width)
        crop = self.decode_crop(reduction, *(round(edge / reduction) for edge in edges))
        return resize(crop, size, interpolation)

    def choose_reduction(self, height: float, width: float, size: tuple[int, int]) -> int:
        """1, 2, 4 or 8: the reduction that suffices for a crop of `height` x `width`, resized to `size`."""
        if self._jpeg:
            min_scale = _MIN_OVERSAMPLING * max(size[0] / height, size[1] / width)
            for reduction in REDUCTIONS:
                if reduction * min_scale <= 1:
                    return reduction
        return 1

    def decode(self) -> torch.Tensor:
        """uint8[3, H, W]: all of the image at its full resolution."""
        return self.decode_crop(1, 0, 0, self.height, self.width)

    def decode_crop(
        self, reduction: int, top: int, left: int, bottom: int, right: int
    ) -> torch.Tensor:
        """uint8[3, bottom - top, right - left]; a JPEG is smaller by `reduction`, its sides rounded up."""
        if self._pixels is not None:
            return self._pixels[:, top:bottom, left:right]
        if not self._is_turned:
            # The smallest size that is at least this large is that of the reduction.
            height = ceil_div(self.height, reduction)
            width = ceil_div(self.width, reduction)
            try:
                pixels = decode_jpeg(self._jpeg, min_height=height, min_width=width, min_factor=1)
                return torch.from_numpy(pixels[top:bottom, left:right]).permute(2, 0, 1)
            except ValueError:
                pass  # Pillow reads it all the same, or names the fault
        image = open_rgb(self._jpeg, reduction=reduction)
        return pil_to_tensor(image.crop((left, top, right, bottom)))


def resize(pixels: torch.Tensor, size: tuple[int, int], interpolation: str) -> torch.Tensor:
    """uint8[3, H, W] -> uint8[3, *size], with anti-aliasing (`bilinear`; anything else is `bicubic`)."""
    if pixels.shape[1:] == size:
        return pixels
    mode = "bilinear" if interpolation == "bilinear" else "bicubic"
    # The copy makes resizing three times as fast.
    batch = pixels[None].contiguous(memory_format=torch.channels_last)
    return F.interpolate(batch, size, mode=mode, antialias=True)[0]


def read_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG in RGB or grey that is stored upright; None for any other image.

    It takes a tenth of Pillow's time.
    """
    if data[:2] != b"\xff\xd8":
        return None
    try:
        if _may_be_turned(data):
            return None
        height, width, colours, _ = decode_jpeg_header(data)
    except (IndexError, ValueError):
        return None
    if colours not in ("YCbCr", "Gray") or not 0 < height * width <= MAX_PIXELS:
        return None
    return height, width


def _may_be_turned(jpeg: bytes) -> bool:
    """True if a segment before the pixels may have an orientation, or is damaged.

    Raises IndexError if the pixels are not there.
    """
    position = 2
    while jpeg[position + 1] != 0xDA:
        end = position + 2 + (jpeg[position + 2] << 8) + jpeg[position + 3]
        if jpeg[position] != 0xFF:
            return True
        if jpeg[position + 1] == 0xE1 and _ORIENTATION.search(jpeg, position, end):
            return True
        position = end
    return False


def pil_to_tensor(image: Image.Image) -> torch.Tensor:
    """RGB image -> uint8[3, H, W]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
