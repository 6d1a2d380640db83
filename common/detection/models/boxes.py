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


def build_tensor(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Build a tensor [n] with the type and on the device of `like`, without a copy from the host."""
    return torch.stack([like.new_full((), value) for value in values])


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device, without a wait."""
    if devices.has_streams(device):
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def disable_autocast(x: Tensor) -> torch.autocast:
    """A context on the device of `x` in which nothing is computed in half precision."""
    return torch.autocast(x.device.type, enabled=False)


class BoxCoder(_utils.BoxCoder):
    """torchvision's box coder: boxes as distances from reference boxes, [n, 4 K] for K boxes each."""

    def encode_single(self, reference_boxes: Tensor, proposals: Tensor) -> Tensor:
        return _utils.encode_boxes(reference_boxes, proposals, self.weights)

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        boxes = boxes.to(rel_codes.dtype)[:, None]
        shifts, log_scales = rel_codes.unflatten(1, (-1, 4)).split(2, -1)  # [n, K, 2] each
        sides = boxes[..., 2:] - boxes[..., :2]
        centres = boxes[..., :2] + 0.5 * sides
        centres = shifts / self.weights[0] * sides + centres
        log_scales = (log_scales / self.weights[2]).clamp(max=self.bbox_xform_clip)
        half_sides = 0.5 * (log_scales.exp() * sides)
        return torch.cat([centres - half_sides, centres + half_sides], -1).flatten(1)


def compute_ious(boxes: Tensor, targets: Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Compute the IoU and the generalised IoU [...] of pairs of boxes [..., 4] (corners).

    With `eps` 1e-7, one minus the second is torchvision's `generalized_box_iou_loss`.
    Source: Rezatofighi et al. 2019, "Generalized Intersection over Union" (arXiv:1902.09630).
    """
    low, high = boxes.split(2, -1)
    target_low, target_high = targets.split(2, -1)
    sides = torch.minimum(high, target_high) - torch.maximum(low, target_low)
    is_overlapping = (sides > 0).all(-1)
    intersection = torch.where(is_overlapping, _multiply_sides(sides), 0)
    union = _multiply_sides(high - low) + _multiply_sides(target_high - target_low) - intersection
    hull_sides = torch.maximum(high, target_high) - torch.minimum(low, target_low)
    hull = _multiply_sides(hull_sides)
    iou = intersection / (union + eps)
    return iou, iou - (hull - union) / (hull + eps)


def _multiply_sides(sides: Tensor) -> Tensor:
    return sides[..., 0] * sides[..., 1]  # the gradient of `prod` looks for zeros, which waits


def apply_nms(boxes: Tensor, scores: Tensor, groups: Tensor, iou_threshold: float) -> Tensor:
    """Indices, best first, of boxes that no better box of their group overlaps by more than the threshold.

    As torchvision's `batched_nms`; the host waits once, for the number of indices.
    """
    # torchvision works in another way without boxes, and with many. An exported graph has only one
    # way, for any number of boxes.
    max_numel = 4000 if boxes.device.type == "cpu" else 100_000
    if not torch.compiler.is_exporting() and (len(boxes) == 0 or boxes.numel() > max_numel):
        return batched_nms(boxes, scores, groups, iou_threshold)
    max_coordinate = F.pad(boxes, (0, 0, 0, 1)).max()
    offsets = groups.to(boxes) * (max_coordinate + 1)
    return nms(boxes + offsets[:, None], scores, iou_threshold)


def clip_boxes(boxes: Tensor, size: Tensor) -> Tensor:
    """Clip boxes [..., 4] (corners) to an image of `size` [2]: width, height."""
    limits = size.to(boxes).repeat(2)
    return torch.minimum(boxes.clamp(min=0), limits)
