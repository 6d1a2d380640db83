"""Pixels of any type as 8 bits, for readers of image files."""

import numpy as np

MAX_PIXELS = 89_478_485  # from here on Pillow warns of a decompression bomb: 256 MiB as RGB


class BrokenImage(Exception):
    """An image that can't be decoded; its text is the reason, in one line."""


def to_8_bit(values: np.ndarray, white: float) -> np.ndarray:
    """Scale values of any type to uint8: from 0..`white`, or from its own range if that is larger."""
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        raise BrokenImage("no finite pixel value")
    low = float(finite.min())
    high = float(finite.max())
    if 0 <= low and high <= white:
        low = 0.0
        high = float(white)
    precision = np.float64 if values.dtype in ("float64", "uint32") else np.float32
    values = np.nan_to_num(values.astype(precision), nan=low, posinf=high, neginf=low)
    # A constant image becomes black.
    scale = 255 / max(high - low, float(np.finfo(np.float32).tiny))
    scaled = np.rint(values * precision(scale) - precision(low * scale))
    return scaled.clip(0, 255).astype(np.uint8)
