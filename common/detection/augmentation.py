"""How large will an image with boxes be at its position of the stream, and what happens to it on the way there?"""

from dataclasses import dataclass

import numpy as np
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from common.randomness import key_of, seed_generators, uniforms

_SMALLEST = 1.0  # pixels: a box that is cut to less than this on a side is left out


@dataclass(frozen=True)
class BoxAugmentation:
    """Resize, scale jitter, mirror and colour of training images, each a pure function of (seed, position).

    The size comes from metadata alone (`sizes`), so that every process knows the canvas of a whole step without decoding it.
    """

    seed: int
    short_sides: tuple[int, ...]  # one is drawn for each position: the length of the image's shorter side
    long_side: int  # no longer than this
    jitter: float = (
        0.0  # large-scale jitter: the scale is drawn from [1 - jitter, 1 + jitter], and cut to the long side
    )
    hflip: float = 0.0
    photometric: float = 0.0

    def scales(self, positions: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """float64[n]: how much larger each image of `sizes` int[n, 2] (width, height) gets."""
        choice = (uniforms(positions, key_of(self.seed, "short side")) * len(self.short_sides)).astype(int)
        short = np.array(self.short_sides)[choice]
        scale = np.minimum(short / sizes.min(1), self.long_side / sizes.max(1))
        return scale * (1 + self.jitter * (2 * uniforms(positions, key_of(self.seed, "scale")) - 1))

    def sizes(self, positions: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """int64[n, 2]: width and height of what `__call__` makes of images of `sizes` at `positions`."""
        resized = np.maximum(1, np.rint(sizes * self.scales(positions, sizes)[:, None])).astype(np.int64)
        return np.minimum(resized, self.long_side)

    def __call__(self, image, boxes: np.ndarray, labels: np.ndarray, crowd: np.ndarray, position: int):
        """PIL image or uint8[H, W, 3] with its boxes -> uint8[3, h, w], boxes float32[m, 4], labels, crowd: m <= n are left."""
        pixels = F.to_image(image)
        height, width = pixels.shape[1:]
        where, size = np.array([position]), np.array([[width, height]])
        scale = self.scales(where, size)[0]
        resized = np.maximum(1, np.rint(size[0] * scale)).astype(int)
        pixels = F.resize(pixels, [int(resized[1]), int(resized[0])], antialias=True)
        boxes = boxes * (resized / size[0])[[0, 1, 0, 1]]

        kept = np.minimum(resized, self.long_side)
        corner = np.floor(self._uniforms(where, "left", "top") * (resized - kept + 1)).astype(int)
        pixels = pixels[:, corner[1] : corner[1] + kept[1], corner[0] : corner[0] + kept[0]]
        boxes = (boxes - corner[[0, 1, 0, 1]]).clip(0, kept[[0, 1, 0, 1]])
        left = (boxes[:, 2:] - boxes[:, :2] >= _SMALLEST).all(1)
        boxes, labels, crowd = boxes[left], labels[left], crowd[left]

        if self._uniforms(where, "mirror")[0] < self.hflip:
            pixels = pixels.flip(2)
            boxes[:, [0, 2]] = kept[0] - boxes[:, [2, 0]]
        if self.photometric:
            seed_generators(key_of(self.seed, "colour", position))
            pixels = v2.RandomPhotometricDistort(p=self.photometric)(pixels)
        return torch.as_tensor(pixels), boxes.astype(np.float32), labels, crowd

    def _uniforms(self, where: np.ndarray, *names: str) -> np.ndarray:
        return np.concatenate([uniforms(where, key_of(self.seed, name)) for name in names])
