"""MixUp and CutMix: mix each image and its target with its partner's.

Positions 2i and 2i + 1 of the sample stream are partners: neighbours that every batch plan keeps together (see `build_plan`
in the recipe), so that pairs are the same on any layout.
Sources: Zhang et al., "mixup", 2018; Yun et al., "CutMix", 2019.
"""

from dataclasses import dataclass

import numpy as np
import torch

from common.classification.augmentation import Augmentation
from common.randomness import key_of, uniforms

# Columns of a pair's row.
_OUTSIDE, _TOP, _BOTTOM, _LEFT, _RIGHT, _TARGET = range(6)


@dataclass
class Mixing(Augmentation):
    """MixUp, CutMix, or, if both are on, one of them for each pair at even odds."""

    seed: int
    mixup: float  # alpha of the Beta distribution of the shares; 0: off
    cutmix: float
    size: tuple[int, int]  # height and width of the images

    unit = 2  # neighbours are partners

    def sample(self, positions: np.ndarray) -> np.ndarray:
        """For each pair of `positions` (whole pairs): float32[B / 2, 6].

        A row holds the weight of an image's own pixels outside a box, the box (top, bottom, left, right) that shows the
        partner's pixels, and the weight of its own target.
        """
        from scipy.special import betaincinv  # takes 0.1 s to import, which only runs that mix need

        pairs, (height, width) = positions[::2] // 2, self.size
        choice, quantile, y, x = (
            uniforms(pairs, key_of(self.seed, "mixing", name)) for name in ("choice", "share", "y", "x")
        )
        cut = choice < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        alpha = np.where(cut, self.cutmix, self.mixup)
        share = betaincinv(alpha, alpha, quantile)  # Beta(alpha, alpha) by inversion
        half = np.sqrt(1 - share) / 2
        rows = np.zeros((len(pairs), 6), np.float32)
        rows[:, _OUTSIDE] = np.where(cut, 1, share)
        for first, last, centre, side in ((_TOP, _BOTTOM, y, height), (_LEFT, _RIGHT, x, width)):
            rows[:, first] = cut * np.floor(np.clip(centre - half, 0, 1) * side)
            rows[:, last] = cut * np.floor(np.clip(centre + half, 0, 1) * side)
        area = (rows[:, _BOTTOM] - rows[:, _TOP]) * (rows[:, _RIGHT] - rows[:, _LEFT])
        rows[:, _TARGET] = np.where(cut, 1 - area / np.float32(height * width), share)
        return rows

    def apply(self, images, targets, draws):
        rows = draws.to(images.dtype).repeat_interleave(2, dim=0)[:, :, None, None]  # [B, 6, 1, 1]
        y = torch.arange(images.shape[2], device=images.device)[:, None]
        x = torch.arange(images.shape[3], device=images.device)[None, :]
        in_rows = (y >= rows[:, _TOP]) & (y < rows[:, _BOTTOM])  # [B, H, 1]
        in_columns = (x >= rows[:, _LEFT]) & (x < rows[:, _RIGHT])  # [B, 1, W]
        own = torch.where((in_rows & in_columns)[:, None], 0.0, rows[:, _OUTSIDE, None])  # [B, 1, H, W]
        own_target = rows[:, _TARGET, :, 0].to(targets.dtype)  # [B, 1]
        return (
            images * own + _partners(images) * (1 - own),
            targets * own_target + _partners(targets) * (1 - own_target),
        )


def _partners(batch: torch.Tensor) -> torch.Tensor:
    """Rows 2i and 2i + 1 change places."""
    return batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
