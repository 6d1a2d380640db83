"""What is varied on the device, a whole batch at once, by numbers that a data worker drew from the samples' positions?

Colours and erasing: element by element, an accelerator does in passing what would cost a worker as much as decoding.
(`mixing` is done there, too.) What comes out is the same on any layout.
"""

import numpy as np
import torch

from common.randomness import key_of, uniforms

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's and torchvision's grey
_AREA, _RATIO = (0.02, 0.33), (0.3, 3.3)  # of an erased rectangle: share of the image, height to width
_TRIES = 10


def draw_colours(positions: np.ndarray, seed: int, strength: float) -> np.ndarray:
    """Factors of brightness, contrast and saturation within 1 +- `strength`, not below 0: float32[n, 3] for int64[n]."""
    low, high = max(0.0, 1 - strength), 1 + strength
    names = ("brightness", "contrast", "saturation")
    draws = np.stack([uniforms(positions, key_of(seed, "colours", name)) for name in names], 1)
    return (low + (high - low) * draws).astype(np.float32)


def vary_colours(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Images [B, 3, H, W] of 0..255 with their brightness, contrast and saturation (factors [B, 3]) changed, again 0..255.

    As torchvision's ColorJitter, in this order instead of a random one: the orders differ only where values are clamped.
    """
    brightness, contrast, saturation = factors.to(images.dtype)[:, :, None, None, None].unbind(1)
    # Filled there: torch.tensor would send the numbers to the device, and the host wait until they are.
    luma = torch.stack([images.new_full((1, 1), weight) for weight in _LUMA])
    images = (images * brightness).clamp(0, 255)
    grey = (images * luma).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    images = torch.lerp(grey, images, contrast).clamp(0, 255)
    return torch.lerp((images * luma).sum(1, keepdim=True), images, saturation).clamp(0, 255)


def draw_erasing(positions: np.ndarray, seed: int, probability: float, height: int, width: int) -> np.ndarray:
    """What is erased of images of this size: float32[n, 6] for int64[n], a row an image.

    A row holds the rectangle (top, bottom, left, right; all 0 where nothing is erased) and where in the table of noise the
    image's own begins. Source: Zhong et al., "Random Erasing Data Augmentation", 2017.
    """

    def draw(name: str, count: int = 1) -> np.ndarray:
        return uniforms(positions[:, None] * count + np.arange(count), key_of(seed, "erasing", name))

    area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * draw("area", _TRIES))
    ratio = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** draw("ratio", _TRIES)
    heights, widths = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (heights < height) & (widths < width)
    first = np.arange(len(positions)), fits.argmax(1)  # the first try that fits
    struck = (draw("whether")[:, 0] < probability) & fits.any(1)
    rows = np.zeros((len(positions), 6), np.float32)
    for place, name, sides, room in ((0, "top", heights, height), (2, "left", widths, width)):
        side = sides[first]
        rows[:, place] = np.floor(draw(name)[:, 0] * (room - side + 1)) * struck
        rows[:, place + 1] = (rows[:, place] + side) * struck
    rows[:, 4:] = np.floor(np.hstack([draw("down"), draw("across")]) * (height, width))
    return rows


def noise_table(seed: int, size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Normal noise [3, H, W], of which every erased rectangle shows a part: drawing it anew would cost more than it varies."""
    generator = torch.Generator().manual_seed(key_of(seed, "erasing") & 0x7FFFFFFFFFFFFFFF)
    return torch.randn(*size, generator=generator, dtype=torch.float32).to(device, dtype)


def erase(images: torch.Tensor, draws: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Normalised images [B, 3, H, W] with a rectangle each, as draws [B, 6] say, replaced by `noise` [3, H, W]."""
    top, bottom, left, right, down, across = draws.to(torch.int64)[:, :, None].unbind(1)  # [B, 1] each
    height, width = images.shape[2:]
    y, x = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)  # [B, H], [B, W]
    inside = (rows[:, :, None] & columns[:, None, :])[:, None]  # [B, 1, H, W]
    shown = noise[:, ((y + down) % height)[:, :, None], ((x + across) % width)[:, None, :]]  # [3, B, H, W]
    return torch.where(inside, shown.transpose(0, 1), images)
