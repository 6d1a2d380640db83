"""FCOS: a detector without anchors, which regresses a box from every point."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.fcos import FCOSHead
from torchvision.ops import box_area, sigmoid_focal_loss

from common.detection.models.boxes import filled, overlaps
from common.detection.models.fpn import Backbone, GroupNorm
from common.detection.models.postprocessing import OneStage
from common.detection.models.spec import DetectorSpec


class FCOS(OneStage):
    """One-stage detector without anchors.

    The points, the assignment and the losses are torchvision's, as are the names of the parameters: its `FCOS` around the
    same backbone loads them. Different here: the divisor is the count of foreground points in the global batch, and crowd
    regions are neither foreground nor background.
    Source: Tian et al. 2019, "FCOS: Fully Convolutional One-Stage Object Detection" (arXiv:1904.01355).
    """

    radius = 1.5  # foreground points lie within this many strides of their box's centre

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__(backbone, spec.classes, spec.convolutions)
        self.head = FCOSHead(backbone.width, 1, self.classes, self.convolutions)
        for module in self.head.modules():
            if isinstance(module, nn.GroupNorm):
                module.__class__ = GroupNorm

    def counts(self, targets: list[dict], canvas: tuple[int, int]) -> Tensor:
        """int64[1]: foreground points of these images."""
        places = self._places(canvas, targets[0]["boxes"].device)
        return sum(self._assign(*places, target)[2].sum() for target in targets).view(1)

    def losses(self, images: Tensor, targets: list[dict], totals: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Focal loss of classes, generalised IoU loss of boxes, and binary cross-entropy of centre-ness: [B] each."""
        outputs = self.head(self.backbone(images))
        with torch.autocast(images.device.type, enabled=False):
            logits, distances, centreness = self._wide(outputs)
            points, strides, reach = self._places(images.shape[2:], images.device)
            assigned = [self._assign(points, strides, reach, target) for target in targets]
            boxes, labels, foreground, ignored = (torch.stack(column) for column in zip(*assigned, strict=True))

            one_hot = (labels[..., None] == torch.arange(self.classes, device=labels.device)) & foreground[..., None]
            classification = sigmoid_focal_loss(logits, one_hot.to(logits.dtype)) * ~ignored[..., None]

            # Points without a box get a loss of zero instead of being left out: indexing would make the host wait.
            nearest = torch.stack([points - strides[:, None], points + strides[:, None]]).movedim(0, 1).flatten(1)
            wanted = torch.where(foreground[..., None], boxes, nearest)
            predicted = torch.where(foreground[..., None], _decode(points, strides, distances), nearest)
            distance = (1 - overlaps(predicted, wanted, eps=1e-7)[1]) * foreground

            sides = _sides(points, wanted)
            horizontal, vertical = sides[..., 0::2], sides[..., 1::2]
            ratio = (horizontal.amin(-1) / horizontal.amax(-1)) * (vertical.amin(-1) / vertical.amax(-1))
            centred = F.binary_cross_entropy_with_logits(centreness, ratio.sqrt(), reduction="none") * foreground

            total = totals[0].clamp(min=1).to(logits.dtype)
            terms = {
                "class": classification.sum((1, 2)) / total,
                "box": distance.sum(1) / total,
                "centerness": centred.sum(1) / total,
            }
        return sum(terms.values()), terms

    def _found(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Scores are the root of class probability times centre-ness."""
        logits, distances, centreness = self._wide(outputs)
        points, strides, _ = self._places(images.shape[2:], images.device)
        scores = (logits.sigmoid() * centreness.sigmoid()[..., None]).sqrt()
        lengths = [height * width for height, width in self.backbone.grid_sizes(images.shape[2:])]
        return _decode(points, strides, distances), scores, lengths

    def _wide(self, outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Class logits [B, P, K], distances [B, P, 4] in strides and centre-ness [B, P], not in half precision."""
        logits, distances, centreness = (
            outputs[name].to(self._dtype) for name in ("cls_logits", "bbox_regression", "bbox_ctrness")
        )
        return logits, distances, centreness.squeeze(2)

    def _places(self, canvas: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Of all levels: points [P, 2] x, y; strides [P]; reach [P, 2]: least and largest distance to a box's far side."""
        points, strides, reach = [], [], []
        levels, steps = self.backbone.levels, self.backbone.strides(canvas)
        for level, sides, step in zip(levels, self.backbone.grid_sizes(canvas), steps, strict=True):
            stride = 2**level
            axes = (torch.arange(n, device=device, dtype=self._dtype) * s for n, s in zip(sides, step, strict=True))
            grid = torch.cartesian_prod(*axes)
            points.append(grid.flip(1))
            strides.append(grid.new_full(grid.shape[:1], stride))
            low = 0 if level == levels[0] else 4 * stride
            high = float("inf") if level == levels[-1] else 8 * stride
            reach.append(filled((low, high), grid).expand(grid.shape[0], 2))
        return torch.cat(points), torch.cat(strides), torch.cat(reach)

    def _assign(self, points: Tensor, strides: Tensor, reach: Tensor, target: dict) -> tuple[Tensor, ...]:
        """Assign points to the boxes of one image: boxes [P, 4], labels [P], foreground bool[P], ignored bool[P].

        A point is assigned to the smallest box that it lies in, near the centre, if its level is for boxes of that size.
        """
        # An empty box at the end, for images without boxes.
        boxes = F.pad(target["boxes"].to(points.dtype), (0, 0, 0, 1))
        labels, crowd = F.pad(target["labels"], (0, 1)), F.pad(target["crowd"], (0, 1))
        sides = _sides(points[:, None], boxes)  # [P, n, 4]
        inside, farthest = sides.amin(2) > 0, sides.amax(2)
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        central = (points[:, None] - centres).abs().amax(2) < self.radius * strides[:, None]
        fitting = (farthest >= reach[:, :1]) & (farthest < reach[:, 1:])
        charge = inside & central & fitting & ~crowd
        areas, match = torch.where(charge, box_area(boxes), float("inf")).min(1)
        foreground = areas < float("inf")
        return boxes[match], labels[match], foreground, ((sides.amin(2) >= 0) & crowd).any(1) & ~foreground


def _sides(points: Tensor, boxes: Tensor) -> Tensor:
    """Distances from points [..., 2] to the left, top, right and bottom of boxes [..., 4]; negative outside."""
    return torch.cat([points - boxes[..., :2], boxes[..., 2:] - points], -1)


def _decode(points: Tensor, strides: Tensor, distances: Tensor) -> Tensor:
    """Boxes [B, P, 4] from distances [B, P, 4] in strides."""
    distances = distances * strides[:, None]
    return torch.cat([points - distances[..., :2], points + distances[..., 2:]], -1)
