"""Operations on one image with its boxes; `common.detection.transforms` draws their arguments.

`crop` turns a sample of a source into one of tensors: image uint8[3, H, W], boxes float32[n, 4],
labels int64[n], crowd bool[n], masks uint8[n, H, W]. The others take and return such samples.
"""

import numpy as np
import torch
import torch.nn.functional as F

from common.data.decoding import resize
from common.detection.data.annotated import Sample

# For each edge of a box the first, or the last one on its axis; quicker than np.tile.
FIRST, LAST = [0, 1, 0, 1], [2, 3, 2, 3]


def nothing(width: int, height: int, fill: tuple[int, int, int], masks: bool) -> Sample:
    """A sample of tensors without an image or boxes."""
    image = blank(width, height, fill)
    none = torch.zeros(0, height, width, dtype=torch.uint8) if masks else None
    return Sample(
        image,
        torch.zeros(0, 4),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.bool),
        none,
    )


def crop(sample: Sample, inside: np.ndarray, size: tuple[int, int], rows: np.ndarray) -> Sample:
    """The part `inside` int[4] (left, top, right, bottom) of an image, resized to `size` (height, width).

    Of the objects only `rows` int[n]. Edges are moved to whole pixels of what is decoded.
    """
    picture = sample.image
    whole = np.array([picture.width, picture.height])
    kept = whole / sample.size  # 1, or less in a cache
    width, height = ((inside[2:] - inside[:2]) * kept).tolist()
    reduction = picture.choose_reduction(height, width, size)
    factors, limits = (kept / reduction)[FIRST], -(-whole // reduction)
    edges = np.rint(inside * factors).astype(int)
    edges[:2] = np.minimum(edges[:2], limits - 1)
    edges[2:] = edges[2:].clip(edges[:2] + 1, limits)
    left, top, right, bottom = edges.tolist()
    image = resize(picture.decode_crop(reduction, top, left, bottom, right), size, "bilinear")

    shown = (edges / factors).astype(np.float32)
    scale = (size[::-1] / (shown[2:] - shown[:2])).astype(np.float32)
    boxes = (sample.boxes[rows].clip(shown[FIRST], shown[LAST]) - shown[FIRST]) * scale[FIRST]
    masks = None
    if sample.masks is not None:
        left, top, right, bottom = np.rint(shown).astype(int).tolist()
        cut = torch.from_numpy(sample.masks[rows, top:bottom, left:right])
        masks = (
            F.interpolate(cut[None], size, mode="nearest")[0]
            if len(rows)
            else cut.new_zeros(0, *size)
        )
    labels, crowd = torch.from_numpy(sample.labels[rows]), torch.from_numpy(sample.crowd[rows])
    return Sample(image, torch.from_numpy(boxes), labels, crowd, masks)


def mirrored(sample: Sample) -> Sample:
    """The left-right mirror image."""
    image, boxes, labels, crowd, masks, _ = sample
    left, top, right, bottom = boxes.unbind(1)
    width = image.shape[2]
    boxes = torch.stack([width - right, top, width - left, bottom], 1)
    return Sample(image.flip(2), boxes, labels, crowd, None if masks is None else masks.flip(2))


def blank(width: int, height: int, fill: tuple[int, int, int]) -> torch.Tensor:
    """uint8[3, height, width] in the colour `fill`."""
    return torch.tensor(fill, dtype=torch.uint8)[:, None, None].repeat(1, height, width)


def padded(
    sample: Sample, left: int, top: int, width: int, height: int, fill: tuple[int, int, int]
) -> Sample:
    """The sample at (left, top) on a canvas of this size."""
    h, w = sample.image.shape[1:]
    if (left, top, width, height) == (0, 0, w, h):
        return sample
    canvas = blank(width, height, fill)
    canvas[:, top : top + h, left : left + w] = sample.image
    boxes, masks = sample.boxes + torch.tensor([left, top, left, top]), sample.masks
    if masks is not None:
        masks = F.pad(masks, (left, width - left - w, top, height - top - h))
    return sample._replace(image=canvas, boxes=boxes, masks=masks)


def joined(image: torch.Tensor, samples: list[Sample]) -> Sample:
    """The boxes of several samples on one image."""
    _, boxes, labels, crowd, masks, _ = zip(*samples, strict=True)
    whole = None if masks[0] is None else torch.cat(masks)
    return Sample(image, torch.cat(boxes), torch.cat(labels), torch.cat(crowd), whole)


def finished(sample: Sample) -> Sample:
    """Without objects whose mask is empty, and with boxes within the image: scaling may round up."""
    edges = torch.tensor(sample.image.shape[:0:-1])[FIRST]
    sample = sample._replace(boxes=torch.minimum(sample.boxes.clamp(min=0), edges))
    if sample.masks is None:
        return sample
    rows = sample.crowd | (sample.masks.flatten(1) > 0).any(1)
    return Sample(sample.image, *(column[rows] for column in sample[1:5]))
