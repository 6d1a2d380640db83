"""Region proposal network: where in an image there may be an object of any class."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.rpn import RPNHead, concat_box_prediction_layers

from common.detection.models.anchors import Anchors, draws_of, match, sample
from common.detection.models.boxes import BoxCoder, filled, suppress
from common.detection.models.fpn import Backbone
from common.detection.models.postprocessing import clip
from common.randomness import key_of, mix


class RegionProposalNetwork(nn.Module):
    """The region proposal network of Faster R-CNN on a feature pyramid; parameters are named as torchvision's.

    The anchors to learn from are sampled by the image's position in the stream. Each image's losses
    are divided by a constant, the largest number of anchors that are sampled.
    Source: Ren et al. 2015, "Faster R-CNN" (arXiv:1506.01497).
    """

    drawn, foreground_share = 256, 0.5  # anchors to learn from in an image
    foreground_iou, background_iou = 0.7, 0.3
    candidates: ClassVar = {True: 2000, False: 1000}  # per level and after suppression; in training, and otherwise
    nms_threshold, least_side = 0.7, 1e-3
    decimals = 8  # of a logit

    def __init__(self, backbone: Backbone, convolutions: int = 1) -> None:
        super().__init__()
        self.anchors = Anchors(backbone, scales=(8,))
        self.head = RPNHead(backbone.width, self.anchors.per_cell, convolutions)
        self.coder = BoxCoder((1.0, 1.0, 1.0, 1.0))

    def forward(self, features: list[Tensor], canvas: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Objectness logits [B, P], deltas [B, P, 4] and anchors [P, 4], not in half precision."""
        objectness, deltas = self.head(features)
        batch, dtype = len(features[0]), self.head.cls_logits.weight.dtype
        objectness, deltas = concat_box_prediction_layers(objectness, deltas)
        with torch.autocast(deltas.device.type, enabled=False):
            anchors = self.anchors(canvas, dtype, deltas.device)
            return objectness.to(dtype).view(batch, -1), deltas.to(dtype).view(batch, -1, 4), anchors

    def losses(
        self, outputs: tuple[Tensor, Tensor, Tensor], targets: list[dict], canvas: Tensor, seed: int
    ) -> dict[str, Tensor]:
        """Cross-entropy of objectness and smooth distance of encoded boxes, [B] each. `canvas` [2]: width, height."""
        objectness, deltas, anchors = outputs
        terms = {"objectness": [], "proposal_box": []}
        places = torch.arange(len(anchors), device=anchors.device)
        rule = {"foreground_iou": self.foreground_iou, "background_iou": self.background_iou, "rescue": True}
        for logits, delta, target in zip(objectness, deltas, targets, strict=True):
            boxes, _, foreground, ignored = match(anchors, target, canvas, **rule)
            draw = draws_of(places, int(mix(target["position"], key_of(seed, "anchors"))))
            chosen, valid = sample(foreground, ~foreground & ~ignored, draw, self.drawn, self.foreground_share)
            foreground = foreground[chosen]
            cost = F.binary_cross_entropy_with_logits(logits[chosen], foreground.to(logits.dtype), reduction="none")
            wanted = torch.where(foreground[:, None], boxes[chosen], anchors[chosen])
            wanted = self.coder.encode_single(wanted, anchors[chosen])
            distance = F.smooth_l1_loss(delta[chosen], wanted, beta=1 / 9, reduction="none").sum(1)
            terms["objectness"].append((cost * valid).sum() / self.drawn)
            terms["proposal_box"].append((distance * (foreground & valid)).sum() / self.drawn)
        return {name: torch.stack(of_images) for name, of_images in terms.items()}

    @torch.no_grad()
    def select(
        self, outputs: tuple[Tensor, Tensor, Tensor], canvas: tuple[int, int], sizes: list[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Proposals of each image [n, 4] within its true size, best first, and the anchors that they come from, int64[n].

        Of equal logits the first comes first. In padding and other plain areas, anchors have the same logit but for rounding
        errors, which depend on the micro-batch and must not decide what suppresses what: logits are rounded first.
        """
        objectness, deltas, anchors = outputs
        objectness = objectness.round(decimals=self.decimals)
        lengths, limit = self.anchors.level_lengths(canvas), self.candidates[self.training]
        ordered = [level.sort(dim=1, descending=True, stable=True).indices for level in objectness.split(lengths, 1)]
        best = [level[:, :limit] for level in ordered]
        starts = [sum(lengths[:place]) for place in range(len(lengths))]
        levels = torch.cat([torch.full_like(chosen[0], place) for place, chosen in enumerate(best)])
        best = torch.cat([chosen + start for chosen, start in zip(best, starts, strict=True)], 1)  # [B, C]
        selected = []
        for chosen, logits, delta, size in zip(best, objectness, deltas, sizes, strict=True):
            boxes = clip(self.coder.decode_single(delta[chosen], anchors[chosen]), size)
            good = ((boxes[:, 2:] - boxes[:, :2]) >= self.least_side).all(1)
            # Leaving out the others would make the host wait for their number. Instead they become equal boxes of the lowest
            # score, and so does one more at the end: suppression leaves exactly one of them, as the last.
            good, same = F.pad(good, (0, 1)), filled((0, 0, 1, 1), boxes)
            keep = suppress(
                torch.where(good[:, None], F.pad(boxes, (0, 0, 0, 1)), same),
                torch.where(good, F.pad(logits[chosen].sigmoid(), (0, 1)), -1),
                torch.where(good, F.pad(levels, (0, 1)), -1),
                self.nms_threshold,
            )[:-1][:limit]
            selected.append((boxes[keep], chosen[keep]))
        return selected
