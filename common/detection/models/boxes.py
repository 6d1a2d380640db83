"""Coding, comparing and suppressing of boxes, with few waits of the host for the device.

torchvision and transformers compute the same, but look at numbers on the way, or send some to the
device from memory that is not pinned: the host then waits until all queued work is done.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection import _utils
from torchvision.ops import batched_nms, nms

from common.distributed import devices


def filled(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Tensor [n] with the type and on the device of `like`, filled without a copy from the host."""
    return torch.stack([like.new_full((), value) for value in values])


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without a wait."""
    return (
        x.pin_memory().to(device, non_blocking=True)
        if devices.has_streams(device)
        else x.to(device)
    )


def full_precision(x: Tensor) -> torch.autocast:
    """A context on the device of `x` in which nothing is computed in half precision."""
    return torch.autocast(x.device.type, enabled=False)


class BoxCoder(_utils.BoxCoder):
    """torchvision's box coder: boxes as distances from others, [n, 4 K] for K boxes each."""

    def encode_single(self, reference_boxes: Tensor, proposals: Tensor) -> Tensor:
        return _utils.encode_boxes(reference_boxes, proposals, self.weights)

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        boxes = boxes.to(rel_codes.dtype)[:, None]
        shift, growth = rel_codes.unflatten(1, (-1, 4)).split(2, -1)  # [n, K, 2] each
        sides = boxes[..., 2:] - boxes[..., :2]
        centres = shift / self.weights[0] * sides + (boxes[..., :2] + 0.5 * sides)
        halves = 0.5 * ((growth / self.weights[2]).clamp(max=self.bbox_xform_clip).exp() * sides)
        return torch.cat([centres - halves, centres + halves], -1).flatten(1)


def overlaps(boxes: Tensor, others: Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Intersection over union [...], plain and generalised, of pairs of boxes [..., 4] (corners).

    With `eps` 1e-7, one minus the second is torchvision's `generalized_box_iou_loss`.
    Source: Rezatofighi et al. 2019, "Generalized Intersection over Union" (arXiv:1902.09630).
    """
    low, high = boxes.split(2, -1)
    other_low, other_high = others.split(2, -1)
    sides = torch.minimum(high, other_high) - torch.maximum(low, other_low)
    inside = torch.where((sides > 0).all(-1), _area(sides), 0)
    union = _area(high - low) + _area(other_high - other_low) - inside
    around = _area(torch.maximum(high, other_high) - torch.minimum(low, other_low))
    overlap = inside / (union + eps)
    return overlap, overlap - (around - union) / (around + eps)


def _area(sides: Tensor) -> Tensor:
    return sides[..., 0] * sides[..., 1]  # the gradient of `prod` looks for zeros, which waits


def suppress(boxes: Tensor, scores: Tensor, groups: Tensor, threshold: float) -> Tensor:
    """Indices, best first, of boxes that no better one of their group overlaps by more than `threshold`.

    As torchvision's `batched_nms`; the host waits once, for their number.
    """
    exporting = torch.compiler.is_exporting()  # a graph has one way for any number of boxes
    limit = 4000 if boxes.device.type == "cpu" else 100_000
    if not exporting and (not len(boxes) or boxes.numel() > limit):  # where it works in another way
        return batched_nms(boxes, scores, groups, threshold)
    apart = groups.to(boxes) * (F.pad(boxes, (0, 0, 0, 1)).max() + 1)
    return nms(boxes + apart[:, None], scores, threshold)


def clip(boxes: Tensor, size: Tensor) -> Tensor:
    """Boxes [..., 4] within an image of `size` [2]: width, height."""
    limits = size.to(boxes).repeat(2)
    return torch.minimum(boxes.clamp(min=0), limits)
