"""Loss of semantic segmentation: cross-entropy over the labelled pixels of the global batch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.classification.balancing import weigh_counts
from common.distributed.collectives import all_or_none
from common.segmentation.batches import SegmentationBatch
from common.segmentation.masks import IGNORED
from common.segmentation.source import Masked
from common.segmentation.sources import count_class_pixels


def build_loss(
    config: Any, data: Masked, device: torch.device
) -> Callable[[Tensor, SegmentationBatch], Tensor]:
    """losses(logits [B, K, h, w], batch) -> [B]: one loss per image, by --class_weights and
    --label_smoothing.

    Their mean over the global batch is the mean over all its labelled pixels, however the batch is
    divided. An image without a labelled pixel counts 0.
    """
    dtype = getattr(torch, config.dtype)
    weights = None
    if config.class_weights != "none":
        with all_or_none("counting the pixels of each class"):
            counts = count_class_pixels(data)
        weights = torch.from_numpy(weigh_counts(config.class_weights, counts)).to(device, dtype)

    def compute_losses(logits: Tensor, batch: SegmentationBatch) -> Tensor:
        size = batch.labels.shape[1:]
        logits = F.interpolate(logits.to(dtype), size, mode="bilinear")
        by_pixel = F.cross_entropy(
            logits,
            batch.labels.long(),
            weight=weights,
            ignore_index=IGNORED,
            reduction="none",
            label_smoothing=config.label_smoothing,
        )
        totals: Tensor = batch.totals  # type: ignore[assignment]
        num_labelled, num_images = totals
        return by_pixel.flatten(1).sum(1) * num_images / num_labelled.clamp(min=1)

    return compute_losses
