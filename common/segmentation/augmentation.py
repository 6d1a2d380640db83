"""Augmentation of training images with their masks."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from common.data.decoding import Picture, pil_to_tensor
from common.errors import Refused
from common.randomness import key_of, seed_generators
from common.segmentation.masks import IGNORED
from common.segmentation.source import Pair

_MAX_CLASS_SHARE = 0.75  # of the labelled pixels of a crop
_NUM_TRIES = 10  # crops, until one has several classes
_LOOKED_AT = 64  # pixels on a side that are counted for this


@dataclass(frozen=True)
class CropAugmentation:
    """Scaling, a random crop, mirroring and photometric distortion: a pure function of (seed, position).

    The crop is drawn again, up to ten times, while one class has more than 75 % of its labelled
    pixels. Masks are resized to the nearest pixel. Sources: Chen et al. 2017, "Rethinking Atrous
    Convolution for Semantic Image Segmentation" (scale, crop); the limit of a class is MMSegmentation's.
    """

    seed: int
    crop_size: int  # side of the square, in pixels
    short_side: int  # to which images are resized before they are scaled; 0: as they are
    min_scale: float
    max_scale: float
    hflip: float  # probability of a mirror image
    photometric: float  # probability of each of several distortions

    def __post_init__(self) -> None:
        if self.min_scale > self.max_scale:
            raise Refused(
                f"--min_scale {self.min_scale:g}: is larger than --max_scale {self.max_scale:g}; lower "
                "one, or raise the other"
            )

    def __call__(self, pair: Pair, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """An image uint8[3, h, w] and its class ids int16[h, w], at most `crop_size` on each side."""
        seed_generators(key_of(self.seed, "augmentation", position))
        mask = pair.mask
        full_size = np.array(mask.shape)
        scale = np.random.uniform(self.min_scale, self.max_scale)
        if self.short_side:
            scale *= self.short_side / full_size.min()
        out_size = np.rint(full_size * scale).astype(int).clip(1, self.crop_size)
        span = np.rint(out_size / scale).astype(int).clip(1, full_size)
        corner = self._draw_corner(mask, span)
        image = _resize_part(pair.picture, corner, span, full_size, out_size)
        labels = _sample_nearest(mask, corner, span, out_size)
        if self.photometric:
            distort = v2.RandomPhotometricDistort(p=self.photometric)
            # Pillow stays in 8 bits, in 0.6 of the time.
            image = pil_to_tensor(distort(Image.fromarray(image.permute(1, 2, 0).numpy())))
        if np.random.random() < self.hflip:
            image = image.flip(2)
            labels = labels[:, ::-1]
        return image, torch.from_numpy(labels.copy())

    def _draw_corner(self, mask: np.ndarray, span: np.ndarray) -> np.ndarray:
        """Draw the top and left edge of a part of `span` (height, width) of the mask."""
        stride = 1 + span.max() // _LOOKED_AT
        for _ in range(_NUM_TRIES):
            corner = np.floor(np.random.random(2) * (mask.shape - span + 1)).astype(int)
            top, left = corner
            bottom, right = corner + span
            ids = mask[top:bottom:stride, left:right:stride]
            counts = np.unique(ids[ids != IGNORED], return_counts=True)[1]
            if len(counts) > 1 and counts.max() <= _MAX_CLASS_SHARE * counts.sum():
                break
        return corner


def _resize_part(
    picture: Picture,
    corner: np.ndarray,
    span: np.ndarray,
    full_size: np.ndarray,
    out_size: np.ndarray,
) -> torch.Tensor:
    """A part of the picture, given in pixels of an image of `full_size`, as uint8[3, *out_size]."""
    picture_size = np.array([picture.height, picture.width])
    kept = picture_size / full_size  # 1, or less in a cache
    top, left = np.minimum(np.rint(corner * kept).astype(int), picture_size - 1)
    height, width = np.rint(span * kept).astype(int).clip(1, picture_size - [top, left])
    size = (int(out_size[0]), int(out_size[1]))
    return picture.crop_and_resize(int(top), int(left), int(height), int(width), size, "bilinear")


def _sample_nearest(
    mask: np.ndarray, corner: np.ndarray, span: np.ndarray, out_size: np.ndarray
) -> np.ndarray:
    """The ids at the centres of the pixels of a resized part: int16[*out_size]."""
    rows, columns = [
        start + ((np.arange(size) + 0.5) * length / size).astype(int)
        for start, length, size in zip(corner, span, out_size, strict=True)
    ]
    return mask[np.ix_(rows, columns)]
