"""Targets, matching, crowd regions, selection and denoising of queries that each become one box."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchvision.ops import box_convert

from common.detection.models.boxes import filled, overlaps, to_device
from common.randomness import key_of, uniforms

_PADDING, _QUERY = -1, -2  # instead of a group's number


def split_targets(targets: list[dict], images: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Boxes [n, 4] (centre x, centre y, width, height) and labels of each image; crowd regions.

    Boxes and regions [B, m + 1, 4] (corners, padded with -1) are relative to the canvas of `images`.
    """
    corners = torch.cat([target["boxes"] for target in targets]).to(images.dtype) / _extent(images)
    objects, regions, first = [], [], 0
    for target in targets:
        crowd = (
            target["regions"]
            if "regions" in target
            else target["crowd"].nonzero().flatten().tolist()
        )
        rows = range(first, first := first + len(target["labels"]))
        regions.append([rows[row] for row in crowd])
        objects.append(sorted({*rows} - {*regions[-1]}))
    order, sizes = (
        [row for rows in objects + regions for row in rows],
        [*map(len, objects + regions)],
    )
    index = to_device(torch.tensor(order, dtype=torch.int64), images.device)
    labels = torch.cat([target["labels"] for target in targets])[index].split(sizes)[: len(targets)]
    parts = corners[index].split(sizes)
    boxes = [box_convert(part, "xyxy", "cxcywh") for part in parts[: len(targets)]]
    return boxes, labels, padded(parts[len(targets) :], -1)


@torch.no_grad()
def match(
    logits: Tensor,
    boxes: Tensor,
    wanted: Tensor,
    labels: Tensor,
    counts: list[int],
    *,
    alpha: float,
    gamma: float,
    class_cost: float,
    bbox_cost: float,
    giou_cost: float,
) -> Tensor:
    """int64[B, O, Q]: the box that each query of each of O outputs is matched with, or -1.

    As the matchers of transformers, for all images at once: the host waits for the device once.

    Args:
        logits, boxes: [B, O, Q, K] and [B, O, Q, 4] (centre x, centre y, width, height in 0..1).
        wanted, labels: [B, n + 1, 4] and int64[B, n + 1], padded at the end.
        counts: number of boxes of each image.
        alpha, gamma: of the focal loss; the cost of a class is its difference between object and background.
    """
    from scipy.optimize import linear_sum_assignment

    wanted, labels = wanted[:, None, None, :-1], labels[:, None, None, :-1]  # [B, 1, 1, n, 4]
    # scipy would raise for what is not finite; the run reports that the step's loss isn't.
    chances = logits.nan_to_num().sigmoid()
    chances = chances.gather(3, labels.expand(*chances.shape[:3], -1))
    boxes = boxes.nan_to_num(0)[..., None, :]  # [B, O, Q, 1, 4]
    hit = alpha * (1 - chances) ** gamma * -(chances + 1e-8).log()
    doubt = (1 - alpha) * chances**gamma * -(1 - chances + 1e-8).log()
    _, generalised = overlaps(
        box_convert(boxes, "cxcywh", "xyxy"), box_convert(wanted, "cxcywh", "xyxy")
    )
    costs = (
        bbox_cost * (boxes - wanted).abs().sum(-1)
        + class_cost * (hit - doubt)
        - giou_cost * generalised
    )
    largest = torch.finfo(costs.dtype).max
    costs = costs.nan_to_num(largest, largest, largest).cpu()
    result = torch.full(logits.shape[:3], -1)
    for image, count in enumerate(counts):
        for output, cost in enumerate(costs[image, :, :, :count]):
            query, box = linear_sum_assignment(cost)
            result[image, output, query] = torch.from_numpy(box)
    return to_device(result, logits.device)


def in_crowds(boxes: Tensor, regions: Tensor) -> Tensor:
    """bool[B, O, Q]: True if a box's centre is in one of the regions [B, m, 4] (corners)."""
    centres = boxes[..., None, :2]
    return (
        ((centres >= regions[:, None, None, :, :2]) & (centres <= regions[:, None, None, :, 2:]))
        .all(-1)
        .any(-1)
    )


def pair(match: Tensor, found: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Found and wanted boxes [B, O, Q, 4]; intersection over union [B, O, Q], plain and generalised.

    A query without a box gets the same box twice, for a loss of zero: no index for which the host waits.

    Args:
        match: int64[B, O, Q] index of a box, or -1.
        found, boxes: [B, O, Q, 4] and, padded at the end, [B, n + 1, 4] (centre, width, height in 0..1).
    """
    matched, rows = (
        (match >= 0)[..., None],
        torch.arange(len(match), device=match.device)[:, None, None],
    )
    whole = filled((0.5, 0.5, 1, 1), boxes)
    wanted, found = (
        torch.where(matched, boxes[rows, match], whole),
        torch.where(matched, found, whole),
    )
    return (
        found,
        wanted,
        *overlaps(box_convert(found, "cxcywh", "xyxy"), box_convert(wanted, "cxcywh", "xyxy")),
    )


def hits(match: Tensor, labels: Tensor, classes: int) -> Tensor:
    """bool[B, O, Q, classes]: the classes of matched boxes; `labels` are int64[B, n + 1]."""
    rows = torch.arange(len(match), device=match.device)[:, None, None]
    hit = labels[rows, match][..., None] == torch.arange(classes, device=labels.device)
    return hit & (match >= 0)[..., None]


def best_pairs(logits: Tensor, boxes: Tensor, images: Tensor) -> list[dict[str, Tensor]]:
    """The best pairs of a query and a class, best first, as many as queries.

    Args:
        logits, boxes: [B, Q, K] and [B, Q, 4] (centre x, centre y, width, height in 0..1).
        images: [B, 3, H, W]; the boxes that are returned are in pixels of their canvas.
    """
    number, classes = logits.shape[1:]
    scores, places = logits.sigmoid().flatten(1).topk(number)
    boxes = box_convert(boxes, "cxcywh", "xyxy") * _extent(images)
    return [
        {"boxes": of_image[place // classes], "scores": best, "labels": place % classes}
        for of_image, best, place in zip(boxes, scores, places, strict=True)
    ]


def _extent(images: Tensor) -> Tensor:
    """[4] width, height, width, height of the canvas."""
    return filled(images.shape[:1:-1] * 2, images)


@dataclass
class Denoising:
    """D boxes with noise for each of B images; those with fewer are padded at the end."""

    labels: Tensor  # int64[B, D], some of them wrong; the number of classes for padding
    boxes: Tensor  # [B, D, 4] centre x, centre y, width, height in 0..1
    match: Tensor  # int64[B, D] index of the true box, or -1
    real: Tensor  # bool[B, D] not padding
    visible: Tensor  # bool[B, 1, D + Q, D + Q]: True if a query (row) sees another; D come first
    groups: Tensor  # [B] number of positives of each box of the image


def groups_of(boxes: Tensor, budget: int) -> Tensor:
    """Number of groups, at least one, of images with so many boxes, int64[...]: about `budget` positives."""
    return (budget // boxes.clamp(min=1)).clamp(min=1) * (boxes > 0)


def noised(
    boxes: list[Tensor],
    labels: list[Tensor],
    positions: Sequence[int],
    seed: int,
    queries: int,
    config: Any,
) -> Denoising:
    """Groups with a positive for each box, which is to be restored, and a negative, which is no object.

    Different from the source, an image is the same in any batch: there, the image with the most
    boxes decides on the number of groups, and padding is learnt as background.
    Source: Zhang et al. 2022, "DINO: DETR with Improved DeNoising Anchor Boxes" (arXiv:2203.03605),
    section 3.3.

    Args:
        boxes, labels: for each image [n, 4] (centre x, centre y, width, height in 0..1) and
            int64[n]; n may be 0.
        positions: of the images in the stream.
        queries: number of the decoder's own queries.
        config: of transformers: num_labels; num_denoising, about the number of positives of an
            image; label_noise_ratio, twice the share of labels that are replaced by random ones;
            box_noise_scale, 1 moves a positive's corners by up to half the box's sides, a
            negative's by half to whole sides.
    """
    device, dtype = boxes[0].device, boxes[0].dtype
    numbers = torch.tensor([*map(len, boxes)])
    groups = groups_of(numbers, config.num_denoising)
    sizes = (2 * numbers * groups).tolist()
    kinds = np.full((3, len(boxes), max(sizes)), _PADDING)  # box, group, 1 for a negative
    chances = np.zeros((*kinds.shape[1:], 10))
    for row, (of_image, size, position) in enumerate(zip(boxes, sizes, positions, strict=True)):
        place, number = np.arange(size), max(len(of_image), 1)
        kinds[:, row, :size] = place % number, place // (2 * number), place // number % 2
        chances[row, :size] = uniforms(
            place[:, None] * 10 + np.arange(10), key_of(seed, "denoising", position)
        )

    source, group, negative = to_device(torch.from_numpy(kinds), device)
    draws = to_device(torch.from_numpy(chances).to(dtype), device)
    rows, real = torch.arange(len(boxes), device=device)[:, None], group != _PADDING
    wrong, random = (
        draws[..., 0] < config.label_noise_ratio / 2,
        (draws[..., 1] * config.num_labels).long(),
    )
    right = padded(labels, config.num_labels)[rows, source]
    corners = padded([box_convert(of_image, "cxcywh", "xyxy") for of_image in boxes], 0)[
        rows, source
    ]
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
    longest = rows[0].new_zeros(max(map(len, rows)) + 1, *rows[0].shape[1:])
    return pad_sequence([*rows, longest], batch_first=True, padding_value=value)[:-1]
