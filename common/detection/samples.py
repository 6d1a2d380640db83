"""Operations on one image with its boxes: cropping, padding, joining, pasting, rotating.

They know nothing of chance: `common.detection.transforms` draws what is done. `crop` turns a sample
of a source into one of tensors: image uint8[3, H, W], boxes float32[n, 4], labels int64[n], crowd
bool[n], masks uint8[n, H, W]. The other functions take and return such samples.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torchvision.transforms.v2 import functional as v2

from common.data.decoding import resized
from common.detection.data.annotated import Sample

# For each edge of a box the first, or the last one on its axis; quicker than np.tile.
FIRST, LAST = [0, 1, 0, 1], [2, 3, 2, 3]


def size_of(sample: Sample) -> np.ndarray:
    """int64[2]: width and height that the boxes of a source's sample are of."""
    return np.array([sample.image.width, sample.image.height]) if sample.size is None else sample.size.astype(np.int64)


def areas_of(boxes: Any) -> Any:
    return (boxes[:, 2:] - boxes[:, :2]).prod(1)


def nothing(width: int, height: int, fill: tuple[int, int, int], masks: bool) -> Sample:
    """A sample of tensors without an image or boxes."""
    image = torch.tensor(fill, dtype=torch.uint8)[:, None, None].repeat(1, height, width)
    none = torch.zeros(0, height, width, dtype=torch.uint8) if masks else None
    return Sample(image, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool), none)


def crop(sample: Sample, inside: np.ndarray, size: tuple[int, int], rows: np.ndarray) -> Sample:
    """The part `inside` int[4] (left, top, right, bottom) of a source's image, resized to `size` (height, width), as tensors.

    Of the objects only `rows` int[n]. If the image is decoded at a reduced resolution, or kept
    smaller in a cache, the edges are moved to whole pixels of it; boxes and masks follow.
    """
    picture = sample.image
    whole = np.array([picture.width, picture.height])
    kept = whole / size_of(sample)  # 1, or less in a cache
    width, height = ((inside[2:] - inside[:2]) * kept).tolist()
    reduction = picture.reduction(height, width, size)
    factors, limits = (kept / reduction)[FIRST], -(-whole // reduction)
    edges = np.rint(inside * factors).astype(int)
    edges[:2] = np.minimum(edges[:2], limits - 1)
    edges[2:] = edges[2:].clip(edges[:2] + 1, limits)
    left, top, right, bottom = edges.tolist()
    image = resized(picture.part(reduction, top, left, bottom, right), size, "bilinear")

    shown = (edges / factors).astype(np.float32)
    scale = (size[::-1] / (shown[2:] - shown[:2])).astype(np.float32)
    boxes = (sample.boxes[rows].clip(shown[FIRST], shown[LAST]) - shown[FIRST]) * scale[FIRST]
    masks = None
    if sample.masks is not None:
        left, top, right, bottom = np.rint(shown).astype(int).tolist()
        cut = torch.from_numpy(sample.masks[rows, top:bottom, left:right])
        masks = F.interpolate(cut[None], size, mode="nearest")[0] if len(rows) else cut.new_zeros(0, *size)
    labels, crowd = torch.from_numpy(sample.labels[rows]), torch.from_numpy(sample.crowd[rows])
    return Sample(image, torch.from_numpy(boxes), labels, crowd, masks)


def select(sample: Sample, rows: np.ndarray | torch.Tensor) -> Sample:
    """Only the objects `rows`: numbers int[n], or bool for each."""
    image, boxes, labels, crowd, masks, _ = sample
    return Sample(image, boxes[rows], labels[rows], crowd[rows], None if masks is None else masks[rows])


def mirrored(sample: Sample) -> Sample:
    """The left-right mirror image."""
    image, boxes, labels, crowd, masks, _ = sample
    left, top, right, bottom = boxes.unbind(1)
    width = image.shape[2]
    boxes = torch.stack([width - right, top, width - left, bottom], 1)
    return Sample(image.flip(2), boxes, labels, crowd, None if masks is None else masks.flip(2))


def padded(sample: Sample, left: int, top: int, width: int, height: int, fill: tuple[int, int, int]) -> Sample:
    """The sample at (left, top) on a canvas of this size."""
    h, w = sample.image.shape[1:]
    if (left, top, width, height) == (0, 0, w, h):
        return sample
    canvas = torch.tensor(fill, dtype=torch.uint8)[:, None, None].repeat(1, height, width)
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
    """A sample without objects whose mask has no pixel left, and boxes within the image: scaling may round up."""
    edges = torch.tensor(sample.image.shape[:0:-1])[FIRST]
    sample = sample._replace(boxes=torch.minimum(sample.boxes.clamp(min=0), edges))
    return sample if sample.masks is None else select(sample, (sample.masks.flatten(1) > 0).any(1) | sample.crowd)


def pasted(sample: Sample, other: Sample) -> tuple[Sample, torch.Tensor]:
    """All objects of `other` over a sample of the same size, and float32[n + m]: share of each object that is still visible.

    Both have masks, which lose the pixels that are now covered. Sides of boxes move where the mask
    no longer reaches them. Edges are hard: in the paper, blending them made no notable difference.
    Source: Ghiasi et al. 2021, "Simple Copy-Paste is a Strong Data Augmentation Method for Instance
    Segmentation".
    """
    over = other.masks.amax(0) > 0  # [h, w]
    image = torch.where(over, other.image, sample.image)
    before, below = extents(sample.masks), sample.masks * ~over
    after = extents(below)
    boxes = torch.where(after == before, sample.boxes, after.to(sample.boxes.dtype))
    shares = torch.cat([shares_left(below, sample.masks), torch.ones(len(other.boxes))])
    return joined(image, [sample._replace(boxes=boxes, masks=below), other]), shares


def shares_left(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Masks [n, h, w] of objects now and before -> float32[n]: the share of its pixels that each still has."""
    now, then = (torch.tensor([np.count_nonzero(mask) for mask in masks.numpy()]) for masks in (after, before))
    return now / then.clamp(min=1)


def extents(masks: torch.Tensor) -> torch.Tensor:
    """The tight boxes of masks [n, h, w]: int64[n, 4] left, top, right, bottom in pixels; 0 for a mask without a pixel."""
    sides = []
    for axis in (1, 2):  # columns, then rows
        hit = masks.amax(axis) > 0  # [n, length]; `any` takes forty times as long
        first, last = hit.int().argmax(1), hit.shape[1] - hit.int().flip(1).argmax(1)
        sides.append(torch.stack([first, last]) * hit.any(1))
    (left, right), (top, bottom) = sides
    return torch.stack([left, top, right, bottom], 1)


def moved(
    sample: Sample, degrees: float, shift: tuple[float, float], fill: tuple[int, int, int]
) -> tuple[Sample, torch.Tensor]:
    """A sample of tensors turned clockwise about its centre, then shifted; float32[n]: the share of each object in view.

    `shift` is in pixels to the right and down. What comes into view has the colour `fill`. A box is
    the box of the object's turned mask. Without masks it is the box of the ellipse that touches the
    sides of the original box: the box of the turned corners is larger than most objects. Measured
    on the digits' scenes, the ellipse's boxes overlap the masks' boxes by an IoU of 0.85 after 10
    degrees and 0.76 after 30, the corners' boxes by 0.80 and 0.67. An object that fills the
    corners of its box reaches beyond it.

    Source: Kalra et al. 2021, "Towards Rotation Invariance in Object Detection".
    """
    height, width = sample.image.shape[1:]
    geometry = {"angle": degrees, "translate": [*shift], "scale": 1.0, "shear": [0.0, 0.0]}
    image = v2.affine(sample.image, **geometry, interpolation=v2.InterpolationMode.BILINEAR, fill=[*map(float, fill)])
    if sample.masks is None:
        masks, boxes = None, _ellipses(sample.boxes, degrees, shift, (width, height))
        inside = boxes.clamp(min=0).minimum(torch.tensor([width, height] * 2))
        areas, boxes = areas_of(boxes), inside
        shares = areas_of(inside) / areas.clamp(min=1e-9)
    else:
        masks = v2.affine(sample.masks, **geometry)  # to the nearest pixel
        boxes = extents(masks)
        shares = shares_left(masks, sample.masks)
    return sample._replace(image=image, boxes=boxes.to(sample.boxes.dtype), masks=masks), shares


def _ellipses(boxes: torch.Tensor, degrees: float, shift: tuple[float, float], size: tuple[int, int]) -> torch.Tensor:
    """Boxes [n, 4] around the turned ellipses that touch all sides of `boxes`."""
    low, high = boxes.double().unflatten(1, (2, 2)).unbind(1)
    middle, (half_width, half_height) = torch.tensor(size) / 2, ((high - low) / 2).unbind(1)
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
    centre = ((low + high) / 2 - middle) @ turn + middle + torch.tensor(shift, dtype=torch.float64)
    half = torch.stack(
        [torch.hypot(half_width * cos, half_height * sin), torch.hypot(half_width * sin, half_height * cos)], 1
    )
    return torch.cat([centre - half, centre + half], 1)
