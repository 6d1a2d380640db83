"""The forward pass of every detector in training."""

from typing import Any

from torch import Tensor


def mean_losses(detector: Any, images: Tensor, targets: list[dict], totals: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """As `detector.losses`, but the *mean* over the global batch is its loss: of each image [B], and its parts by name.

    `totals` int64[C + 1] has the sums of `counts` over the global batch, and then the number of its images.
    """
    losses, parts = detector.losses(images, targets, totals[:-1])
    return totals[-1] * losses, {name: totals[-1] * part for name, part in parts.items()}
