"""Faster R-CNN: proposals, then boxes. Mask R-CNN adds a mask for each box."""

from collections.abc import Sequence
from typing import ClassVar

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

from common.detection.models.anchors import Anchors, draws_of, match, sample
from common.detection.models.boxes import BoxCoder, clip, filled, full_precision, suppress
from common.detection.models.detector import Suppressing
from common.detection.models.fpn import Backbone
from common.detection.models.spec import DetectorSpec
from common.randomness import key_of, mix

_MASK = 28  # cells on each side of a box's mask


class RegionProposalNetwork(nn.Module):
    """Region proposal network on a feature pyramid; parameters are named as torchvision's."""

    drawn, foreground_share = 256, 0.5  # anchors to learn from in an image
    foreground_iou, background_iou = 0.7, 0.3
    candidates: ClassVar = {True: 2000, False: 1000}  # in training, else; per level and in all
    nms_threshold, least_side = 0.7, 1e-3
    decimals = 8  # of a logit

    def __init__(self, backbone: Backbone, convolutions: int = 1) -> None:
        super().__init__()
        self.anchors = Anchors(backbone, scales=(8,))
        self.head = RPNHead(backbone.width, self.anchors.per_cell, convolutions)
        self.coder = BoxCoder((1.0, 1.0, 1.0, 1.0))

    def forward(
        self, features: list[Tensor], canvas: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Objectness logits [B, P], deltas [B, P, 4] and anchors [P, 4], not in half precision."""
        objectness, deltas = self.head(features)
        batch, dtype = len(features[0]), self.head.cls_logits.weight.dtype
        objectness, deltas = concat_box_prediction_layers(objectness, deltas)
        with full_precision(deltas):
            anchors = self.anchors(canvas, dtype, deltas.device)
            return (
                objectness.to(dtype).view(batch, -1),
                deltas.to(dtype).view(batch, -1, 4),
                anchors,
            )

    def losses(
        self, outputs: tuple[Tensor, Tensor, Tensor], targets: list[dict], canvas: Tensor, seed: int
    ) -> dict[str, Tensor]:
        """Cross-entropy of objectness and smooth distance of encoded boxes. `canvas` [2]: width, height."""
        objectness, deltas, anchors = outputs
        terms: dict[str, list[Tensor]] = {"objectness": [], "proposal_box": []}
        places = torch.arange(len(anchors), device=anchors.device)
        for logits, delta, target in zip(objectness, deltas, targets, strict=True):
            boxes, _, foreground, ignored = match(
                anchors, target, canvas, self.foreground_iou, self.background_iou, True
            )
            draw = draws_of(places, int(mix(target["position"], key_of(seed, "anchors"))))
            chosen, valid = sample(
                foreground, ~foreground & ~ignored, draw, self.drawn, self.foreground_share
            )
            foreground = foreground[chosen]
            cost = F.binary_cross_entropy_with_logits(
                logits[chosen], foreground.to(logits.dtype), reduction="none"
            )
            wanted = torch.where(foreground[:, None], boxes[chosen], anchors[chosen])
            wanted = self.coder.encode_single(wanted, anchors[chosen])
            distance = F.smooth_l1_loss(delta[chosen], wanted, beta=1 / 9, reduction="none").sum(1)
            terms["objectness"].append((cost * valid).sum() / self.drawn)
            terms["proposal_box"].append((distance * (foreground & valid)).sum() / self.drawn)
        return {name: torch.stack(of_images) for name, of_images in terms.items()}

    @torch.no_grad()
    def select(
        self, outputs: tuple[Tensor, Tensor, Tensor], canvas: Sequence[int], sizes: list[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Proposals of each image [n, 4] within its true size, best first, and their anchors int64[n].

        Logits are rounded first: rounding errors depend on the micro-batch and must not decide.
        """
        objectness, deltas, anchors = outputs
        objectness = objectness.round(decimals=self.decimals)
        lengths, limit = self.anchors.level_lengths(canvas), self.candidates[self.training]
        ordered = [
            level.sort(dim=1, descending=True, stable=True).indices
            for level in objectness.split(lengths, 1)
        ]
        of_levels = [level[:, :limit] for level in ordered]
        starts = [sum(lengths[:place]) for place in range(len(lengths))]
        levels = torch.cat(
            [torch.full_like(chosen[0], place) for place, chosen in enumerate(of_levels)]
        )
        # [B, C]
        best = torch.cat(
            [chosen + start for chosen, start in zip(of_levels, starts, strict=True)], 1
        )
        selected = []
        for chosen, logits, delta, size in zip(best, objectness, deltas, sizes, strict=True):
            boxes = clip(self.coder.decode_single(delta[chosen], anchors[chosen]), size)
            good = ((boxes[:, 2:] - boxes[:, :2]) >= self.least_side).all(1)
            # To leave out the others, the host would wait for their number. They become equal boxes
            # of the lowest score, and so does one more at the end: suppression leaves one of them,
            # as the last.
            good, same = F.pad(good, (0, 1)), filled((0, 0, 1, 1), boxes)
            keep = suppress(
                torch.where(good[:, None], F.pad(boxes, (0, 0, 0, 1)), same),
                torch.where(good, F.pad(logits[chosen].sigmoid(), (0, 1)), -1),
                torch.where(good, F.pad(levels, (0, 1)), -1),
                self.nms_threshold,
            )[:-1][:limit]
            selected.append((boxes[keep], chosen[keep]))
        return selected


class FasterRCNN(Suppressing):
    """Two-stage detector.

    Matching, losses and names of parameters are torchvision's: its `FasterRCNN` loads them.
    Different here: anchors and proposals are sampled by an image's position in the stream, and
    losses are divided by the constants 256 and 512, since the numbers sampled are known too late.
    Inside, class 0 is background. Source: Ren et al. 2015, "Faster R-CNN" (arXiv:1506.01497).
    """

    levels, coarser = (2, 6), "subsampling"
    drawn, foreground_share = 512, 0.25  # proposals to learn from in an image
    iou, has_masks = 0.5, False
    nms_threshold, least_side = 0.5, 1e-2

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__(backbone, spec)
        self.seed, self.is_second = spec.seed, spec.variant == "torchvision_v2"
        self.rpn = RegionProposalNetwork(backbone, convolutions=2 if self.is_second else 1)
        if self.is_second:
            width = backbone.width
            box_head = FastRCNNConvFCHead((width, 7, 7), [width] * 4, [spec.hidden], nn.BatchNorm2d)
        else:
            box_head = TwoMLPHead(backbone.width * 7**2, spec.hidden)
        predictor = FastRCNNPredictor(spec.hidden, spec.classes + 1)
        self.roi_heads = nn.ModuleDict({"box_head": box_head, "box_predictor": predictor})
        self.pooled = [level for level in backbone.levels if 2**level <= backbone.stride]
        names = [str(level) for level in self.pooled]
        self.box_pool = MultiScaleRoIAlign(names, output_size=7, sampling_ratio=2)
        self.coder = BoxCoder((10.0, 10.0, 5.0, 5.0))
        if self.has_masks:
            width, norm = spec.mask_width, nn.BatchNorm2d if self.is_second else None
            self.roi_heads["mask_head"] = MaskRCNNHeads(backbone.width, (width,) * 4, 1, norm)
            self.roi_heads["mask_predictor"] = MaskRCNNPredictor(width, width, spec.classes + 1)
            self.mask_pool = MultiScaleRoIAlign(names, output_size=_MASK // 2, sampling_ratio=2)

    def compute_terms(
        self, images: Tensor, targets: list[dict], totals: Tensor
    ) -> dict[str, Tensor]:
        """The proposals' losses, cross-entropy of classes and smooth distance of encoded boxes."""
        canvas = filled(images.shape[:1:-1], targets[0]["labels"])  # width, height
        features = self.backbone(images)
        outputs = self.rpn(features, images.shape[2:])
        with full_precision(images):
            terms = self.rpn.losses(outputs, targets, canvas, self.seed)
            proposals = self.rpn.select(
                outputs, images.shape[2:], [one.get("size", canvas) for one in targets]
            )
            count, pairs = len(outputs[2]), zip(proposals, targets, strict=True)
            drawn = [self._draw(*some, count, one, canvas) for some, one in pairs]
        logits, deltas = self._predict(features, [one["places"] for one in drawn], images.shape[2:])
        with full_precision(images):
            lengths = [len(one["places"]) for one in drawn]
            columns = logits.split(lengths), deltas.split(lengths), drawn
            parts = [self._box_losses(*some) for some in zip(*columns, strict=True)]
            terms |= {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        if self.has_masks:
            terms["mask"] = self._mask_loss(features, images.shape[2:], targets, drawn)
        return {name: term / totals[0].to(term.dtype) for name, term in terms.items()}

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """Scores are class probabilities."""
        features = self.backbone(images)
        outputs = self.rpn(features, images.shape[2:])
        with full_precision(images):
            proposals = [
                boxes for boxes, _ in self.rpn.select(outputs, images.shape[2:], list(sizes))
            ]
        logits, deltas = self._predict(features, proposals, images.shape[2:])
        lengths = [boxes.shape[0] for boxes in proposals]
        found = []
        with full_precision(images):
            parts = zip(logits.split(lengths), deltas.split(lengths), proposals, sizes, strict=True)
            for scores, delta, places, size in parts:
                boxes = (
                    self.coder.decode_single(delta, places)
                    .view(-1, self.classes + 1, 4)[:, 1:]
                    .reshape(-1, 4)
                )
                scores = scores.softmax(1)[:, 1:]
                labels = (
                    torch.arange(self.classes, device=scores.device).expand_as(scores).flatten()
                )
                found.append(self.best_of(boxes, scores.flatten(), labels, size))
        return self._with_masks(features, images.shape[2:], found) if self.has_masks else found

    def _predict(
        self, features: list[Tensor], places: list[Tensor], canvas: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Class logits [R, 1 + K] and deltas [R, 4 (1 + K)] of all places, in full precision."""
        pooled = self._pool(self.box_pool, features, places, canvas)
        logits, deltas = self.roi_heads["box_predictor"](self.roi_heads["box_head"](pooled))
        dtype = self.rpn.head.cls_logits.weight.dtype
        return logits.to(dtype), deltas.to(dtype)

    def _pool(
        self, pool: nn.Module, features: list[Tensor], places: list[Tensor], canvas: Sequence[int]
    ) -> Tensor:
        """Features at places of all images: [R, width, size, size], in the precision of the places."""
        named = {
            str(level): x.to(places[0].dtype)
            for level, x in zip(self.pooled, features, strict=False)
        }
        with full_precision(places[0]):
            return pool(named, places, [tuple(canvas)] * len(places))

    def _draw(
        self, boxes: Tensor, anchors: Tensor, after: int, target: dict, canvas: Tensor
    ) -> dict[str, Tensor]:
        """Sampled proposals [k, 4] of one image and its own boxes, their matches, and if each counts.

        A proposal has the random number of its anchor: the order of scores does not matter.
        """
        own = target["boxes"].to(boxes.dtype)
        ids = torch.cat([anchors, after + torch.arange(len(own), device=boxes.device)])
        places = torch.cat([boxes, own])
        boxes, which, foreground, ignored = match(places, target, canvas, self.iou, self.iou, False)
        draw = draws_of(ids, int(mix(target["position"], key_of(self.seed, "proposals"))))
        chosen, valid = sample(
            foreground, ~foreground & ~ignored, draw, self.drawn, self.foreground_share
        )
        places, which, foreground = places[chosen], which[chosen], foreground[chosen] & valid
        labels = torch.where(foreground, F.pad(target["labels"], (0, 1))[which] + 1, 0)
        boxes = torch.where(foreground[:, None], boxes[chosen], places)
        return {"places": places, "boxes": boxes, "labels": labels, "which": which, "valid": valid}

    def _box_losses(
        self, logits: Tensor, deltas: Tensor, drawn: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Losses of one image."""
        labels, places = drawn["labels"], drawn["places"]
        classification = F.cross_entropy(logits, labels, reduction="none") * drawn["valid"]
        of_label = deltas.view(len(labels), -1, 4)[
            torch.arange(len(labels), device=labels.device), labels
        ]
        wanted = self.coder.encode_single(drawn["boxes"], places)
        distance = F.smooth_l1_loss(of_label, wanted, beta=1 / 9, reduction="none").sum(1) * (
            labels > 0
        )
        return {"class": classification.sum() / self.drawn, "box": distance.sum() / self.drawn}

    def _mask_loss(
        self, features: list[Tensor], canvas: Sequence[int], targets: list[dict], drawn: list[dict]
    ) -> Tensor:
        limit = int(self.drawn * self.foreground_share)  # foreground comes first in the sample
        places, labels, which = (
            [one[key][:limit] for one in drawn] for key in ("places", "labels", "which")
        )
        logits = self._mask_logits(features, places, labels, canvas)
        costs = []
        with full_precision(logits):
            parts = logits.split([*map(len, places)])
            for logit, target, boxes, label, index in zip(
                parts, targets, places, labels, which, strict=True
            ):
                masks = F.pad(target["masks"], (0, 0, 0, 0, 0, 1))  # an empty one at the end
                wanted = project_masks_on_boxes(masks, boxes, index, _MASK)
                cost = F.binary_cross_entropy_with_logits(logit, wanted, reduction="none").mean(
                    (1, 2)
                )
                foreground = label > 0
                costs.append((cost * foreground).sum() / foreground.sum().clamp(min=1))
        return torch.stack(costs)

    def _with_masks(
        self, features: list[Tensor], canvas: Sequence[int], found: list[dict]
    ) -> list[dict]:
        """Add masks [n, 28, 28] in 0..1 on the grids of their boxes, for `paste_masks_in_image`."""
        places, labels = [one["boxes"] for one in found], [one["labels"] + 1 for one in found]
        masks = (
            self._mask_logits(features, places, labels, canvas)
            .sigmoid()
            .split([one.shape[0] for one in places])
        )
        return [one | {"masks": mask} for one, mask in zip(found, masks, strict=True)]

    def _mask_logits(
        self,
        features: list[Tensor],
        places: list[Tensor],
        labels: list[Tensor],
        canvas: Sequence[int],
    ) -> Tensor:
        """Mask logits [R, 28, 28] of all places, each for its class 1..K, not in half precision."""
        pooled = self._pool(self.mask_pool, features, places, canvas)
        logits = self.roi_heads["mask_predictor"](self.roi_heads["mask_head"](pooled))
        label = torch.cat(labels)
        return logits[torch.arange(label.shape[0], device=label.device), label].to(pooled.dtype)


class MaskRCNN(FasterRCNN):
    """Faster R-CNN with a mask for each box. Targets need masks, uint8[n, H, W] on the canvas.

    The mask loss is a mean over an image's foreground proposals; in torchvision, over those of the
    batch. Source: He et al. 2017, "Mask R-CNN" (arXiv:1703.06870).
    """

    has_masks = True
