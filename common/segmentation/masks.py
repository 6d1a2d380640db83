"""Masks in files: a class id for each pixel."""

from collections.abc import Iterable

import numpy as np

from common.data.images import BrokenImage, Content, open_image

IGNORED = -1  # id of the pixels without a label, once a mask is read
_ID_MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")


def read_mask(file: Content, num_classes: int, ignore_zero: bool) -> np.ndarray:
    """The class id of each pixel: int16[H, W], `IGNORED` where there is no label.

    A grey image of 8 or 16 bits has the ids, one with a palette their indices. 255 means no label;
    where it is a class, 65535 does. With `ignore_zero`, 0 means no label, too, and 1 is the first
    class, as in ADE20K. Raises `BrokenImage` for another kind of image, and for an id that is no
    class.
    """
    no_label = 255 if num_classes + ignore_zero <= 255 else 65535
    with open_image(file) as image:
        if image.mode in _ID_MODES:
            ids = np.asarray(image).astype(np.int32)
        else:
            ids = _read_grey(np.asarray(image.convert("RGB")), image.mode)
    is_labelled = ids != no_label
    if ignore_zero:
        is_labelled &= ids != 0
    ids -= ignore_zero
    unknown = ids[is_labelled & ((ids < 0) | (ids >= num_classes))]
    if unknown.size:
        shift = " (after --ignore_zero)" if ignore_zero else ""
        raise BrokenImage(
            f"the mask has the id {unknown.max()}{shift}, and there are {num_classes} classes, 0 to "
            f"{num_classes - 1}; {no_label} means no label"
        )
    return np.where(is_labelled, ids, IGNORED).astype(np.int16)


def _read_grey(pixels: np.ndarray, mode: str) -> np.ndarray:
    """The ids int32[H, W] of a mask stored as three equal channels uint8[H, W, 3]."""
    if (pixels != pixels[..., :1]).any():
        raise BrokenImage(
            f"the mask has colours (mode {mode}), and a class id per pixel is needed: map each colour "
            "to its id, and save them as a grey PNG"
        )
    return pixels[..., 0].astype(np.int32)


def paint_masks(
    masks: np.ndarray, labels: np.ndarray, crowd: np.ndarray, background: int
) -> np.ndarray:
    """Objects of one image, masks uint8[n, H, W] and labels int64[n], as one class id per pixel:
    int16[H, W].

    Larger objects lie below smaller ones, crowd regions below all. Pixels of no object are of the
    class `background`.
    """
    ids = np.full(masks.shape[1:], background, np.int16)
    areas = masks.sum(axis=(1, 2), dtype=np.int64)
    for i in np.lexsort((-areas, ~crowd)):
        ids[masks[i] > 0] = labels[i]
    return ids


def count_pixels(masks: Iterable[np.ndarray], num_classes: int) -> np.ndarray:
    """int64[K]: how many pixels of these masks are of each class."""
    counts = np.zeros(num_classes, np.int64)
    for mask in masks:
        counts += np.bincount(mask[mask != IGNORED], minlength=num_classes)
    return counts
