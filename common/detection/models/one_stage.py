"""FCOS and RetinaNet: detectors that find boxes at the places of a feature pyramid."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import box_area, sigmoid_focal_loss

from common.detection.models.anchors import Anchors, match
from common.detection.models.boxes import BoxCoder, filled, full_precision, overlaps
from common.detection.models.detector import Suppressing
from common.detection.models.fpn import Backbone, GroupNorm
from common.detection.models.spec import DetectorSpec
from common.patches.torch import change_class

_CANDIDATES = 1000  # the best places and classes of each level, which are looked at


class OneStage(Suppressing):
    """A detector that finds boxes at the places of a feature pyramid."""

    levels, coarser = (3, 7), "convolutions"
    anchors: Anchors
    head: nn.Module

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__(backbone, spec)
        self.convolutions = spec.convolutions

    def class_loss(
        self, logits: Tensor, labels: Tensor, foreground: Tensor, ignored: Tensor
    ) -> Tensor:
        """[B]: focal loss of logits [B, P, K], summed. Labels, foreground and ignored are [B, P]."""
        one_hot = (
            labels[..., None] == torch.arange(self.classes, device=labels.device)
        ) & foreground[..., None]
        return (sigmoid_focal_loss(logits, one_hot.to(logits.dtype)) * ~ignored[..., None]).sum(
            (1, 2)
        )

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        outputs = self.head(self.backbone(images))
        with full_precision(images):
            lengths = self.anchors.level_lengths(images.shape[2:])
            columns = zip(*self._found(outputs, images), sizes, strict=True)
            return [self._select(*one, lengths) for one in columns]

    def _found(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes [B, P, 4] and scores [B, P, classes]."""
        raise NotImplementedError

    def _select(
        self, boxes: Tensor, scores: Tensor, size: Tensor, level_lengths: list[int]
    ) -> dict[str, Tensor]:
        """As `best_of`, for the best of each level of boxes [P, 4] with scores [P, classes]."""
        start, values, places = 0, [], []
        for level in scores.split(level_lengths):
            best, place = level.flatten().topk(torch.sym_min(_CANDIDATES, level.numel()))
            values.append(best)
            places.append(place + start * self.classes)
            start += level.shape[0]
        place = torch.cat(places)
        boxes = boxes[place.div(self.classes, rounding_mode="floor")]
        return self.best_of(boxes, torch.cat(values), place % self.classes, size)

    @property
    def _dtype(self) -> torch.dtype:
        return self.head.classification_head.cls_logits.weight.dtype


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
        self.anchors = Anchors(backbone, scales=(1,), ratios=(1.0,))  # a point is the centre of one
        self.head = FCOSHead(backbone.width, 1, self.classes, self.convolutions)
        for module in self.head.modules():
            if isinstance(module, nn.GroupNorm):
                change_class(module, GroupNorm)

    def counts(self, targets: list[dict], canvas: Sequence[int]) -> Tensor:
        """int64[1]: foreground points of these images."""
        places = self._places(canvas, targets[0]["boxes"].device)
        return torch.stack([self._assign(*places, target)[2].sum() for target in targets]).sum(
            0, keepdim=True
        )

    def compute_terms(
        self, images: Tensor, targets: list[dict], totals: Tensor
    ) -> dict[str, Tensor]:
        """Focal loss of classes, generalised IoU of boxes, binary cross-entropy of centre-ness."""
        outputs = self.head(self.backbone(images))
        with full_precision(images):
            logits, distances, centreness = self._wide(outputs)
            points, strides, reach = self._places(images.shape[2:], images.device)
            assigned = [self._assign(points, strides, reach, target) for target in targets]
            boxes, labels, foreground, ignored = (
                torch.stack(column) for column in zip(*assigned, strict=True)
            )

            # Points without a box get a loss of zero: the host would wait for indices of the
            # others.
            nearest = (
                torch.stack([points - strides[:, None], points + strides[:, None]])
                .movedim(0, 1)
                .flatten(1)
            )
            wanted = torch.where(foreground[..., None], boxes, nearest)
            predicted = torch.where(
                foreground[..., None], _decode(points, strides, distances), nearest
            )
            distance = (1 - overlaps(predicted, wanted, eps=1e-7)[1]) * foreground

            sides = _sides(points, wanted)
            horizontal, vertical = sides[..., 0::2], sides[..., 1::2]
            ratio = (horizontal.amin(-1) / horizontal.amax(-1)) * (
                vertical.amin(-1) / vertical.amax(-1)
            )
            centred = (
                F.binary_cross_entropy_with_logits(centreness, ratio.sqrt(), reduction="none")
                * foreground
            )

            total = totals[0].clamp(min=1).to(logits.dtype)
            return {
                "class": self.class_loss(logits, labels, foreground, ignored) / total,
                "box": distance.sum(1) / total,
                "centerness": centred.sum(1) / total,
            }

    def _found(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
        """Scores are the root of class probability times centre-ness."""
        logits, distances, centreness = self._wide(outputs)
        points, strides, _ = self._places(images.shape[2:], images.device)
        return _decode(points, strides, distances), (
            logits.sigmoid() * centreness.sigmoid()[..., None]
        ).sqrt()

    def _wide(self, outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Not in half precision: logits [B, P, K], distances [B, P, 4] in strides, centre-ness [B, P]."""
        names = "cls_logits", "bbox_regression", "bbox_ctrness"
        logits, distances, centreness = (outputs[name].to(self._dtype) for name in names)
        return logits, distances, centreness.squeeze(2)

    def _places(self, canvas: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Points [P, 2]; strides [P]; reach [P, 2]: limits of the distance to a box's farthest side."""
        anchors = self.anchors(canvas, self._dtype, device)
        points, strides = (anchors[:, :2] + anchors[:, 2:]) / 2, anchors[:, 2] - anchors[:, 0]
        finest, coarsest = (
            strides == 2**level for level in (self.backbone.levels[0], self.backbone.levels[-1])
        )
        low, high = (
            4 * strides.masked_fill(finest, 0),
            8 * strides.masked_fill(coarsest, float("inf")),
        )
        return points, strides, torch.stack([low, high], 1)

    def _assign(
        self, points: Tensor, strides: Tensor, reach: Tensor, target: dict
    ) -> tuple[Tensor, ...]:
        """The box [P, 4] and label [P] that each point is assigned to, and bool[P]: foreground, ignored.

        It is the smallest box around the point, near its centre, if the level is for boxes of that size.
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
        return (
            boxes[match],
            labels[match],
            foreground,
            ((sides.amin(2) >= 0) & crowd).any(1) & ~foreground,
        )


class RetinaNet(OneStage):
    """One-stage detector with anchors.

    Anchors, matching, losses and names of parameters are torchvision's: its `RetinaNet` loads them.
    An image's losses are divided by its own foreground anchors, then by the number of images.
    Source: Lin et al. 2017, "Focal Loss for Dense Object Detection" (arXiv:1708.02002).
    """

    foreground_iou, background_iou = 0.5, 0.4
    nms_threshold = 0.5

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__(backbone, spec)
        self.anchors = Anchors(backbone, scales=(4, 4 * 2 ** (1 / 3), 4 * 2 ** (2 / 3)))
        norm = None if spec.variant == "torchvision" else partial(GroupNorm, 32)
        self.head = RetinaNetHead(backbone.width, self.anchors.per_cell, self.classes, norm)
        if spec.variant != "own":
            self.limit = max(300, spec.max_detections)
        for part in (self.head.classification_head, self.head.regression_head):
            part.conv = part.conv[: self.convolutions]
        self.coder = BoxCoder((1.0, 1.0, 1.0, 1.0))

    def compute_terms(
        self, images: Tensor, targets: list[dict], totals: Tensor
    ) -> dict[str, Tensor]:
        """Focal loss of classes and distance of encoded boxes."""
        outputs = self.head(self.backbone(images))
        with full_precision(images):
            logits, deltas, anchors = self._wide(outputs, images)
            canvas = filled(images.shape[:1:-1], targets[0]["labels"])  # width, height
            rule = self.foreground_iou, self.background_iou, True
            matched = [match(anchors, target, canvas, *rule) for target in targets]
            boxes, which, foreground, ignored = (
                torch.stack(column) for column in zip(*matched, strict=True)
            )
            labels = torch.stack(
                [F.pad(t["labels"], (0, 1))[w] for t, w in zip(targets, which, strict=True)]
            )

            # Background anchors are encoded against themselves: the host would wait for indices of
            # the others.
            wanted = torch.where(foreground[..., None], boxes, anchors)
            wanted = self.coder.encode_single(
                wanted.flatten(0, 1), anchors.repeat(len(targets), 1)
            ).view_as(deltas)
            distance = (deltas - wanted).abs() * foreground[..., None]

            divisor = foreground.sum(1).clamp(min=1) * totals[0].to(logits.dtype)
            classification = self.class_loss(logits, labels, foreground, ignored)
            return {"class": classification / divisor, "box": distance.sum((1, 2)) / divisor}

    def _found(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
        """Scores are class probabilities."""
        logits, deltas, anchors = self._wide(outputs, images)
        boxes = self.coder.decode_single(
            deltas.flatten(0, 1), anchors.repeat(len(images), 1)
        ).view_as(deltas)
        return boxes, logits.sigmoid()

    def _wide(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Class logits [B, P, K], deltas [B, P, 4] and anchors [P, 4], not in half precision."""
        anchors = self.anchors(images.shape[2:], self._dtype, images.device)
        return (
            outputs["cls_logits"].to(self._dtype),
            outputs["bbox_regression"].to(self._dtype),
            anchors,
        )


def _sides(points: Tensor, boxes: Tensor) -> Tensor:
    """Distances from points [..., 2] to the four sides of boxes [..., 4]; negative outside."""
    return torch.cat([points - boxes[..., :2], boxes[..., 2:] - points], -1)


def _decode(points: Tensor, strides: Tensor, distances: Tensor) -> Tensor:
    """Boxes [B, P, 4] from distances [B, P, 4] in strides."""
    distances = distances * strides[:, None]
    return torch.cat([points - distances[..., :2], points + distances[..., 2:]], -1)
