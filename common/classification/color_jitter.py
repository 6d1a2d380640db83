"""Colour jitter: changes the brightness, contrast and saturation of each image."""

from dataclasses import dataclass

import numpy as np
import torch

from common.classification.augmentation import Augmentation
from common.randomness import key_of, uniforms

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's and torchvision's grey


@dataclass
class ColorJitter(Augmentation):
    """torchvision's ColorJitter in a fixed order: they differ only where values are clamped.

    It stands before `Normalize`: images of 0..255 come in and go out.
    """

    seed: int
    strength: float

    def sample(self, positions: np.ndarray) -> np.ndarray:
        """float32[B, 3]: brightness, contrast and saturation within 1 +- `strength`, not below 0."""
        low, high = max(0.0, 1 - self.strength), 1 + self.strength
        names = ("brightness", "contrast", "saturation")
        shares = np.stack([uniforms(positions, key_of(self.seed, "colours", name)) for name in names], 1)
        return (low + (high - low) * shares).astype(np.float32)

    def apply(self, images, targets, draws):
        brightness, contrast, saturation = draws.to(images.dtype)[:, :, None, None, None].unbind(1)
        # Filled on the device: the host would wait until numbers from torch.tensor had been copied there.
        luma = torch.stack([images.new_full((1, 1), weight) for weight in _LUMA])
        images = (images * brightness).clamp(0, 255)
        grey = (images * luma).sum(1, keepdim=True).mean((2, 3), keepdim=True)
        images = torch.lerp(grey, images, contrast).clamp(0, 255)
        return torch.lerp((images * luma).sum(1, keepdim=True), images, saturation).clamp(0, 255), targets
