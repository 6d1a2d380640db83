"""Anchors of a detector, the boxes that they are matched with, and samples to learn from."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_area, box_iou

from common.detection.models.boxes import clip_boxes
from common.detection.models.fpn import Backbone

_BITS = 61  # of a random integer, so that one more bit can put some integers first


class Anchors:
    """Boxes of a few shapes around each cell of a feature pyramid, with torchvision's centres and sizes.

    `scales` are the sides of a square anchor in strides of its level; `ratios` are height over width.
    """

    def __init__(
        self,
        backbone: Backbone,
        scales: tuple[float, ...],
        ratios: tuple[float, ...] = (0.5, 1.0, 2.0),
    ) -> None:
        self.backbone = backbone
        sizes = tuple(_compute_sizes(level, scales) for level in backbone.levels)
        self.generator = AnchorGenerator(sizes, (ratios,) * len(sizes))
        self.num_per_cell = len(scales) * len(ratios)

    def __call__(self, canvas: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """[P, 4] left, top, right, bottom of all levels for a canvas of (H, W) pixels."""
        self.generator.set_cell_anchors(dtype, device)
        grid_sizes = self.backbone.grid_sizes(canvas)
        strides = self.backbone.strides(canvas)
        return torch.cat(self.generator.grid_anchors(grid_sizes, strides))

    def count_per_level(self, canvas: Sequence[int]) -> list[int]:
        """Count the anchors of each level; they sum to P."""
        grid_sizes = self.backbone.grid_sizes(canvas)
        return [self.num_per_cell * height * width for height, width in grid_sizes]


def _compute_sizes(level: int, scales: tuple[float, ...]) -> tuple[int, ...]:
    """Compute the sides of a level's square anchors, in pixels."""
    return tuple(int(2**level * scale) for scale in scales)


class Matches(NamedTuple):
    """The boxes that P anchors, proposals or points are matched with; for B images all are [B, P, ...]."""

    boxes: Tensor  # [P, 4] arbitrary where `foreground` is False
    indices: Tensor  # int64[P] of the boxes in their image; n, behind the last, is an empty box
    foreground: Tensor  # bool[P]
    ignored: Tensor  # bool[P] neither foreground nor background

    @classmethod
    def stack(cls, matches: Sequence[Self]) -> Self:
        """Stack the matches of B images."""
        columns = zip(*matches, strict=True)
        return cls(*[torch.stack(column) for column in columns])

    def select_labels(self, targets: Sequence[dict]) -> Tensor:
        """The labels int64[B, P] of the boxes."""
        labels = []
        for target, indices in zip(targets, self.indices, strict=True):
            labels.append(F.pad(target["labels"], (0, 1))[indices])
        return torch.stack(labels)


def match_boxes(
    candidates: Tensor,
    target: dict,
    size: Tensor,
    foreground_iou: float,
    background_iou: float,
    allow_low_quality: bool,
) -> Matches:
    """Match anchors or proposals `candidates` [P, 4] with the boxes of one image.

    Foreground overlap a box by `foreground_iou`, or with `allow_low_quality` as much as any
    candidate does. Ignored are others that overlap a box by `background_iou`, or half of whose area
    inside `size` [2] (width, height) lies in a crowd region.
    """
    boxes = F.pad(target["boxes"].to(candidates.dtype), (0, 0, 0, 1))  # an empty box at the end
    is_crowd = F.pad(target["crowd"], (0, 1))[:, None]
    is_object = F.pad(~target["crowd"], (0, 1))[:, None]
    ious = torch.where(is_object, box_iou(boxes, candidates), -1)  # [n + 1, P]
    best_iou, indices = ious.max(0)
    foreground = best_iou >= foreground_iou
    if allow_low_quality:
        largest = ious.amax(1, keepdim=True)
        foreground |= ((ious == largest) & (largest > 0)).any(0)

    clipped = clip_boxes(candidates, size)
    low = torch.maximum(boxes[:, None, :2], clipped[:, :2])
    high = torch.minimum(boxes[:, None, 2:], clipped[:, 2:])
    sides = (high - low).clamp(min=0)
    is_covered = sides[..., 0] * sides[..., 1] >= box_area(clipped) / 2
    is_in_crowd = (is_covered & is_crowd).any(0)
    ignored = ((best_iou >= background_iou) | is_in_crowd) & ~foreground
    return Matches(boxes[indices], indices, foreground, ignored)


def draw_integers(ids: Tensor, key: int) -> Tensor:
    """Draw random integers in [0, 2^61) for `ids` int64[...]: functions of (id, key), equal on all devices.

    It is `common.randomness.mix` without three bits, in the signed arithmetic of accelerators.
    """
    x = (ids + _to_signed(key)) * _to_signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _to_signed(0x94D049BB133111EB)
    return _shift_right(x ^ _shift_right(x, 31), 64 - _BITS)


def sample_balanced(
    foreground: Tensor,
    background: Tensor,
    random: Tensor,
    num_samples: int,
    foreground_share: float,
) -> tuple[Tensor, Tensor]:
    """Sample `num_samples` of n candidates, up to a share of foreground, which comes first.

    Args:
        foreground, background: bool[n], never both; candidates that are neither are not sampled.
        random: int64[n] in [0, 2^61); the largest are sampled.

    Returns:
        indices int64[k], k = min(num_samples, n), and bool[k], False for surplus ones.
    """
    max_foreground = int(num_samples * foreground_share)
    if max_foreground < len(random):
        foreground_random = torch.where(foreground, random, -1)
        if max_foreground:
            bound = foreground_random.topk(max_foreground).values[-1]
        else:
            bound = foreground_random.new_full((), 2**_BITS)
        foreground = foreground & (foreground_random >= bound)
    background_order = torch.where(background, random, -1)
    order = torch.where(foreground, random + 2**_BITS, background_order)
    values, indices = order.topk(min(num_samples, len(order)))
    return indices, values >= 0


def _to_signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right as if unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
