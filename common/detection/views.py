"""Views: the sizes and mirror images of an evaluated image, whose detections are merged (test-time augmentation)."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from common.config.fields import whole_numbers
from common.detection.models.boxes import suppress
from common.detection.models.postprocessing import LIMIT
from common.detection.transforms import BoxAugmentation, refuse_uneven
from common.launching import launch

_NMS = 0.7  # of families that suppress no boxes themselves


@dataclass(frozen=True)
class Views:
    """How an evaluation shows each image to a detector, and how it merges what is found in several views.

    All detections are collected in the pixels of the original. Of boxes of a class that overlap by
    more than `nms_threshold` only the best stays, as within one view; scores stay what they are.
    """

    augmentations: tuple[BoxAugmentation, ...]  # one for each size
    flip: bool = False  # each size also mirrored
    nms_threshold: float = _NMS
    limit: int = LIMIT  # detections of an image

    @classmethod
    def of(cls, config: Any, plain: BoxAugmentation, detector: Any) -> Self:
        """What --eval_flip and --eval_sizes ask for, else `plain` alone; the limit of the long side scales with a size.

        Raises `Refused` for a size that the family can't have.
        """
        sides = whole_numbers(config.eval_sizes, ",") or plain.short_sides
        if plain.square:
            refuse_uneven(f"--eval_sizes {config.eval_sizes}", sides, detector.stride, config.detector)
        longest = [max(1, round(plain.long_side * side / max(plain.short_sides))) for side in sides]
        sizes = [replace(plain, short_sides=(side,), long_side=long) for side, long in zip(sides, longest, strict=True)]
        threshold, limit = getattr(detector, "nms_threshold", _NMS), getattr(detector, "limit", LIMIT)
        views = cls(tuple(sizes), config.eval_flip, threshold, limit)
        if config.eval_sizes or views.flip:
            launch.say(str(views))
        return views

    def __str__(self) -> str:
        sizes = ", ".join(str(one.short_sides[0]) for one in self.augmentations)
        mirrored = ", each also mirrored" if self.flip else ""
        merged = (
            f"; boxes are merged by NMS at IoU {self.nms_threshold}" if len(self.augmentations) > 1 or self.flip else ""
        )
        return f"each image is shown at {sizes} pixels{mirrored}{merged}"

    def merged(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Detections of one image in several views, in the same pixels -> the best of all, best first."""
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        kept = suppress(found["boxes"], found["scores"], found["labels"], self.nms_threshold)[: self.limit]
        return {name: column[kept] for name, column in found.items()}


def mirrored_back(found: dict[str, Tensor], width: Tensor) -> dict[str, Tensor]:
    """Detections in the mirror image of an image of `width` pixels -> where they are in the image."""
    left, top, right, bottom = found["boxes"].unbind(1)
    mirrored = {"boxes": torch.stack([width - right, top, width - left, bottom], 1)}
    if "masks" in found:
        mirrored["masks"] = found["masks"].flip(-1)
    return found | mirrored
