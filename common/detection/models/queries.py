"""What detectors share whose queries each become one box: targets, matching, crowd regions, and the selection of the best."""

import torch
from torch import Tensor
from torchvision.ops import box_convert

from common.detection.models.boxes import filled, overlaps, to_device
from common.detection.models.denoising import padded


def split_targets(targets: list[dict], images: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Boxes [n, 4] (centre x, centre y, width, height) and labels of each image; crowd regions [B, m + 1, 4] (corners).

    Boxes and regions are relative to the canvas of `images` [B, 3, H, W]. Regions are padded with -1.
    """
    corners = torch.cat([target["boxes"] for target in targets]).to(images.dtype) / _extent(images)
    objects, regions, first = [], [], 0
    for target in targets:
        crowd = target["regions"] if "regions" in target else target["crowd"].nonzero().flatten().tolist()
        rows = range(first, first := first + len(target["labels"]))
        regions.append([rows[row] for row in crowd])
        objects.append(sorted({*rows} - {*regions[-1]}))
    order, sizes = [row for rows in objects + regions for row in rows], [*map(len, objects + regions)]
    index = to_device(torch.tensor(order, dtype=torch.int64), images.device)
    labels = torch.cat([target["labels"] for target in targets])[index].split(sizes)[: len(targets)]
    parts = corners[index].split(sizes)
    boxes = [box_convert(part, "xyxy", "cxcywh") for part in parts[: len(targets)]]
    return boxes, labels, padded(parts[len(targets) :], -1)


@torch.no_grad()
def match(
    logits: Tensor,
    boxes: Tensor,
    wanted: Tensor,
    labels: Tensor,
    counts: list[int],
    *,
    alpha: float,
    gamma: float,
    class_cost: float,
    bbox_cost: float,
    giou_cost: float,
) -> Tensor:
    """int64[B, O, Q]: the box that each query of each of O outputs is matched with, or -1.

    As the Hungarian matchers of transformers do, for all images at once: the host waits for the device once.

    Args:
        logits, boxes: [B, O, Q, K] and [B, O, Q, 4] (centre x, centre y, width, height in 0..1).
        wanted, labels: [B, n + 1, 4] and int64[B, n + 1], padded at the end.
        counts: number of boxes of each image.
        alpha, gamma: of the focal loss, whose difference between object and background is the cost of a class.
    """
    from scipy.optimize import linear_sum_assignment

    wanted, labels = wanted[:, None, None, :-1], labels[:, None, None, :-1]  # [B, 1, 1, n, 4] and [B, 1, 1, n]
    # The matching would raise for what is not finite. The step's loss is not finite then, which the run reports.
    chances = logits.nan_to_num().sigmoid()
    chances = chances.gather(3, labels.expand(*chances.shape[:3], -1))
    boxes = boxes.nan_to_num(0)[..., None, :]  # [B, O, Q, 1, 4]
    hit = alpha * (1 - chances) ** gamma * -(chances + 1e-8).log()
    doubt = (1 - alpha) * chances**gamma * -(1 - chances + 1e-8).log()
    _, generalised = overlaps(box_convert(boxes, "cxcywh", "xyxy"), box_convert(wanted, "cxcywh", "xyxy"))
    costs = bbox_cost * (boxes - wanted).abs().sum(-1) + class_cost * (hit - doubt) - giou_cost * generalised
    largest = torch.finfo(costs.dtype).max
    costs = costs.nan_to_num(largest, largest, largest).cpu()
    result = torch.full(logits.shape[:3], -1)
    for image, count in enumerate(counts):
        for output, cost in enumerate(costs[image, :, :, :count]):
            query, box = linear_sum_assignment(cost)
            result[image, output, query] = torch.from_numpy(box)
    return to_device(result, logits.device)


def in_crowds(boxes: Tensor, regions: Tensor) -> Tensor:
    """bool[B, O, Q]: True if the centre of a box [B, O, Q, 4] is in one of the regions [B, m, 4] (corners)."""
    centres = boxes[..., None, :2]
    return ((centres >= regions[:, None, None, :, :2]) & (centres <= regions[:, None, None, :, 2:])).all(-1).any(-1)


def pair(match: Tensor, found: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Found and wanted boxes [B, O, Q, 4], and their intersection over union [B, O, Q], plain and generalised.

    A query without a box gets the same box twice, for a loss of zero: to leave it out by an index would make the host wait.

    Args:
        match: int64[B, O, Q] index of a box, or -1.
        found, boxes: [B, O, Q, 4] and, padded at the end, [B, n + 1, 4] (centre x, centre y, width, height in 0..1).
    """
    matched, rows = (match >= 0)[..., None], torch.arange(len(match), device=match.device)[:, None, None]
    whole = filled((0.5, 0.5, 1, 1), boxes)
    wanted, found = torch.where(matched, boxes[rows, match], whole), torch.where(matched, found, whole)
    return found, wanted, *overlaps(box_convert(found, "cxcywh", "xyxy"), box_convert(wanted, "cxcywh", "xyxy"))


def hits(match: Tensor, labels: Tensor, classes: int) -> Tensor:
    """bool[B, O, Q, classes]: the class of each query's box; `match` is int64[B, O, Q], `labels` int64[B, n + 1]."""
    rows = torch.arange(len(match), device=match.device)[:, None, None]
    hit = labels[rows, match][..., None] == torch.arange(classes, device=labels.device)
    return hit & (match >= 0)[..., None]


def best_pairs(logits: Tensor, boxes: Tensor, images: Tensor) -> list[dict[str, Tensor]]:
    """The best pairs of a query and a class of each image, with the probability of the class as score, best first.

    There are as many as queries, as image processors of transformers select them.

    Args:
        logits, boxes: [B, Q, K] and [B, Q, 4] (centre x, centre y, width, height in 0..1).
        images: [B, 3, H, W]; the boxes that are returned are in pixels of their canvas.
    """
    number, classes = logits.shape[1:]
    scores, places = logits.sigmoid().flatten(1).topk(number)
    boxes = box_convert(boxes, "cxcywh", "xyxy") * _extent(images)
    return [
        {"boxes": of_image[place // classes], "scores": best, "labels": place % classes}
        for of_image, best, place in zip(boxes, scores, places, strict=True)
    ]


def _extent(images: Tensor) -> Tensor:
    """[4] width, height, width, height of the canvas."""
    return filled(images.shape[:1:-1] * 2, images)
