"""Copy-paste: objects of one image, cut out by their masks, over another image.

Source: Ghiasi et al. 2021, "Simple Copy-Paste is a Strong Data Augmentation Method for Instance Segmentation". Edges are hard:
in the paper, blending them made no notable difference.
"""

from typing import Any

import numpy as np
import torch

from common.detection.samples import joined

SampleOfTensors = Any  # a `Sample`, which is annotated with the arrays of a source


def pasted(sample: SampleOfTensors, other: SampleOfTensors) -> tuple[SampleOfTensors, torch.Tensor]:
    """All objects of `other` over a sample of the same size, and float32[n + m]: share of each object that is still visible.

    Both are of tensors, with masks [n, h, w] and [m, h, w]. Masks of the sample lose the pixels that are now covered. Sides of
    its boxes move where the mask no longer reaches them.
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
