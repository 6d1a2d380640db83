"""Anchors of a detector, boxes that they are matched with, and a sample to learn from."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_area, box_iou

from common.detection.models.boxes import clip
from common.detection.models.fpn import Backbone

_BITS = 61  # of a random number, so that one more bit can put some numbers first


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
        sizes = tuple(tuple(int(2**level * scale) for scale in scales) for level in backbone.levels)
        self.generator = AnchorGenerator(sizes, (ratios,) * len(sizes))
        self.per_cell = len(scales) * len(ratios)

    def __call__(self, canvas: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """[P, 4] left, top, right, bottom of all levels for a canvas of (H, W) pixels."""
        self.generator.set_cell_anchors(dtype, device)
        return torch.cat(
            self.generator.grid_anchors(
                self.backbone.grid_sizes(canvas), self.backbone.strides(canvas)
            )
        )

    def level_lengths(self, canvas: Sequence[int]) -> list[int]:
        """Number of anchors of each level; they sum to P."""
        return [
            self.per_cell * height * width for height, width in self.backbone.grid_sizes(canvas)
        ]


def match(
    places: Tensor,
    target: dict,
    size: Tensor,
    foreground_iou: float,
    background_iou: float,
    rescue: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Match anchors or proposals `places` [P, 4] with the boxes of one image.

    Returns:
        the box [P, 4] that each is matched with (arbitrary if it is not foreground), and its index [P];
        bool[P], foreground: it overlaps the box by `foreground_iou`, or with `rescue` as much as
            any other does;
        bool[P], ignored: it overlaps a box by `background_iou`, or half of its part inside `size` [2] (width,
        height) lies in a crowd region.
    """
    boxes = F.pad(target["boxes"].to(places.dtype), (0, 0, 0, 1))  # an empty box at the end
    crowd = F.pad(target["crowd"], (0, 1))
    real = F.pad(~target["crowd"], (0, 1))[:, None]
    overlap = torch.where(real, box_iou(boxes, places), -1)  # [n + 1, P]
    best, which = overlap.max(0)
    foreground = best >= foreground_iou
    if rescue:
        largest = overlap.amax(1, keepdim=True)
        foreground |= ((overlap == largest) & (largest > 0)).any(0)
    inside = clip(places, size)
    shared = torch.minimum(boxes[:, None, 2:], inside[:, 2:]) - torch.maximum(
        boxes[:, None, :2], inside[:, :2]
    )
    shared = shared.clamp(min=0)
    crowded = (shared[..., 0] * shared[..., 1] >= box_area(inside) / 2) & crowd[:, None]
    ignored = ((best >= background_iou) | crowded.any(0)) & ~foreground
    return boxes[which], which, foreground, ignored


def draws_of(ids: Tensor, key: int) -> Tensor:
    """Random numbers in [0, 2^61) for `ids` int64[...]: functions of (id, key), equal on all devices.

    It is `common.randomness.mix` without three bits, in the signed arithmetic of accelerators.
    """
    x = (ids + _signed(key)) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return _shift(x ^ _shift(x, 31), 64 - _BITS)


def sample(
    foreground: Tensor, background: Tensor, draws: Tensor, size: int, share: float
) -> tuple[Tensor, Tensor]:
    """Sample `size` of n places by their `draws` int64[n] in [0, 2^61); foreground comes first, up
    to a `share`.

    `foreground`, `background`: bool[n], never both; other places are not sampled. Returns indices
    int64[k], k = min(size, n), and bool[k], False for surplus ones.
    """
    limit = int(size * share)
    of_foreground = torch.where(foreground, draws, -1)
    if limit < len(draws):
        bound = (
            of_foreground.topk(limit).values[-1] if limit else of_foreground.new_full((), 2**_BITS)
        )
        foreground = foreground & (of_foreground >= bound)
    order = torch.where(foreground, draws + 2**_BITS, torch.where(background, draws, -1))
    drawn, indices = order.topk(min(size, len(order)))
    return indices, drawn >= 0


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right as if unsigned."""
    return (x >> by) & ((1 << (64 - by)) - 1)
