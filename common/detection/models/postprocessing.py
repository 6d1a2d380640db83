"""Selection of detections: score threshold and non-maximum suppression."""

from typing import Any

import torch
from torch import Tensor, nn

from common.detection.models.boxes import suppress
from common.detection.models.detector import Detector
from common.detection.models.fpn import Backbone

LIMIT = 100  # detections per image, as in COCO's evaluation


class OneStage(Detector):
    """A detector that finds boxes at the places of a feature pyramid: what FCOS and RetinaNet share.

    Subclasses have a `head`, `_found` and the values below.
    """

    levels, coarser = (3, 7), "convolutions"  # defaults of the feature pyramid
    score_threshold, nms_threshold, limit = 0.05, 0.6, LIMIT
    head: nn.Module

    def __init__(self, backbone: Backbone, classes: int, convolutions: int) -> None:
        super().__init__()
        self.backbone, self.classes, self.stride = backbone, classes, backbone.stride
        self.convolutions = convolutions

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        outputs = self.head(self.backbone(images))
        thresholds: dict[str, Any] = {
            name: getattr(self, name) for name in ("score_threshold", "nms_threshold", "limit")
        }
        with torch.autocast(images.device.type, enabled=False):
            boxes, scores, lengths = self._found(outputs, images)
            of_images = zip(boxes, scores, sizes, strict=True)
            return [select(*of_image, lengths, size, **thresholds) for *of_image, size in of_images]

    def _found(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Boxes [B, P, 4], scores [B, P, classes], and the number of places of each level."""
        raise NotImplementedError

    @property
    def _dtype(self) -> torch.dtype:
        return self.head.classification_head.cls_logits.weight.dtype


def select(
    boxes: Tensor,
    scores: Tensor,
    level_lengths: list[int],
    size: Tensor,
    *,
    score_threshold: float,
    nms_threshold: float,
    candidates: int = 1000,
    limit: int = LIMIT,
) -> dict[str, Tensor]:
    """The best detections of one image, best first: dict of boxes [n, 4], scores [n], labels int64[n], n <= limit.

    Args:
        boxes: [P, 4] left, top, right, bottom of each place, in pixels of the canvas.
        scores: [P, classes] in 0..1.
        level_lengths: numbers of places of the levels of the feature pyramid; the best `candidates` of each level are kept.
        size: [2] true width and height of the image on its canvas; boxes are clipped to it.
        score_threshold: detections must score more; for average precision take 0.05 or less.
        nms_threshold: if two boxes of a class overlap by more (intersection over union), only the better one stays.
    """
    classes, start = scores.shape[1], 0
    values, places = [], []
    for level in scores.split(level_lengths):
        best, place = level.flatten().topk(torch.sym_min(candidates, level.numel()))
        values.append(best)
        places.append(place + start * classes)
        start += level.shape[0]
    scores, places = torch.cat(values), torch.cat(places)
    boxes, labels = boxes[places.div(classes, rounding_mode="floor")], places % classes
    return best_of(
        boxes, scores, labels, size, score_threshold=score_threshold, nms_threshold=nms_threshold, limit=limit
    )


def best_of(
    boxes: Tensor,
    scores: Tensor,
    labels: Tensor,
    size: Tensor,
    *,
    score_threshold: float,
    nms_threshold: float,
    least_side: float = 0.0,
    limit: int = LIMIT,
) -> dict[str, Tensor]:
    """As `select`, for boxes [n, 4] with one score [n] and one label [n] each; `least_side` in pixels, after clipping."""
    boxes = clip(boxes, size)
    good = (scores > score_threshold) & (boxes[:, 2:] - boxes[:, :2] >= least_side).all(1)
    good = good.nonzero().squeeze(1)
    boxes, scores, labels = boxes[good], scores[good], labels[good]
    keep = suppress(boxes, scores, labels, nms_threshold)[:limit]
    return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}


def clip(boxes: Tensor, size: Tensor) -> Tensor:
    """Boxes [..., 4] within an image of `size` [2]: width, height."""
    limits = size.to(boxes).repeat(2)
    return torch.minimum(boxes.clamp(min=0), limits)
