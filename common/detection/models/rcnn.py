"""Faster R-CNN: proposals, then boxes. Mask R-CNN adds a mask for each box."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import (
    FastRCNNConvFCHead,
    FastRCNNPredictor,
    TwoMLPHead,
)
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import project_masks_on_boxes
from torchvision.models.detection.rpn import RPNHead, concat_box_prediction_layers
from torchvision.ops import MultiScaleRoIAlign

from common.detection.models.anchors import (
    Anchors,
    Matches,
    draw_integers,
    match_boxes,
    sample_balanced,
)
from common.detection.models.boxes import (
    BoxCoder,
    apply_nms,
    build_tensor,
    clip_boxes,
    disable_autocast,
)
from common.detection.models.detector import NMSDetector
from common.detection.models.fpn import Backbone
from common.detection.models.spec import DetectorSpec
from common.randomness import key_of, mix

_MASK_SIZE = 28  # cells on each side of a box's mask


class RPNOutputs(NamedTuple):
    """Outputs of a region proposal network for B images with P anchors each."""

    objectness: Tensor  # [B, P] logits
    deltas: Tensor  # [B, P, 4]
    anchors: Tensor  # [P, 4]


class Proposals(NamedTuple):
    """Proposals of one image, best first."""

    boxes: Tensor  # [n, 4]
    anchor_ids: Tensor  # int64[n] indices of the anchors that they come from


class RegionProposalNetwork(nn.Module):
    """Region proposal network on a feature pyramid; parameters are named as torchvision's."""

    num_samples = 256  # anchors to learn from in an image
    foreground_share = 0.5
    foreground_iou = 0.7
    background_iou = 0.3
    train_top_n = 2000  # proposals of each level, and in all
    eval_top_n = 1000
    nms_threshold = 0.7
    min_side = 1e-3  # of a proposal, in pixels
    decimals = 8  # of a logit

    def __init__(self, backbone: Backbone, convolutions: int = 1) -> None:
        super().__init__()
        self.anchors = Anchors(backbone, scales=(8,))
        self.head = RPNHead(backbone.width, self.anchors.num_per_cell, convolutions)
        self.coder = BoxCoder((1.0, 1.0, 1.0, 1.0))

    def forward(self, features: list[Tensor], canvas: Sequence[int]) -> RPNOutputs:
        """Outputs in full precision."""
        objectness, deltas = self.head(features)
        num_images = len(features[0])
        dtype = self.head.cls_logits.weight.dtype
        objectness, deltas = concat_box_prediction_layers(objectness, deltas)
        with disable_autocast(deltas):
            return RPNOutputs(
                objectness.to(dtype).view(num_images, -1),
                deltas.to(dtype).view(num_images, -1, 4),
                self.anchors(canvas, dtype, deltas.device),
            )

    def compute_losses(
        self,
        outputs: RPNOutputs,
        targets: list[dict],
        canvas_size: Tensor,
        seed: int,
    ) -> dict[str, Tensor]:
        """Compute cross-entropy of objectness and smooth distance of encoded boxes: [B] each.

        `canvas_size` is int64[2]: width, height.
        """
        objectness_losses = []
        box_losses = []
        anchors = outputs.anchors
        anchor_ids = torch.arange(len(anchors), device=anchors.device)
        for logits, deltas, target in zip(outputs.objectness, outputs.deltas, targets, strict=True):
            matches = match_boxes(
                anchors,
                target,
                canvas_size,
                foreground_iou=self.foreground_iou,
                background_iou=self.background_iou,
                allow_low_quality=True,
            )
            key = int(mix(target["position"], key_of(seed, "anchors")))
            random = draw_integers(anchor_ids, key)
            objectness_loss, box_loss = self._compute_image_losses(
                logits, deltas, anchors, matches, random
            )
            objectness_losses.append(objectness_loss)
            box_losses.append(box_loss)
        return {
            "objectness": torch.stack(objectness_losses),
            "proposal_box": torch.stack(box_losses),
        }

    def _compute_image_losses(
        self,
        logits: Tensor,
        deltas: Tensor,
        anchors: Tensor,
        matches: Matches,
        random: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses of objectness and of boxes of one image, from samples of its anchors."""
        indices, valid = sample_balanced(
            matches.foreground,
            ~matches.foreground & ~matches.ignored,
            random,
            self.num_samples,
            self.foreground_share,
        )
        logits = logits[indices]
        anchors = anchors[indices]
        foreground = matches.foreground[indices]
        objectness_losses = F.binary_cross_entropy_with_logits(
            logits, foreground.to(logits.dtype), reduction="none"
        )
        boxes = torch.where(foreground[:, None], matches.boxes[indices], anchors)
        box_losses = _compute_smooth_l1(deltas[indices], self.coder.encode_single(boxes, anchors))
        return (
            (objectness_losses * valid).sum() / self.num_samples,
            (box_losses * (foreground & valid)).sum() / self.num_samples,
        )

    @torch.no_grad()
    def select_proposals(
        self,
        outputs: RPNOutputs,
        canvas: Sequence[int],
        sizes: list[Tensor],
    ) -> list[Proposals]:
        """Select proposals of each image within its true size [2] (width, height).

        Logits are rounded first: rounding errors depend on the micro-batch and must not decide.
        """
        objectness = outputs.objectness.round(decimals=self.decimals)
        top_n = self.train_top_n if self.training else self.eval_top_n
        num_per_level = self.anchors.count_per_level(canvas)
        level_candidates = []
        level_ids = []
        first_anchor = 0
        for i, level in enumerate(objectness.split(num_per_level, 1)):
            order = level.sort(dim=1, descending=True, stable=True).indices
            top = order[:, :top_n]
            level_candidates.append(top + first_anchor)
            level_ids.append(torch.full_like(top[0], i))
            first_anchor += num_per_level[i]
        levels = torch.cat(level_ids)
        candidates = torch.cat(level_candidates, 1)  # [B, C] indices of anchors

        proposals = []
        for anchor_ids, logits, deltas, size in zip(
            candidates, objectness, outputs.deltas, sizes, strict=True
        ):
            boxes = self.coder.decode_single(deltas[anchor_ids], outputs.anchors[anchor_ids])
            boxes = clip_boxes(boxes, size)
            scores = logits[anchor_ids].sigmoid()
            keep = self._suppress_proposals(boxes, scores, levels)[:top_n]
            proposals.append(Proposals(boxes[keep], anchor_ids[keep]))
        return proposals

    def _suppress_proposals(self, boxes: Tensor, scores: Tensor, levels: Tensor) -> Tensor:
        """Indices, best first, of boxes [C, 4] that are large enough and not suppressed.

        To leave out small boxes before, the host would wait for their number. They become equal
        boxes of the lowest score, and so does one more at the end: suppression leaves one of them,
        as the last.
        """
        is_large = ((boxes[:, 2:] - boxes[:, :2]) >= self.min_side).all(1)
        is_large = F.pad(is_large, (0, 1))
        unit_box = build_tensor((0, 0, 1, 1), like=boxes)
        boxes = torch.where(is_large[:, None], F.pad(boxes, (0, 0, 0, 1)), unit_box)
        scores = torch.where(is_large, F.pad(scores, (0, 1)), -1)
        levels = torch.where(is_large, F.pad(levels, (0, 1)), -1)
        return apply_nms(boxes, scores, levels, self.nms_threshold)[:-1]


class _Samples(NamedTuple):
    """Proposals to learn from, of one image; foreground comes first."""

    proposals: Tensor  # [k, 4]
    boxes: Tensor  # [k, 4] that they are matched with, or themselves
    labels: Tensor  # int64[k] 0 is background
    indices: Tensor  # int64[k] of the boxes in their image
    valid: Tensor  # bool[k] False for surplus ones


class FasterRCNN(NMSDetector):
    """Two-stage detector.

    Matching, losses and names of parameters are torchvision's: its `FasterRCNN` loads them.
    Different here: anchors and proposals are sampled by an image's position in the stream, and
    losses are divided by the constants 256 and 512, since the numbers of samples are known too late.
    Inside, class 0 is background. Source: Ren et al. 2015, "Faster R-CNN" (arXiv:1506.01497).
    """

    levels = (2, 6)
    coarser = "subsampling"
    num_samples = 512  # proposals to learn from in an image
    foreground_share = 0.25
    foreground_iou = 0.5
    has_masks = False
    nms_threshold = 0.5
    min_side = 1e-2

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__(backbone, spec)
        self.seed = spec.seed
        self.is_v2 = spec.variant == "torchvision_v2"
        self.rpn = RegionProposalNetwork(backbone, convolutions=2 if self.is_v2 else 1)
        width = backbone.width
        if self.is_v2:
            box_head = FastRCNNConvFCHead((width, 7, 7), [width] * 4, [spec.hidden], nn.BatchNorm2d)
        else:
            box_head = TwoMLPHead(width * 7**2, spec.hidden)
        predictor = FastRCNNPredictor(spec.hidden, spec.num_classes + 1)
        self.roi_heads = nn.ModuleDict({"box_head": box_head, "box_predictor": predictor})
        self.pooled_maps = [str(level) for level in backbone.levels if 2**level <= backbone.stride]
        self.box_pool = MultiScaleRoIAlign(self.pooled_maps, output_size=7, sampling_ratio=2)
        self.coder = BoxCoder((10.0, 10.0, 5.0, 5.0))
        if self.has_masks:
            mask_width = spec.mask_width
            norm = nn.BatchNorm2d if self.is_v2 else None
            self.roi_heads["mask_head"] = MaskRCNNHeads(width, (mask_width,) * 4, 1, norm)
            self.roi_heads["mask_predictor"] = MaskRCNNPredictor(
                mask_width, mask_width, spec.num_classes + 1
            )
            self.mask_pool = MultiScaleRoIAlign(
                self.pooled_maps, output_size=_MASK_SIZE // 2, sampling_ratio=2
            )

    def compute_terms(
        self,
        images: Tensor,
        targets: list[dict],
        totals: Tensor,
    ) -> dict[str, Tensor]:
        """The proposals' losses, cross-entropy of classes and smooth distance of encoded boxes."""
        canvas = images.shape[2:]
        canvas_size = build_tensor(images.shape[:1:-1], like=targets[0]["labels"])
        features = self.backbone(images)
        outputs = self.rpn(features, canvas)
        with disable_autocast(images):
            terms = self.rpn.compute_losses(outputs, targets, canvas_size, self.seed)
            sizes = [target.get("size", canvas_size) for target in targets]
            proposals = self.rpn.select_proposals(outputs, canvas, sizes)
            num_anchors = len(outputs.anchors)
            samples = []
            for image_proposals, target in zip(proposals, targets, strict=True):
                samples.append(
                    self._sample_proposals(image_proposals, num_anchors, target, canvas_size)
                )
        logits, deltas = self._predict(features, [x.proposals for x in samples], canvas)
        with disable_autocast(images):
            terms |= self._compute_box_losses(logits, deltas, samples)
        if self.has_masks:
            terms["mask"] = self._compute_mask_loss(features, canvas, targets, samples)
        return {name: term / totals[0].to(term.dtype) for name, term in terms.items()}

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """Scores are class probabilities."""
        canvas = images.shape[2:]
        features = self.backbone(images)
        outputs = self.rpn(features, canvas)
        with disable_autocast(images):
            proposals = self.rpn.select_proposals(outputs, canvas, list(sizes))
        proposal_boxes = [x.boxes for x in proposals]
        logits, deltas = self._predict(features, proposal_boxes, canvas)
        with disable_autocast(images):
            arguments = zip(
                _split_by_image(logits, proposal_boxes),
                _split_by_image(deltas, proposal_boxes),
                proposal_boxes,
                sizes,
                strict=True,
            )
            detections = [self._detect_in_image(*args) for args in arguments]
        if self.has_masks:
            return self._add_masks(features, canvas, detections)
        return detections

    def _detect_in_image(
        self,
        logits: Tensor,
        deltas: Tensor,
        proposals: Tensor,
        size: Tensor,
    ) -> dict[str, Tensor]:
        """As `select_detections`, from logits [n, 1 + K] and deltas [n, 4 (1 + K)] of proposals."""
        boxes = self.coder.decode_single(deltas, proposals)
        boxes = boxes.view(-1, self.num_classes + 1, 4)[:, 1:].reshape(-1, 4)
        scores = logits.softmax(1)[:, 1:]
        labels = torch.arange(self.num_classes, device=scores.device).expand_as(scores)
        return self.select_detections(boxes, scores.flatten(), labels.flatten(), size)

    def _predict(
        self,
        features: list[Tensor],
        boxes: list[Tensor],
        canvas: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Predict class logits [R, 1 + K] and deltas [R, 4 (1 + K)] of all boxes, in full precision."""
        pooled = self._pool(self.box_pool, features, boxes, canvas)
        logits, deltas = self.roi_heads["box_predictor"](self.roi_heads["box_head"](pooled))
        dtype = self.rpn.head.cls_logits.weight.dtype
        return logits.to(dtype), deltas.to(dtype)

    def _pool(
        self,
        pool: nn.Module,
        features: list[Tensor],
        boxes: list[Tensor],
        canvas: Sequence[int],
    ) -> Tensor:
        """Pool features in boxes of all images: [R, width, size, size], in the precision of the boxes."""
        maps = {}
        for name, x in zip(self.pooled_maps, features, strict=False):
            maps[name] = x.to(boxes[0].dtype)
        with disable_autocast(boxes[0]):
            return pool(maps, boxes, [tuple(canvas)] * len(boxes))

    def _sample_proposals(
        self,
        proposals: Proposals,
        num_anchors: int,
        target: dict,
        canvas_size: Tensor,
    ) -> _Samples:
        """Sample proposals and true boxes of one image, and match them.

        A proposal has the random number of its anchor: the order of scores does not matter.
        """
        true_boxes = target["boxes"].to(proposals.boxes.dtype)
        true_ids = num_anchors + torch.arange(len(true_boxes), device=true_boxes.device)
        ids = torch.cat([proposals.anchor_ids, true_ids])
        candidates = torch.cat([proposals.boxes, true_boxes])
        matches = match_boxes(
            candidates,
            target,
            canvas_size,
            foreground_iou=self.foreground_iou,
            background_iou=self.foreground_iou,
            allow_low_quality=False,
        )
        key = int(mix(target["position"], key_of(self.seed, "proposals")))
        indices, valid = sample_balanced(
            matches.foreground,
            ~matches.foreground & ~matches.ignored,
            draw_integers(ids, key),
            self.num_samples,
            self.foreground_share,
        )
        candidates = candidates[indices]
        foreground = matches.foreground[indices] & valid
        box_indices = matches.indices[indices]
        labels = F.pad(target["labels"], (0, 1))[box_indices] + 1
        return _Samples(
            proposals=candidates,
            boxes=torch.where(foreground[:, None], matches.boxes[indices], candidates),
            labels=torch.where(foreground, labels, 0),
            indices=box_indices,
            valid=valid,
        )

    def _compute_box_losses(
        self,
        logits: Tensor,
        deltas: Tensor,
        samples: list[_Samples],
    ) -> dict[str, Tensor]:
        """Compute the losses [B] of classes and boxes from logits and deltas of all samples."""
        proposals = [x.proposals for x in samples]
        class_losses = []
        box_losses = []
        for image_logits, image_deltas, image_samples in zip(
            _split_by_image(logits, proposals),
            _split_by_image(deltas, proposals),
            samples,
            strict=True,
        ):
            labels = image_samples.labels
            losses = F.cross_entropy(image_logits, labels, reduction="none")
            class_losses.append((losses * image_samples.valid).sum() / self.num_samples)

            rows = torch.arange(len(labels), device=labels.device)
            label_deltas = image_deltas.view(len(labels), -1, 4)[rows, labels]
            expected = self.coder.encode_single(image_samples.boxes, image_samples.proposals)
            losses = _compute_smooth_l1(label_deltas, expected)
            box_losses.append((losses * (labels > 0)).sum() / self.num_samples)
        return {"class": torch.stack(class_losses), "box": torch.stack(box_losses)}

    def _compute_mask_loss(
        self,
        features: list[Tensor],
        canvas: Sequence[int],
        targets: list[dict],
        samples: list[_Samples],
    ) -> Tensor:
        """Compute the mask loss [B], a mean over the foreground of each image."""
        max_foreground = int(self.num_samples * self.foreground_share)
        # Foreground comes first in the samples.
        boxes = [x.proposals[:max_foreground] for x in samples]
        labels = [x.labels[:max_foreground] for x in samples]
        logits = self._predict_masks(features, boxes, labels, canvas)
        losses = []
        with disable_autocast(logits):
            logits_by_image = _split_by_image(logits, boxes)
            for i, target in enumerate(targets):
                masks = F.pad(target["masks"], (0, 0, 0, 0, 0, 1))  # an empty one at the end
                indices = samples[i].indices[:max_foreground]
                expected = project_masks_on_boxes(masks, boxes[i], indices, _MASK_SIZE)
                image_losses = F.binary_cross_entropy_with_logits(
                    logits_by_image[i], expected, reduction="none"
                )
                foreground = labels[i] > 0
                total = (image_losses.mean((1, 2)) * foreground).sum()
                losses.append(total / foreground.sum().clamp(min=1))
        return torch.stack(losses)

    def _add_masks(
        self,
        features: list[Tensor],
        canvas: Sequence[int],
        detections: list[dict],
    ) -> list[dict]:
        """Add masks [n, 28, 28] in 0..1 on the grids of their boxes, for `paste_masks_in_image`."""
        boxes = [x["boxes"] for x in detections]
        labels = [x["labels"] + 1 for x in detections]
        masks = self._predict_masks(features, boxes, labels, canvas).sigmoid()
        masks_by_image = _split_by_image(masks, boxes)
        return [x | {"masks": m} for x, m in zip(detections, masks_by_image, strict=True)]

    def _predict_masks(
        self,
        features: list[Tensor],
        boxes: list[Tensor],
        labels: list[Tensor],
        canvas: Sequence[int],
    ) -> Tensor:
        """Predict mask logits [R, 28, 28] of all boxes, each for its class 1..K, in full precision."""
        pooled = self._pool(self.mask_pool, features, boxes, canvas)
        logits = self.roi_heads["mask_predictor"](self.roi_heads["mask_head"](pooled))
        label = torch.cat(labels)
        rows = torch.arange(label.shape[0], device=label.device)
        return logits[rows, label].to(pooled.dtype)


class MaskRCNN(FasterRCNN):
    """Faster R-CNN with a mask for each box. Targets need masks, uint8[n, H, W] on the canvas.

    The mask loss is a mean over an image's foreground proposals; in torchvision, over those of the
    batch. Source: He et al. 2017, "Mask R-CNN" (arXiv:1703.06870).
    """

    has_masks = True


def _split_by_image(x: Tensor, boxes: list[Tensor]) -> Sequence[Tensor]:
    """Split `x` [R, ...] into what belongs to the boxes [n, 4] of each image."""
    return x.split([image_boxes.shape[0] for image_boxes in boxes])


def _compute_smooth_l1(deltas: Tensor, expected: Tensor) -> Tensor:
    """[n]: smooth distance of encoded boxes [n, 4]."""
    return F.smooth_l1_loss(deltas, expected, beta=1 / 9, reduction="none").sum(1)
