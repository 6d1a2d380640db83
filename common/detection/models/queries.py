"""Targets, matching, crowd regions, selection and denoising of queries that each become one box."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchvision.ops import box_convert

from common.detection.models.boxes import build_tensor, compute_ious, copy_to_device
from common.randomness import key_of, sample_uniform

# Instead of the index of a group.
_PADDING = -1
_DECODER_QUERY = -2


def split_targets(targets: list[dict], images: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Split the targets of B images into boxes, labels and crowd regions.

    Returns:
        boxes [n, 4] (centre x, centre y, width, height) of each image, relative to its canvas;
        labels int64[n] of each image;
        crowd regions [B, m + 1, 4] (corners, padded with -1), relative to the canvas.
    """
    num_images = len(targets)
    objects: list[list[int]] = []
    crowds: list[list[int]] = []
    start = 0
    for target in targets:
        object_indices, crowd_indices = split_indices(target)
        objects.append([start + i for i in object_indices])
        crowds.append([start + i for i in crowd_indices])
        start += len(target["labels"])
    indices = objects + crowds
    sizes = [len(image_indices) for image_indices in indices]
    # One copy of all indices to the device, instead of one for each image.
    index = torch.tensor(list(chain.from_iterable(indices)), dtype=torch.int64)
    index = copy_to_device(index, images.device)

    corners = torch.cat([target["boxes"] for target in targets])
    corners = corners.to(images.dtype) / _get_extent(images)
    split_corners = corners[index].split(sizes)
    labels = torch.cat([target["labels"] for target in targets])
    split_labels = labels[index].split(sizes)
    boxes = [box_convert(x, "xyxy", "cxcywh") for x in split_corners[:num_images]]
    return boxes, split_labels[:num_images], pad_and_stack(split_corners[num_images:], -1)


def split_indices(target: dict) -> tuple[list[int], list[int]]:
    """Split the indices of an image's boxes into those of objects and of crowd regions."""
    regions = target.get("regions")
    if regions is None:
        regions = target["crowd"].nonzero().flatten().tolist()
    return [i for i in range(len(target["labels"])) if i not in regions], regions


class PaddedTargets(NamedTuple):
    """Targets of B images, padded at the end; index -1 is padding of all images."""

    boxes: Tensor  # [B, n + 1, 4] centre x, centre y, width, height in 0..1
    labels: Tensor  # int64[B, n + 1]
    num_boxes: list[int]  # of each image, without padding


def pad_targets(boxes: list[Tensor], labels: list[Tensor]) -> PaddedTargets:
    """Pad the boxes [n, 4] and labels int64[n] of B images with zeros."""
    num_boxes = [len(image_labels) for image_labels in labels]
    return PaddedTargets(pad_and_stack(boxes, 0), pad_and_stack(labels, 0), num_boxes)


def count_objects(targets: list[dict]) -> Tensor:
    """Count the boxes of each image that are no crowd regions: int64[B]."""
    return torch.stack([(~target["crowd"]).sum() for target in targets])


@torch.no_grad()
def match_queries(
    logits: Tensor,
    boxes: Tensor,
    targets: PaddedTargets,
    *,
    alpha: float,
    gamma: float,
    class_cost: float,
    bbox_cost: float,
    giou_cost: float,
    more_costs: Tensor | None = None,
) -> Tensor:
    """Match each query of each of O outputs with a box: int64[B, O, Q] its index, or -1.

    As the matchers of transformers, for all images at once: the host waits for the device once.

    Args:
        logits, boxes: [B, O, Q, K] and [B, O, Q, 4] (centre x, centre y, width, height in 0..1).
        alpha, gamma: of the focal loss; the cost of a class is its difference between object and background.
        more_costs: [B, O, Q, n], to be added.
    """
    from scipy.optimize import linear_sum_assignment

    target_boxes = targets.boxes[:, None, None, :-1]  # [B, 1, 1, n, 4]
    target_labels = targets.labels[:, None, None, :-1]
    # scipy would raise for what is not finite; the run reports that the step's loss isn't.
    scores = logits.nan_to_num().sigmoid()
    scores = scores.gather(3, target_labels.expand(*scores.shape[:3], -1))  # [B, O, Q, n]
    boxes = boxes.nan_to_num(0)[..., None, :]  # [B, O, Q, 1, 4]
    positive_cost = alpha * (1 - scores) ** gamma * -(scores + 1e-8).log()
    negative_cost = (1 - alpha) * scores**gamma * -(1 - scores + 1e-8).log()
    corners = box_convert(boxes, "cxcywh", "xyxy")
    _, giou = compute_ious(corners, box_convert(target_boxes, "cxcywh", "xyxy"))
    costs = bbox_cost * (boxes - target_boxes).abs().sum(-1)
    costs = costs + class_cost * (positive_cost - negative_cost)
    costs = costs - giou_cost * giou
    if more_costs is not None:
        costs = costs + more_costs
    largest = torch.finfo(costs.dtype).max
    costs = costs.nan_to_num(largest, largest, largest).cpu()
    match = torch.full(logits.shape[:3], -1)
    for i, num_boxes in enumerate(targets.num_boxes):
        for output, cost in enumerate(costs[i, :, :, :num_boxes]):
            query_indices, box_indices = linear_sum_assignment(cost)
            match[i, output, query_indices] = torch.from_numpy(box_indices)
    return copy_to_device(match, logits.device)


def is_in_crowd(boxes: Tensor, regions: Tensor) -> Tensor:
    """bool[B, O, Q]: True if a box's centre is in one of the regions [B, m, 4] (corners)."""
    centres = boxes[..., None, :2]
    regions = regions[:, None, None]
    is_inside = (centres >= regions[..., :2]) & (centres <= regions[..., 2:])
    return is_inside.all(-1).any(-1)


class BoxPairs(NamedTuple):
    """The box of each query, and the box that it is matched with."""

    predicted: Tensor  # [B, O, Q, 4] centre x, centre y, width, height in 0..1
    expected: Tensor  # [B, O, Q, 4]
    iou: Tensor  # [B, O, Q]
    giou: Tensor  # [B, O, Q] generalised


def pair_boxes(match: Tensor, predicted: Tensor, boxes: Tensor) -> BoxPairs:
    """Pair predicted boxes with those that they are matched with.

    A query without a box gets the same box twice, for a loss of zero: no index for which the host waits.

    Args:
        match: int64[B, O, Q] index of a box, or -1.
        predicted, boxes: [B, O, Q, 4] and, padded at the end, [B, n + 1, 4].
    """
    is_matched = (match >= 0)[..., None]
    full_box = build_tensor((0.5, 0.5, 1, 1), like=boxes)
    expected = torch.where(is_matched, _select_by_match(boxes, match), full_box)
    predicted = torch.where(is_matched, predicted, full_box)
    iou, giou = compute_ious(
        box_convert(predicted, "cxcywh", "xyxy"), box_convert(expected, "cxcywh", "xyxy")
    )
    return BoxPairs(predicted, expected, iou, giou)


def encode_one_hot(match: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """bool[B, O, Q, K]: the classes of matched boxes, of which `labels` are int64[B, n + 1]."""
    class_ids = torch.arange(num_classes, device=labels.device)
    one_hot = _select_by_match(labels, match)[..., None] == class_ids
    return one_hot & (match >= 0)[..., None]


def _select_by_match(values: Tensor, match: Tensor) -> Tensor:
    """The values [B, O, Q, ...] of `values` [B, n + 1, ...] at the indices `match` [B, O, Q]."""
    image_indices = torch.arange(len(match), device=match.device)[:, None, None]
    return values[image_indices, match]


def select_topk(
    logits: Tensor, boxes: Tensor, images: Tensor, masks: Tensor | None = None
) -> list[dict[str, Tensor]]:
    """Select the best pairs of a query and a class, best first, as many as queries.

    Args:
        logits, boxes: [B, Q, K] and [B, Q, 4] (centre x, centre y, width, height in 0..1).
        images: [B, 3, H, W]; the boxes that are returned are in pixels of their canvas.
        masks: [B, Q, h, w] logits on a grid of the canvas, to be returned as mask_logits.
    """
    num_queries, num_classes = logits.shape[1:]
    scores, indices = logits.sigmoid().flatten(1).topk(num_queries)
    corners = box_convert(boxes, "cxcywh", "xyxy") * _get_extent(images)
    detections = []
    for i, index in enumerate(indices):
        query_ids = index // num_classes
        detection = {
            "boxes": corners[i, query_ids],
            "scores": scores[i],
            "labels": index % num_classes,
        }
        if masks is not None:
            detection["mask_logits"] = masks[i, query_ids]
        detections.append(detection)
    return detections


def _get_extent(images: Tensor) -> Tensor:
    """[4] width, height, width, height of the canvas."""
    return build_tensor(images.shape[:1:-1] * 2, like=images)


@dataclass
class Denoising:
    """D boxes with noise for each of B images; images with fewer are padded at the end."""

    labels: Tensor  # int64[B, D], some of them wrong; the number of classes for padding
    boxes: Tensor  # [B, D, 4] centre x, centre y, width, height in 0..1
    match: Tensor  # int64[B, D] index of the true box, or -1
    valid: Tensor  # bool[B, D] not padding
    # bool[B, 1, D + Q, D + Q]: True if a query (row) attends to another (column); D come first.
    attention_mask: Tensor
    num_groups: Tensor  # [B] number of positives of each box of the image


def count_groups(num_boxes: Tensor, budget: int) -> Tensor:
    """Count the groups int64[...] of images with boxes: about `budget` positives, at least one group."""
    return (budget // num_boxes.clamp(min=1)).clamp(min=1) * (num_boxes > 0)


def build_denoising(
    boxes: list[Tensor],
    labels: list[Tensor],
    positions: Sequence[int],
    seed: int,
    num_queries: int,
    config: Any,
) -> Denoising:
    """Build groups with a positive for each box, which is to be restored, and a negative, no object.

    Different from the source, an image is the same in any batch: there, the image with the most
    boxes decides on the number of groups, and padding is learnt as background.
    Source: Zhang et al. 2022, "DINO: DETR with Improved DeNoising Anchor Boxes" (arXiv:2203.03605),
    section 3.3.

    Args:
        boxes, labels: for each image [n, 4] (centre x, centre y, width, height in 0..1) and
            int64[n]; n may be 0.
        positions: of the images in the stream.
        num_queries: of the decoder, without denoising.
        config: of transformers: num_labels; num_denoising, about the number of positives of an
            image; label_noise_ratio, twice the share of labels that are replaced by random ones;
            box_noise_scale, 1 moves a positive's corners by up to half the box's sides, a
            negative's by half to whole sides.
    """
    device = boxes[0].device
    dtype = boxes[0].dtype
    num_boxes = torch.tensor([len(image_boxes) for image_boxes in boxes])
    num_groups = count_groups(num_boxes, config.num_denoising)
    layout, numbers = _plan_denoising(num_boxes, num_groups, positions, seed)
    source, group, is_negative = copy_to_device(torch.from_numpy(layout), device)
    random = copy_to_device(torch.from_numpy(numbers).to(dtype), device)
    valid = group != _PADDING

    is_replaced = (random[..., 0] < config.label_noise_ratio / 2) & valid
    random_labels = (random[..., 1] * config.num_labels).long()
    image_indices = torch.arange(len(boxes), device=device)[:, None]
    true_labels = pad_and_stack(labels, config.num_labels)[image_indices, source]
    true_boxes = pad_and_stack(boxes, 0)[image_indices, source]
    return Denoising(
        labels=torch.where(is_replaced, random_labels, true_labels),
        boxes=_add_noise(true_boxes, random[..., 2:], is_negative, config.box_noise_scale),
        match=torch.where(is_negative == 0, source, -1),
        valid=valid,
        attention_mask=_build_attention_mask(group, num_queries),
        num_groups=copy_to_device(num_groups.to(dtype), device),
    )


def _plan_denoising(
    num_boxes: Tensor,
    num_groups: Tensor,
    positions: Sequence[int],
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Lay out the boxes with noise, and draw their random numbers, on the host.

    Returns:
        int64[3, B, D]: index of the true box, index of the group, and 1 for a negative or 0;
        float64[B, D, 10]: random numbers in 0..1, functions of (position, seed).
    """
    sizes = (2 * num_boxes * num_groups).tolist()
    layout = np.full((3, len(sizes), max(sizes)), _PADDING)
    random = np.zeros((len(sizes), max(sizes), 10))
    for i, size in enumerate(sizes):
        n = max(int(num_boxes[i]), 1)
        index = np.arange(size)
        layout[0, i, :size] = index % n
        layout[1, i, :size] = index // (2 * n)
        layout[2, i, :size] = index // n % 2
        counters = index[:, None] * 10 + np.arange(10)
        random[i, :size] = sample_uniform(counters, key_of(seed, "denoising", positions[i]))
    return layout, random


def _add_noise(boxes: Tensor, random: Tensor, is_negative: Tensor, scale: float) -> Tensor:
    """Move the corners of boxes [B, D, 4] by random shares of half their sides, negatives farther.

    `random` [B, D, 8] has four distances and four directions.
    """
    corners = box_convert(boxes, "cxcywh", "xyxy")
    half_sides = (corners[..., 2:] - corners[..., :2]).repeat(1, 1, 2) / 2
    signs = torch.where(random[..., 4:] < 0.5, -1, 1)
    shifts = (random[..., :4] + is_negative[..., None]) * signs
    corners = (corners + shifts * half_sides * scale).clamp(0, 1)
    return box_convert(corners, "xyxy", "cxcywh")


def _build_attention_mask(group: Tensor, num_queries: int) -> Tensor:
    """bool[B, 1, D + Q, D + Q] from the groups int64[B, D]: all attend to the decoder's queries.

    Besides, boxes with noise attend to those of their group.
    """
    groups = F.pad(group, (0, num_queries), value=_DECODER_QUERY)
    rows = groups[:, None, :, None]
    columns = groups[:, None, None, :]
    return (columns == _DECODER_QUERY) | (columns == rows)


def pad_and_stack(tensors: Sequence[Tensor], value: float) -> Tensor:
    """Stack B tensors [n_i, ...] to [B, n + 1, ...], padded with `value`, also at index -1."""
    longest = max(len(x) for x in tensors)
    extra = tensors[0].new_zeros(longest + 1, *tensors[0].shape[1:])
    padded = pad_sequence([*tensors, extra], batch_first=True, padding_value=value)
    return padded[:-1]
