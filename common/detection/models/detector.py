"""The interface of detectors: losses and detections; and non-maximum suppression."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.batch_plan import BatchPlan
from common.detection.models.boxes import apply_nms, clip_boxes
from common.detection.models.fpn import Backbone
from common.detection.models.spec import DetectorSpec
from common.distributed.collectives import all_sum

Losses = tuple[Tensor, dict[str, Tensor]]  # the loss of each image [B], and its terms [B] by name


class Detector(nn.Module):
    """A module whose losses do not depend on how a global batch is split. Its classes are 0..K-1.

    `targets` has one dict per image: boxes [n, 4] left, top, right, bottom in pixels of the canvas;
    labels int64[n]; crowd bool[n]; position in the stream, int; if they are known, size int64[2], the
    true width and height on the canvas, and regions, a list of the indices of crowd regions. n may
    be 0. Crowd regions are neither foreground nor background; other boxes inside them still count.
    """

    stride: int  # sides of the canvas are multiples of this, in pixels
    backbone: nn.Module  # the part that can be compiled; the rest breaks graphs
    pretrained_cfg: dict[str, Any]  # mean and std of its images, for pixels in 0..1
    weights_summary: str  # which weights were loaded, as text
    title: str  # what the start table calls the detector
    limit: int = 100  # largest number of detections in an image; COCO's evaluation takes 100
    # Images are stretched to squares, as for the published weights of its family.
    needs_squares = False
    forward_methods = ("detect",)  # see `common.distributed.sharding.shard_model`
    size_flag = "--short_sides"  # see `common.training.warm_up.warm_up`
    needs_whole_step = True  # see `training.step.StepModule`

    def count_divisors(self, targets: list[dict], canvas: Sequence[int]) -> Tensor:
        """Count int64[C], summed over the global batch the divisors of losses; here the images."""
        return targets[0]["labels"].new_full((1,), len(targets))

    def prepare_step(
        self,
        step: int,
        batches: Sequence[Any],
        plan: BatchPlan,
        is_trial: bool,
    ) -> None:
        """Set each batch's `totals` int64[C + 1]: divisors of the global batch, and its number of images.

        In a trial, the divisors are those of these batches. See `training.step.StepModule`.
        """
        divisors: Any = 0
        for batch in batches:
            divisors = divisors + self.count_divisors(batch.targets, batch.images.shape[2:])
        if not is_trial:
            divisors = all_sum(divisors)
        for batch in batches:
            batch.totals = F.pad(divisors, (0, 1), value=plan.global_batch_size)

    def describe(self) -> dict[str, str]:
        """Rows of the start table, beside those of every model."""
        return {}

    def compute_terms(
        self,
        images: Tensor,
        targets: list[dict],
        totals: Tensor,
    ) -> dict[str, Tensor]:
        """Compute the terms [B] of `compute_losses`, by name; one of them is "class"."""
        raise NotImplementedError

    def compute_losses(self, images: Tensor, targets: list[dict], totals: Tensor) -> Losses:
        """Compute losses that are already divided: their *sum* over the global batch is its loss.

        `images` [B, 3, H, W] are normalised, `totals` int64[C] is the sum of `count_divisors` over
        the global batch. Every parameter gets a gradient, with boxes or without. The loss is the sum
        of its terms.
        """
        terms = self.compute_terms(images, targets, totals)
        losses = sum(terms.values(), torch.zeros_like(terms["class"]))
        return losses, terms

    def forward(self, images: Tensor, targets: list[dict], totals: Tensor) -> Losses:
        """As `compute_losses`, but the *mean* of the losses is the global batch's loss.

        `totals` int64[C + 1] ends with the number of images.
        """
        losses, terms = self.compute_losses(images, targets, totals[:-1])
        num_images = totals[-1]
        scaled_terms = {name: num_images * term for name, term in terms.items()}
        return num_images * losses, scaled_terms

    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """Detections of each image, best first: boxes [n, 4] on the canvas, scores [n], labels int64[n].

        `sizes` [B, 2] are the true widths and heights of the images on the canvas [B, 3, H, W].
        """
        raise NotImplementedError


class NMSDetector(Detector):
    """A detector with non-maximum suppression: of several boxes around an object, the best one stays.

    Detections must score more than `score_threshold`. If two boxes of a class overlap by more than
    `nms_threshold` (intersection over union), only the better one stays.
    """

    levels: tuple[int, int]  # of the feature pyramid, unless the specification has others
    coarser: str  # how levels are made that the backbone does not have
    score_threshold = 0.05
    nms_threshold = 0.6
    min_side = 0.0  # of a box, in pixels of the canvas

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_classes = spec.num_classes
        self.variant = spec.variant
        self.limit = max(self.limit, spec.max_detections)
        self.pretrained_cfg = backbone.pretrained_cfg
        self.stride = backbone.stride

    def select_detections(
        self,
        boxes: Tensor,
        scores: Tensor,
        labels: Tensor,
        size: Tensor,
    ) -> dict[str, Tensor]:
        """Select the best detections of an image, best first: boxes [n, 4], scores [n], labels int64[n].

        They are selected from boxes [m, 4] in pixels of the canvas with a score [m] and a label [m]
        each, and clipped to `size` [2], the true width and height of the image on its canvas.
        """
        boxes = clip_boxes(boxes, size)
        is_large = (boxes[:, 2:] - boxes[:, :2] >= self.min_side).all(1)
        is_valid = (scores > self.score_threshold) & is_large
        indices = is_valid.nonzero().squeeze(1)
        boxes = boxes[indices]
        scores = scores[indices]
        labels = labels[indices]
        keep = apply_nms(boxes, scores, labels, self.nms_threshold)[: self.limit]
        return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}
