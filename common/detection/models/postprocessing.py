"""Selection of detections: score threshold and non-maximum suppression."""

import torch
from torch import Tensor

from common.detection.models.boxes import suppress

MOST = 100  # detections per image, as in COCO's evaluation


def select(
    boxes: Tensor,
    scores: Tensor,
    level_lengths: list[int],
    size: Tensor,
    *,
    score_threshold: float,
    nms_threshold: float,
    candidates: int = 1000,
    limit: int = MOST,
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
    limit: int = MOST,
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
