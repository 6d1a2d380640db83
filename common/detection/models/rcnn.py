"""Faster R-CNN: two stages, proposals and boxes. Mask R-CNN adds a mask for each box."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import project_masks_on_boxes
from torchvision.ops import MultiScaleRoIAlign

from common.detection.models.anchors import draws_of, match, sample
from common.detection.models.boxes import BoxCoder, filled
from common.detection.models.fpn import Backbone
from common.detection.models.postprocessing import Suppressing
from common.detection.models.rpn import RegionProposalNetwork
from common.detection.models.spec import DetectorSpec
from common.randomness import key_of, mix


class FasterRCNN(Suppressing):
    """Two-stage detector.

    Matching and losses are torchvision's, as are the names of the parameters: its `FasterRCNN` loads them. Different here:
    anchors and proposals are sampled by an image's position in the stream, and losses are divided by the constants 256 and
    512 instead of the numbers really sampled, which are known only after the forward. Inside, class 0 is background.
    Source: Ren et al. 2015, "Faster R-CNN" (arXiv:1506.01497).
    """

    levels, coarser = (2, 6), "subsampling"  # defaults of the feature pyramid
    drawn, foreground_share = 512, 0.25  # proposals to learn from in an image
    iou = 0.5
    nms_threshold, least_side = 0.5, 1e-2

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__(backbone, spec.classes)
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
        self.box_pool = MultiScaleRoIAlign([str(level) for level in self.pooled], output_size=7, sampling_ratio=2)
        self.coder = BoxCoder((10.0, 10.0, 5.0, 5.0))

    def losses(self, images: Tensor, targets: list[dict], totals: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The proposals' losses, cross-entropy of classes and smooth distance of encoded boxes: [B] each."""
        canvas = filled(images.shape[:1:-1], targets[0]["labels"])  # width, height
        features = self.backbone(images)
        outputs = self.rpn(features, images.shape[2:])
        with torch.autocast(images.device.type, enabled=False):
            terms = self.rpn.losses(outputs, targets, canvas, self.seed)
            proposals = self.rpn.select(outputs, images.shape[2:], [one.get("size", canvas) for one in targets])
            drawn = [
                self._draw(*some, len(outputs[2]), one, canvas) for some, one in zip(proposals, targets, strict=True)
            ]
        logits, deltas = self._predict(features, [one["places"] for one in drawn], images.shape[2:])
        with torch.autocast(images.device.type, enabled=False):
            lengths = [len(one["places"]) for one in drawn]
            parts = [
                self._box_losses(*some)
                for some in zip(logits.split(lengths), deltas.split(lengths), drawn, strict=True)
            ]
            terms |= {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        terms |= self._mask_losses(features, images.shape[2:], targets, drawn)
        terms = {name: term / totals[0].to(term.dtype) for name, term in terms.items()}
        return sum(terms.values()), terms

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """Scores are class probabilities."""
        features = self.backbone(images)
        outputs = self.rpn(features, images.shape[2:])
        with torch.autocast(images.device.type, enabled=False):
            proposals = [boxes for boxes, _ in self.rpn.select(outputs, images.shape[2:], list(sizes))]
        logits, deltas = self._predict(features, proposals, images.shape[2:])
        lengths = [boxes.shape[0] for boxes in proposals]
        found = []
        with torch.autocast(images.device.type, enabled=False):
            parts = zip(logits.split(lengths), deltas.split(lengths), proposals, sizes, strict=True)
            for scores, delta, places, size in parts:
                boxes = self.coder.decode_single(delta, places).view(-1, self.classes + 1, 4)[:, 1:].reshape(-1, 4)
                scores = scores.softmax(1)[:, 1:]
                labels = torch.arange(self.classes, device=scores.device).expand_as(scores).flatten()
                found.append(self.best_of(boxes, scores.flatten(), labels, size))
        return self._add_masks(features, images.shape[2:], found)

    def _predict(self, features: list[Tensor], places: list[Tensor], canvas: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Class logits [R, 1 + K] and deltas [R, 4 (1 + K)] of all places, in full precision."""
        pooled = self._pool(self.box_pool, features, places, canvas)
        logits, deltas = self.roi_heads["box_predictor"](self.roi_heads["box_head"](pooled))
        dtype = self.rpn.head.cls_logits.weight.dtype
        return logits.to(dtype), deltas.to(dtype)

    def _pool(self, pool: nn.Module, features: list[Tensor], places: list[Tensor], canvas: tuple[int, int]) -> Tensor:
        """Features at the places of all images: [R, width, size, size], in the precision of the places."""
        named = {str(level): x.to(places[0].dtype) for level, x in zip(self.pooled, features, strict=False)}
        with torch.autocast(places[0].device.type, enabled=False):
            return pool(named, places, [tuple(canvas)] * len(places))

    def _draw(self, boxes: Tensor, anchors: Tensor, after: int, target: dict, canvas: Tensor) -> dict[str, Tensor]:
        """Sampled proposals [k, 4] of one image, their matches, and whether each counts.

        The target's own boxes are proposals, too. A proposal has the random number of its anchor, so that the sample does
        not depend on the order of nearly equal scores.
        """
        own = target["boxes"].to(boxes.dtype)
        ids = torch.cat([anchors, after + torch.arange(len(own), device=boxes.device)])
        places = torch.cat([boxes, own])
        boxes, which, foreground, ignored = match(
            places, target, canvas, foreground_iou=self.iou, background_iou=self.iou
        )
        draw = draws_of(ids, int(mix(target["position"], key_of(self.seed, "proposals"))))
        chosen, valid = sample(foreground, ~foreground & ~ignored, draw, self.drawn, self.foreground_share)
        places, which, foreground = places[chosen], which[chosen], foreground[chosen] & valid
        labels = torch.where(foreground, F.pad(target["labels"], (0, 1))[which] + 1, 0)
        boxes = torch.where(foreground[:, None], boxes[chosen], places)
        return {"places": places, "boxes": boxes, "labels": labels, "which": which, "valid": valid}

    def _box_losses(self, logits: Tensor, deltas: Tensor, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        """Losses of one image."""
        labels, places = drawn["labels"], drawn["places"]
        classification = F.cross_entropy(logits, labels, reduction="none") * drawn["valid"]
        of_label = deltas.view(len(labels), -1, 4)[torch.arange(len(labels), device=labels.device), labels]
        wanted = self.coder.encode_single(drawn["boxes"], places)
        distance = F.smooth_l1_loss(of_label, wanted, beta=1 / 9, reduction="none").sum(1) * (labels > 0)
        return {"class": classification.sum() / self.drawn, "box": distance.sum() / self.drawn}

    def _mask_losses(
        self, features: list[Tensor], canvas: tuple[int, int], targets: list[dict], drawn: list[dict]
    ) -> dict[str, Tensor]:
        """Overridden by Mask R-CNN."""
        return {}

    def _add_masks(self, features: list[Tensor], canvas: tuple[int, int], found: list[dict]) -> list[dict]:
        """Overridden by Mask R-CNN."""
        return found


class MaskRCNN(FasterRCNN):
    """Faster R-CNN with a mask for each box. Targets need masks, uint8[n, H, W] on the canvas.

    The mask loss of an image is the mean over its foreground proposals and their pixels, divided by
    the images of the global batch (torchvision divides by the foreground proposals of the batch,
    known only after the forward).
    Source: He et al. 2017, "Mask R-CNN" (arXiv:1703.06870).
    """

    mask_size = 28

    def __init__(self, backbone: Backbone, spec: DetectorSpec) -> None:
        super().__init__(backbone, spec)
        width = spec.mask_width
        norm = nn.BatchNorm2d if self.is_second else None
        self.roi_heads["mask_head"] = MaskRCNNHeads(backbone.width, (width,) * 4, 1, norm)
        self.roi_heads["mask_predictor"] = MaskRCNNPredictor(width, width, spec.classes + 1)
        names = [str(level) for level in self.pooled]
        self.mask_pool = MultiScaleRoIAlign(names, output_size=self.mask_size // 2, sampling_ratio=2)

    def _mask_losses(
        self, features: list[Tensor], canvas: tuple[int, int], targets: list[dict], drawn: list[dict]
    ) -> dict[str, Tensor]:
        limit = int(self.drawn * self.foreground_share)  # foreground comes first in the sample
        places, labels, which = ([one[key][:limit] for one in drawn] for key in ("places", "labels", "which"))
        logits = self._mask_logits(features, places, labels, canvas)
        costs = []
        with torch.autocast(logits.device.type, enabled=False):
            for of_image, target, *rest in zip(
                logits.split([len(one) for one in places]), targets, places, labels, which, strict=True
            ):
                boxes, label, index = rest
                masks = F.pad(target["masks"], (0, 0, 0, 0, 0, 1))  # an empty one at the end, for images without masks
                wanted = project_masks_on_boxes(masks, boxes, index, self.mask_size)
                cost = F.binary_cross_entropy_with_logits(of_image, wanted, reduction="none").mean((1, 2))
                foreground = label > 0
                costs.append((cost * foreground).sum() / foreground.sum().clamp(min=1))
        return {"mask": torch.stack(costs)}

    def _add_masks(self, features: list[Tensor], canvas: tuple[int, int], found: list[dict]) -> list[dict]:
        """Add masks [n, 28, 28] in 0..1 on the grids of their boxes, for `paste_masks_in_image`."""
        places, labels = [one["boxes"] for one in found], [one["labels"] + 1 for one in found]
        masks = self._mask_logits(features, places, labels, canvas).sigmoid().split([one.shape[0] for one in places])
        return [one | {"masks": mask} for one, mask in zip(found, masks, strict=True)]

    def _mask_logits(
        self, features: list[Tensor], places: list[Tensor], labels: list[Tensor], canvas: tuple[int, int]
    ) -> Tensor:
        """Mask logits [R, 28, 28] of all places, each for its class 1..K, not in half precision."""
        pooled = self._pool(self.mask_pool, features, places, canvas)
        logits = self.roi_heads["mask_predictor"](self.roi_heads["mask_head"](pooled))
        labels = torch.cat(labels)
        return logits[torch.arange(labels.shape[0], device=labels.device), labels].to(pooled.dtype)
