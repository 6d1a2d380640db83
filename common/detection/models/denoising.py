"""Denoising of a DETR, independent of the layout of the run.

Besides its queries, the decoder sees copies of the true boxes with noise on them, and learns to
restore them. The noise is a function of (seed, position); the number of copies depends on the
number of boxes of the image alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_convert

from common.detection.models.boxes import to_device
from common.randomness import key_of, uniforms

_PADDING, _QUERY = -1, -2  # instead of a group's number


@dataclass
class Denoising:
    """D boxes with noise for each of B images; those with fewer are padded at the end."""

    labels: Tensor  # int64[B, D], some of them wrong; the number of classes for padding
    boxes: Tensor  # [B, D, 4] centre x, centre y, width, height in 0..1
    match: Tensor  # int64[B, D] index of the true box, or -1
    real: Tensor  # bool[B, D] not padding
    visible: Tensor  # bool[B, 1, D + Q, D + Q]: True if a query (row) sees another; the decoder's Q queries come last
    groups: Tensor  # [B] number of positives of each box of the image


def groups_of(boxes: Tensor, budget: int) -> Tensor:
    """Number of groups of an image with `boxes` int64[...] boxes: about `budget` positives in all, at least one group."""
    return (budget // boxes.clamp(min=1)).clamp(min=1) * (boxes > 0)


def noised(
    boxes: list[Tensor], labels: list[Tensor], positions: Sequence[int], seed: int, queries: int, config: Any
) -> Denoising:
    """Groups with a positive and a negative for each box: the first is to be restored, the second is no object.

    Different from the source, an image is the same in any batch: there, the image with the most
    boxes decides on the number of groups, and padding is visible and learnt as background.
    Source: Zhang et al. 2022, "DINO: DETR with Improved DeNoising Anchor Boxes" (arXiv:2203.03605),
    section 3.3.

    Args:
        boxes, labels: for each image [n, 4] (centre x, centre y, width, height in 0..1) and int64[n]; n may be 0.
        positions: of the images in the stream.
        queries: number of the decoder's own queries.
        config: of transformers, with num_labels; num_denoising, about the number of positives of an image; label_noise_ratio,
            twice the share of labels that are replaced by random ones; and box_noise_scale: 1 moves a positive's corners by up
            to half the box's sides, a negative's by half to whole sides.
    """
    device, dtype = boxes[0].device, boxes[0].dtype
    numbers = torch.tensor([*map(len, boxes)])
    groups = groups_of(numbers, config.num_denoising)
    sizes = (2 * numbers * groups).tolist()
    kinds = np.full((3, len(boxes), max(sizes)), _PADDING)  # the box's index, the group, and 1 for a negative
    chances = np.zeros((*kinds.shape[1:], 10))
    for row, (of_image, size, position) in enumerate(zip(boxes, sizes, positions, strict=True)):
        place, number = np.arange(size), max(len(of_image), 1)
        kinds[:, row, :size] = place % number, place // (2 * number), place // number % 2
        chances[row, :size] = uniforms(place[:, None] * 10 + np.arange(10), key_of(seed, "denoising", position))

    source, group, negative = to_device(torch.from_numpy(kinds), device)
    draws = to_device(torch.from_numpy(chances).to(dtype), device)
    rows, real = torch.arange(len(boxes), device=device)[:, None], group != _PADDING
    wrong, random = draws[..., 0] < config.label_noise_ratio / 2, (draws[..., 1] * config.num_labels).long()
    right = padded(labels, config.num_labels)[rows, source]
    corners = padded([box_convert(of_image, "cxcywh", "xyxy") for of_image in boxes], 0)[rows, source]
    half_sides = (corners[..., 2:] - corners[..., :2]).repeat(1, 1, 2) / 2
    shift = (draws[..., 2:6] + negative[..., None]) * torch.where(draws[..., 6:] < 0.5, -1, 1)
    corners = (corners + shift * half_sides * config.box_noise_scale).clamp(0, 1)

    everyone = F.pad(group, (0, queries), value=_QUERY)
    seen, seeing = everyone[:, None, None, :], everyone[:, None, :, None]
    return Denoising(
        labels=torch.where(wrong & real, random, right),
        boxes=box_convert(corners, "xyxy", "cxcywh"),
        match=torch.where(negative == 0, source, -1),
        real=real,
        visible=(seen == _QUERY) | (seen == seeing),
        groups=to_device(groups.to(dtype), device),
    )


def padded(rows: list[Tensor], value: float) -> Tensor:
    """B tensors [n_i, ...] -> [B, n + 1, ...], padded with `value`, which index -1 always finds."""
    longest = max(map(len, rows)) + 1
    result = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), value)
    for place, row in enumerate(rows):
        result[place, : len(row)] = row
    return result
