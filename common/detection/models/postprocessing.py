"""Selection of detections: score threshold and non-maximum suppression."""

import torch
from torch import Tensor, nn

from common.detection.models.boxes import suppress
from common.detection.models.detector import Detector
from common.detection.models.fpn import Backbone

LIMIT = 100  # detections per image, as in COCO's evaluation
_CANDIDATES = 1000  # the best places and classes of each level, which are looked at


class Suppressing(Detector):
    """A detector on a feature pyramid that finds several boxes around an object, of which the best stays.

    Detections must score more than `score_threshold`; for average precision it is 0.05 or less. If
    two boxes of a class overlap by more than `nms_threshold` (intersection over union), only the
    better one stays.
    """

    score_threshold, nms_threshold, least_side, limit = 0.05, 0.6, 0.0, LIMIT

    def __init__(self, backbone: Backbone, classes: int) -> None:
        super().__init__()
        self.backbone, self.classes, self.stride = backbone, classes, backbone.stride

    def best_of(self, boxes: Tensor, scores: Tensor, labels: Tensor, size: Tensor) -> dict[str, Tensor]:
        """The best detections of one image, best first: dict of boxes [n, 4], scores [n], labels int64[n], n <= limit.

        Of boxes [m, 4] (left, top, right, bottom in pixels of the canvas) with one score [m] in
        0..1 and one label [m] each. They are clipped to `size` [2], the true width and height of
        the image on its canvas.
        """
        boxes = clip(boxes, size)
        good = (scores > self.score_threshold) & (boxes[:, 2:] - boxes[:, :2] >= self.least_side).all(1)
        good = good.nonzero().squeeze(1)
        boxes, scores, labels = boxes[good], scores[good], labels[good]
        keep = suppress(boxes, scores, labels, self.nms_threshold)[: self.limit]
        return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}


class OneStage(Suppressing):
    """A detector that finds boxes at the places of a feature pyramid: what FCOS and RetinaNet share.

    Subclasses have a `head` and `_found`.
    """

    levels, coarser = (3, 7), "convolutions"  # defaults of the feature pyramid
    head: nn.Module

    def __init__(self, backbone: Backbone, classes: int, convolutions: int) -> None:
        super().__init__(backbone, classes)
        self.convolutions = convolutions

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        outputs = self.head(self.backbone(images))
        with torch.autocast(images.device.type, enabled=False):
            boxes, scores, lengths = self._found(outputs, images)
            return [self._select(*one, lengths) for one in zip(boxes, scores, sizes, strict=True)]

    def _found(self, outputs: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Boxes [B, P, 4], scores [B, P, classes], and the number of places of each level."""
        raise NotImplementedError

    def _select(self, boxes: Tensor, scores: Tensor, size: Tensor, level_lengths: list[int]) -> dict[str, Tensor]:
        """As `best_of`, for boxes [P, 4] with scores [P, classes], of which the best of each level are looked at."""
        start, values, places = 0, [], []
        for level in scores.split(level_lengths):
            best, place = level.flatten().topk(torch.sym_min(_CANDIDATES, level.numel()))
            values.append(best)
            places.append(place + start * self.classes)
            start += level.shape[0]
        scores, places = torch.cat(values), torch.cat(places)
        boxes = boxes[places.div(self.classes, rounding_mode="floor")]
        return self.best_of(boxes, scores, places % self.classes, size)

    @property
    def _dtype(self) -> torch.dtype:
        return self.head.classification_head.cls_logits.weight.dtype


def clip(boxes: Tensor, size: Tensor) -> Tensor:
    """Boxes [..., 4] within an image of `size` [2]: width, height."""
    limits = size.to(boxes).repeat(2)
    return torch.minimum(boxes.clamp(min=0), limits)
