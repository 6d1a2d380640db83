"""RetinaNet: a detector with several anchors at every point."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import sigmoid_focal_loss

from common.detection.models.anchors import Anchors, match
from common.detection.models.boxes import BoxCoder, filled
from common.detection.models.fpn import Backbone, GroupNorm
from common.detection.models.postprocessing import LIMIT, OneStage
from common.detection.models.spec import DetectorSpec


class RetinaNet(OneStage):
    """One-stage detector with anchors.

    Anchors, matching and losses are torchvision's, as are the names of the parameters: its `RetinaNet` with GroupNorm in
    its head loads them. Each image's losses are divided by its own foreground anchors, then by the images of the global
    batch.
    Source: Lin et al. 2017, "Focal Loss for Dense Object Detection" (arXiv:1708.02002).
    """

    foreground_iou, background_iou = 0.5, 0.4
    nms_threshold = 0.5

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__(backbone, spec.classes, spec.convolutions)
        self.anchors = Anchors(backbone, scales=(4, 4 * 2 ** (1 / 3), 4 * 2 ** (2 / 3)))
        norm = None if spec.variant == "torchvision" else partial(GroupNorm, 32)
        self.head = RetinaNetHead(backbone.width, self.anchors.per_cell, self.classes, norm)
        self.limit = LIMIT if spec.variant == "own" else 300
        for part in (self.head.classification_head, self.head.regression_head):
            part.conv = part.conv[: self.convolutions]
        self.coder = BoxCoder((1.0, 1.0, 1.0, 1.0))

    def losses(self, images: Tensor, targets: list[dict], totals: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Focal loss of classes and distance of encoded boxes: [B] each."""
        outputs = self.head(self.backbone(images))
        with torch.autocast(images.device.type, enabled=False):
            logits, deltas, anchors = self._wide(outputs, images)
            canvas = filled(images.shape[:1:-1], targets[0]["labels"])  # width, height
            rule = {"foreground_iou": self.foreground_iou, "background_iou": self.background_iou, "rescue": True}
            matched = [match(anchors, target, canvas, **rule) for target in targets]
            boxes, which, foreground, ignored = (torch.stack(column) for column in zip(*matched, strict=True))
            labels = torch.stack([F.pad(t["labels"], (0, 1))[w] for t, w in zip(targets, which, strict=True)])

            one_hot = (labels[..., None] == torch.arange(self.classes, device=labels.device)) & foreground[..., None]
            classification = sigmoid_focal_loss(logits, one_hot.to(logits.dtype)) * ~ignored[..., None]

            # Background anchors are encoded against themselves instead of being left out: indexing would make the host wait.
            wanted = torch.where(foreground[..., None], boxes, anchors)
            wanted = self.coder.encode_single(wanted.flatten(0, 1), anchors.repeat(len(targets), 1)).view_as(deltas)
            distance = (deltas - wanted).abs() * foreground[..., None]

            divisor = foreground.sum(1).clamp(min=1) * totals[0].to(logits.dtype)
            terms = {"class": classification.sum((1, 2)) / divisor, "box": distance.sum((1, 2)) / divisor}
        return sum(terms.values()), terms

    def _found(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Scores are class probabilities."""
        logits, deltas, anchors = self._wide(outputs, images)
        boxes = self.coder.decode_single(deltas.flatten(0, 1), anchors.repeat(len(images), 1)).view_as(deltas)
        return boxes, logits.sigmoid(), self.anchors.level_lengths(images.shape[2:])

    def _wide(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Class logits [B, P, K], deltas [B, P, 4] and anchors [P, 4], not in half precision."""
        anchors = self.anchors(images.shape[2:], self._dtype, images.device)
        return outputs["cls_logits"].to(self._dtype), outputs["bbox_regression"].to(self._dtype), anchors
