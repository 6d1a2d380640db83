"""Random erasing: replaces a rectangle of an image by noise.

Source: Zhong et al., "Random Erasing Data Augmentation", 2017.
"""

import numpy as np
import torch

from common.classification.augmentation import Augmentation
from common.randomness import key_of, uniforms

_AREA, _RATIO = (0.02, 0.33), (0.3, 3.3)  # of a rectangle: share of the image, height to width
_TRIES = 10


class RandomErasing(Augmentation):
    """Erases a rectangle of an image with `probability`. It stands after `Normalize`.

    All rectangles show parts of one table of normal noise, [3, H, W], which begins for each image at
    another pixel: drawing new noise for every image would cost more than it varies.
    """

    def __init__(
        self, seed: int, probability: float, size: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.seed, self.probability, self.size = seed, probability, size
        generator = torch.Generator().manual_seed(key_of(seed, "erasing") & 0x7FFFFFFFFFFFFFFF)
        self.noise = torch.randn(3, *size, generator=generator, dtype=torch.float32).to(device, dtype)

    def sample(self, positions: np.ndarray) -> np.ndarray:
        """float32[B, 6]: top, bottom, left and right, all 0 for none; row and column where noise begins."""
        height, width = self.size
        area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * self._uniforms(positions, "area", _TRIES))
        ratio = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** self._uniforms(positions, "ratio", _TRIES)
        heights, widths = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (heights < height) & (widths < width)
        first = np.arange(len(positions)), fits.argmax(1)  # the first try that fits
        struck = (self._uniforms(positions, "whether")[:, 0] < self.probability) & fits.any(1)
        rows = np.zeros((len(positions), 6), np.float32)
        for place, name, sides, room in ((0, "top", heights, height), (2, "left", widths, width)):
            side = sides[first]
            rows[:, place] = np.floor(self._uniforms(positions, name)[:, 0] * (room - side + 1)) * struck
            rows[:, place + 1] = (rows[:, place] + side) * struck
        begins = np.hstack([self._uniforms(positions, name) for name in ("down", "across")])
        rows[:, 4:] = np.floor(begins * self.size)
        return rows

    def _uniforms(self, positions: np.ndarray, name: str, count: int = 1) -> np.ndarray:
        """`count` numbers for each position: float64[B, count]."""
        return uniforms(positions[:, None] * count + np.arange(count), key_of(self.seed, "erasing", name))

    def apply(self, images, targets, draws):
        top, bottom, left, right, down, across = draws.to(torch.int64)[:, :, None].unbind(1)  # [B, 1] each
        height, width = images.shape[2:]
        y, x = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
        rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)  # [B, H], [B, W]
        outside = ~(rows[:, :, None] & columns[:, None, :])[:, None]  # [B, 1, H, W]
        noise = self.noise[:, ((y + down) % height)[:, :, None], ((x + across) % width)[:, None, :]]  # [3, B, H, W]
        return torch.where(outside, images, noise.transpose(0, 1)), targets  # in the memory format of `images`
