"""The interface of detectors: losses and detections; and non-maximum suppression."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.batch_plan import BatchPlan
from common.detection.models.boxes import clip, suppress
from common.detection.models.fpn import Backbone
from common.detection.models.spec import DetectorSpec
from common.distributed.collectives import all_sum

LIMIT = 100  # detections per image, as in COCO's evaluation

Losses = tuple[Tensor, dict[str, Tensor]]  # the loss of each image [B], and its parts [B]


class Detector(nn.Module):
    """A module whose losses do not depend on how a global batch is split. Its classes are 0..K-1.

    `targets` has one dict per image: boxes [n, 4] left, top, right, bottom in pixels of the canvas;
    labels int64[n]; crowd bool[n]; position in the stream, int; if known, size int64[2], the true
    width and height on the canvas, and regions, a list of the rows that are crowd regions. n may
    be 0. Crowd regions are neither foreground nor background; other boxes inside them still count.
    """

    stride: int  # sides of the canvas are multiples of this, in pixels
    backbone: nn.Module  # the part that can be compiled; the rest breaks graphs
    pretrained_cfg: dict[str, Any]  # mean and std of its images, for pixels in 0..1
    begins_with: str  # in words, which weights were loaded
    title: str  # what the start table calls it
    limit: int = LIMIT  # most detections in an image
    # Images are stretched to squares, as for the published weights of its family.
    needs_squares = False
    forward_methods = ("detect",)  # see `common.distributed.sharding.shard_model`
    size_flag = "--short_sides"  # see `common.training.warm_up.warm_up`
    looks_ahead = True  # see `training.step.StepModule`

    def counts(self, targets: list[dict], canvas: Sequence[int]) -> Tensor:
        """int64[C]: divisors of losses, to be summed over the global batch; here the number of images."""
        return targets[0]["labels"].new_full((1,), len(targets))

    def prepare_step(
        self, step: int, batches: Sequence[Any], plan: BatchPlan, is_trial: bool
    ) -> None:
        """Give each batch its `totals` int64[C + 1]: the sum of `counts` over the global batch, and
        its number of images.

        In a trial it is the sum over these batches. See `training.step.StepModule`.
        """
        counts: Any = sum(self.counts(batch.targets, batch.images.shape[2:]) for batch in batches)
        if not is_trial:
            counts = all_sum(counts)
        for batch in batches:
            batch.totals = F.pad(counts, (0, 1), value=plan.global_batch_size)

    def describe(self) -> dict[str, str]:
        """No rows of the start table but those of every model."""
        return {}

    def compute_terms(
        self, images: Tensor, targets: list[dict], totals: Tensor
    ) -> dict[str, Tensor]:
        """The parts [B] of `losses`, by name; one of them is "class"."""
        raise NotImplementedError

    def losses(self, images: Tensor, targets: list[dict], totals: Tensor) -> Losses:
        """Losses that are already divided: their *sum* over the global batch is its loss.

        `images` [B, 3, H, W] are normalised, `totals` int64[C] is the sum of `counts` over the
        global batch. Every parameter gets a gradient, with boxes or without. The loss is the sum of
        its parts.
        """
        terms = self.compute_terms(images, targets, totals)
        return sum(terms.values(), torch.zeros_like(terms["class"])), terms

    def forward(self, images: Tensor, targets: list[dict], totals: Tensor) -> Losses:
        """As `losses`, but their *mean* is the loss; `totals` int64[C + 1] ends with the number of images."""
        losses, parts = self.losses(images, targets, totals[:-1])
        return totals[-1] * losses, {name: totals[-1] * part for name, part in parts.items()}

    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """Detections of each image, best first: boxes [n, 4] on the canvas, scores [n], labels int64[n].

        `sizes` [B, 2] are the true widths and heights of the images on the canvas [B, 3, H, W].
        """
        raise NotImplementedError


class Suppressing(Detector):
    """A detector that finds several boxes around an object, of which the best stays.

    Detections must score more than `score_threshold`. If two boxes of a class overlap by more than
    `nms_threshold` (intersection over union), only the better one stays.
    """

    levels: tuple[int, int]  # of the feature pyramid, unless the specification has others
    coarser: str  # how levels are made that the backbone does not have
    score_threshold, nms_threshold, least_side = 0.05, 0.6, 0.0

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__()
        self.backbone, self.classes, self.variant = backbone, spec.classes, spec.variant
        self.limit = max(self.limit, spec.max_detections)
        self.pretrained_cfg, self.stride = backbone.pretrained_cfg, backbone.stride

    def best_of(
        self, boxes: Tensor, scores: Tensor, labels: Tensor, size: Tensor
    ) -> dict[str, Tensor]:
        """The best detections of an image, best first: boxes [n, 4], scores [n], labels int64[n].

        They are selected from boxes [m, 4] in pixels of the canvas with a score [m] and a label [m]
        each, and clipped to `size` [2], the true width and height of the image on its canvas.
        """
        boxes = clip(boxes, size)
        good = (scores > self.score_threshold) & (
            boxes[:, 2:] - boxes[:, :2] >= self.least_side
        ).all(1)
        good = good.nonzero().squeeze(1)
        boxes, scores, labels = boxes[good], scores[good], labels[good]
        keep = suppress(boxes, scores, labels, self.nms_threshold)[: self.limit]
        return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}
