"""Mask R-CNN: Faster R-CNN with a mask for each box."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import project_masks_on_boxes
from torchvision.ops import MultiScaleRoIAlign

from common.detection.models.fpn import Backbone
from common.detection.models.rcnn import FasterRCNN
from common.detection.models.spec import DetectorSpec


class MaskRCNN(FasterRCNN):
    """Faster R-CNN with a mask for each box. Targets need masks, uint8[n, H, W] of 0 and 1 on the canvas.

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
        """Add masks [n, 28, 28] in 0..1, each on the grid of its box; see torchvision's `paste_masks_in_image`."""
        places, labels = [one["boxes"] for one in found], [one["labels"] + 1 for one in found]
        masks = self._mask_logits(features, places, labels, canvas).sigmoid().split([one.shape[0] for one in places])
        return [one | {"masks": mask} for one, mask in zip(found, masks, strict=True)]

    def _mask_logits(
        self, features: list[Tensor], places: list[Tensor], labels: list[Tensor], canvas: tuple[int, int]
    ) -> Tensor:
        """Mask logits [R, 28, 28] of the places of all images, for the class 1..K of each, not in half precision."""
        pooled = self._pool(self.mask_pool, features, places, canvas)
        logits = self.roi_heads["mask_predictor"](self.roi_heads["mask_head"](pooled))
        labels = torch.cat(labels)
        return logits[torch.arange(labels.shape[0], device=labels.device), labels].to(pooled.dtype)
