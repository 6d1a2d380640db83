"""FCOS and RetinaNet: detectors that predict a box at each point or anchor of a feature pyramid."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import box_area, sigmoid_focal_loss

from common.detection.models.anchors import Anchors, Matches, match_boxes
from common.detection.models.boxes import BoxCoder, build_tensor, compute_ious, disable_autocast
from common.detection.models.detector import NMSDetector
from common.detection.models.fpn import Backbone, GroupNorm
from common.detection.models.spec import DetectorSpec
from common.patches.torch import change_class

_TOPK_CANDIDATES = 1000  # pairs of an anchor and a class that each level gives to suppression


class OneStage(NMSDetector):
    """A detector that predicts boxes and scores at P anchors or points of a feature pyramid."""

    levels = (3, 7)
    coarser = "convolutions"
    anchors: Anchors
    head: nn.Module

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__(backbone, spec)
        self.convolutions = spec.convolutions

    def compute_class_loss(self, logits: Tensor, labels: Tensor, matches: Matches) -> Tensor:
        """Compute the focal loss [B] of logits [B, P, K], summed; `labels` are int64[B, P]."""
        class_ids = torch.arange(self.num_classes, device=labels.device)
        one_hot = (labels[..., None] == class_ids) & matches.foreground[..., None]
        losses = sigmoid_focal_loss(logits, one_hot.to(logits.dtype))
        return (losses * ~matches.ignored[..., None]).sum((1, 2))

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        outputs = self.head(self.backbone(images))
        with disable_autocast(images):
            num_per_level = self.anchors.count_per_level(images.shape[2:])
            boxes, scores = self._decode_outputs(outputs, images)
            arguments = zip(boxes, scores, sizes, strict=True)
            return [self._select_from_levels(*args, num_per_level) for args in arguments]

    def _decode_outputs(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
        """Decode the outputs of the head to boxes [B, P, 4] and scores [B, P, K]."""
        raise NotImplementedError

    def _select_from_levels(
        self,
        boxes: Tensor,
        scores: Tensor,
        size: Tensor,
        num_per_level: list[int],
    ) -> dict[str, Tensor]:
        """As `select_detections`, from the best of each level of boxes [P, 4] and scores [P, K]."""
        first_anchor = 0
        level_scores = []
        level_indices = []
        for level in scores.split(num_per_level):
            num_candidates = torch.sym_min(_TOPK_CANDIDATES, level.numel())
            best, indices = level.flatten().topk(num_candidates)
            level_scores.append(best)
            level_indices.append(indices + first_anchor * self.num_classes)
            first_anchor += level.shape[0]
        indices = torch.cat(level_indices)
        boxes = boxes[indices.div(self.num_classes, rounding_mode="floor")]
        labels = indices % self.num_classes
        return self.select_detections(boxes, torch.cat(level_scores), labels, size)

    @property
    def _dtype(self) -> torch.dtype:
        return self.head.classification_head.cls_logits.weight.dtype


class _Points(NamedTuple):
    """The points of a feature pyramid at which FCOS predicts boxes."""

    centres: Tensor  # [P, 2] x, y in pixels
    strides: Tensor  # [P] pixels between the points of their level
    ranges: Tensor  # [P, 2] limits of the distance to the farthest side of a box


class FCOS(OneStage):
    """One-stage detector without anchors.

    Points, assignment, losses and names of parameters are torchvision's: its `FCOS` loads them.
    Different here: the divisor is the count of foreground points in the global batch, and there are
    crowd regions. Source: Tian et al. 2019, "FCOS: Fully Convolutional One-Stage Object Detection"
    (arXiv:1904.01355).
    """

    radius = 1.5  # foreground points lie within this many strides of their box's centre

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__(backbone, spec)
        self.anchors = Anchors(backbone, scales=(1,), ratios=(1.0,))  # points are their centres
        self.head = FCOSHead(backbone.width, 1, self.num_classes, self.convolutions)
        for module in self.head.modules():
            if isinstance(module, nn.GroupNorm):
                change_class(module, GroupNorm)

    def count_divisors(self, targets: list[dict], canvas: Sequence[int]) -> Tensor:
        """Count the foreground points of these images: int64[1]."""
        points = self._create_points(canvas, targets[0]["boxes"].device)
        counts = [self._assign_boxes(points, target).foreground.sum() for target in targets]
        return torch.stack(counts).sum(0, keepdim=True)

    def compute_terms(
        self,
        images: Tensor,
        targets: list[dict],
        totals: Tensor,
    ) -> dict[str, Tensor]:
        """Focal loss of classes, generalised IoU of boxes, binary cross-entropy of centre-ness."""
        outputs = self.head(self.backbone(images))
        with disable_autocast(images):
            logits, distances, centreness = self._upcast_outputs(outputs)
            points = self._create_points(images.shape[2:], images.device)
            matches = Matches.stack([self._assign_boxes(points, target) for target in targets])
            labels = matches.select_labels(targets)
            foreground = matches.foreground

            # Points without a box have a loss of zero, since they predict and expect the same cell:
            # the host would wait for indices of the foreground.
            radii = points.strides[:, None]
            cells = torch.cat([points.centres - radii, points.centres + radii], 1)
            expected = torch.where(foreground[..., None], matches.boxes, cells)
            predicted = _decode_boxes(points, distances)
            predicted = torch.where(foreground[..., None], predicted, cells)
            _, giou = compute_ious(predicted, expected, eps=1e-7)
            box_losses = (1 - giou) * foreground

            expected_centreness = _compute_centreness(points.centres, expected)
            centreness_losses = F.binary_cross_entropy_with_logits(
                centreness, expected_centreness, reduction="none"
            )
            centreness_losses = centreness_losses * foreground

            num_foreground = totals[0].clamp(min=1).to(logits.dtype)
            return {
                "class": self.compute_class_loss(logits, labels, matches) / num_foreground,
                "box": box_losses.sum(1) / num_foreground,
                "centerness": centreness_losses.sum(1) / num_foreground,
            }

    def _decode_outputs(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
        """Scores are the root of class probability times centre-ness."""
        logits, distances, centreness = self._upcast_outputs(outputs)
        points = self._create_points(images.shape[2:], images.device)
        scores = (logits.sigmoid() * centreness.sigmoid()[..., None]).sqrt()
        return _decode_boxes(points, distances), scores

    def _upcast_outputs(self, outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, P, K], distances [B, P, 4] in strides, centre-ness [B, P]: in full precision."""
        logits = outputs["cls_logits"].to(self._dtype)
        distances = outputs["bbox_regression"].to(self._dtype)
        centreness = outputs["bbox_ctrness"].to(self._dtype)
        return logits, distances, centreness.squeeze(2)

    def _create_points(self, canvas: Sequence[int], device: torch.device) -> _Points:
        """Create the points of a canvas of (H, W) pixels."""
        anchors = self.anchors(canvas, self._dtype, device)
        centres = (anchors[:, :2] + anchors[:, 2:]) / 2
        strides = anchors[:, 2] - anchors[:, 0]
        is_finest = strides == 2 ** self.backbone.levels[0]
        is_coarsest = strides == 2 ** self.backbone.levels[-1]
        low = 4 * strides.masked_fill(is_finest, 0)
        high = 8 * strides.masked_fill(is_coarsest, float("inf"))
        return _Points(centres, strides, torch.stack([low, high], 1))

    def _assign_boxes(self, points: _Points, target: dict) -> Matches:
        """Assign the boxes of one image to points.

        A point gets the smallest box around it, near the box's centre, of those whose size is one
        for the point's level.
        """
        # An empty box at the end, for images without boxes.
        boxes = F.pad(target["boxes"].to(points.centres.dtype), (0, 0, 0, 1))
        is_crowd = F.pad(target["crowd"], (0, 1))
        distances = _compute_distances(points.centres[:, None], boxes)  # [P, n, 4]
        nearest = distances.amin(2)
        farthest = distances.amax(2)
        is_in_range = (farthest >= points.ranges[:, :1]) & (farthest < points.ranges[:, 1:])
        box_centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        offsets = (points.centres[:, None] - box_centres).abs().amax(2)
        is_central = offsets < self.radius * points.strides[:, None]
        is_candidate = (nearest > 0) & is_central & is_in_range & ~is_crowd
        areas, indices = torch.where(is_candidate, box_area(boxes), float("inf")).min(1)
        foreground = areas < float("inf")
        is_in_crowd = ((nearest >= 0) & is_crowd).any(1)
        return Matches(boxes[indices], indices, foreground, is_in_crowd & ~foreground)


class RetinaNet(OneStage):
    """One-stage detector with anchors.

    Anchors, matching, losses and names of parameters are torchvision's: its `RetinaNet` loads them.
    An image's losses are divided by its own foreground anchors, then by the number of images.
    Source: Lin et al. 2017, "Focal Loss for Dense Object Detection" (arXiv:1708.02002).
    """

    foreground_iou = 0.5
    background_iou = 0.4
    nms_threshold = 0.5

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__(backbone, spec)
        self.anchors = Anchors(backbone, scales=(4, 4 * 2 ** (1 / 3), 4 * 2 ** (2 / 3)))
        norm = None if spec.variant == "torchvision" else partial(GroupNorm, 32)
        num_anchors = self.anchors.num_per_cell
        self.head = RetinaNetHead(backbone.width, num_anchors, self.num_classes, norm)
        if spec.variant != "own":
            self.limit = max(300, spec.max_detections)
        for head in (self.head.classification_head, self.head.regression_head):
            head.conv = head.conv[: self.convolutions]
        self.coder = BoxCoder((1.0, 1.0, 1.0, 1.0))

    def compute_terms(
        self,
        images: Tensor,
        targets: list[dict],
        totals: Tensor,
    ) -> dict[str, Tensor]:
        """Focal loss of classes and distance of encoded boxes."""
        outputs = self.head(self.backbone(images))
        with disable_autocast(images):
            logits, deltas, anchors = self._upcast_outputs(outputs, images)
            size = build_tensor(images.shape[:1:-1], like=targets[0]["labels"])  # width, height
            matches = Matches.stack([self._match_anchors(anchors, t, size) for t in targets])
            labels = matches.select_labels(targets)
            foreground = matches.foreground

            # Background anchors are encoded against themselves: the host would wait for indices of
            # the foreground.
            boxes = torch.where(foreground[..., None], matches.boxes, anchors).flatten(0, 1)
            references = anchors.repeat(len(targets), 1)
            expected = self.coder.encode_single(boxes, references).view_as(deltas)
            box_losses = (deltas - expected).abs() * foreground[..., None]

            divisor = foreground.sum(1).clamp(min=1) * totals[0].to(logits.dtype)
            return {
                "class": self.compute_class_loss(logits, labels, matches) / divisor,
                "box": box_losses.sum((1, 2)) / divisor,
            }

    def _match_anchors(self, anchors: Tensor, target: dict, size: Tensor) -> Matches:
        return match_boxes(
            anchors,
            target,
            size,
            foreground_iou=self.foreground_iou,
            background_iou=self.background_iou,
            allow_low_quality=True,
        )

    def _decode_outputs(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
        """Scores are class probabilities."""
        logits, deltas, anchors = self._upcast_outputs(outputs, images)
        references = anchors.repeat(len(images), 1)
        boxes = self.coder.decode_single(deltas.flatten(0, 1), references).view_as(deltas)
        return boxes, logits.sigmoid()

    def _upcast_outputs(
        self,
        outputs: dict[str, Tensor],
        images: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Class logits [B, P, K], deltas [B, P, 4] and anchors [P, 4]: in full precision."""
        logits = outputs["cls_logits"].to(self._dtype)
        deltas = outputs["bbox_regression"].to(self._dtype)
        anchors = self.anchors(images.shape[2:], self._dtype, images.device)
        return logits, deltas, anchors


def _compute_distances(points: Tensor, boxes: Tensor) -> Tensor:
    """Distances from points [..., 2] to the four sides of boxes [..., 4]; negative outside."""
    return torch.cat([points - boxes[..., :2], boxes[..., 2:] - points], -1)


def _compute_centreness(points: Tensor, boxes: Tensor) -> Tensor:
    """Centre-ness [B, P] of points [P, 2] in boxes [B, P, 4]: 1 in the centre, 0 at the sides."""
    distances = _compute_distances(points, boxes)
    horizontal = distances[..., 0::2]
    vertical = distances[..., 1::2]
    horizontal_ratio = horizontal.amin(-1) / horizontal.amax(-1)
    vertical_ratio = vertical.amin(-1) / vertical.amax(-1)
    return (horizontal_ratio * vertical_ratio).sqrt()


def _decode_boxes(points: _Points, distances: Tensor) -> Tensor:
    """Boxes [B, P, 4] from distances [B, P, 4] in strides."""
    distances = distances * points.strides[:, None]
    low = points.centres - distances[..., :2]
    high = points.centres + distances[..., 2:]
    return torch.cat([low, high], -1)
