"""How do MixUp and CutMix blend a batch, the same on any layout?

Positions 2i and 2i + 1 of the sample stream are partners: neighbours that every batch plan keeps together. What to do with
a pair is drawn from its position by the data worker (`draw`), and done on the device (`blend`).
"""

import numpy as np
import torch

from common.randomness import key_of, uniforms

# Columns of a pair's draw.
_OUTSIDE, _TOP, _BOTTOM, _LEFT, _RIGHT, _TARGET = range(6)


def draw(positions: np.ndarray, seed: int, mixup: float, cutmix: float, height: int, width: int) -> np.ndarray:
    """What happens to each pair of `positions` (int64[2n], whole pairs): float32[n, 6], one row a pair.

    A row holds the weight of the own pixels outside a box, the box (top, bottom, left, right) in which the partner's pixels
    stand, and the weight of the own target. `mixup` and `cutmix` are the alphas of their Beta distributions, 0 for off;
    with both on each pair takes one at even odds.
    Sources: Zhang et al., "mixup", 2018; Yun et al., "CutMix", 2019.
    """
    from scipy.special import betaincinv  # late: 0.1 s, and only who mixes needs it

    pairs = positions[::2] // 2
    choice, quantile, y, x = (uniforms(pairs, key_of(seed, "mixing", name)) for name in ("choice", "share", "y", "x"))
    cut = choice < (0.5 if mixup and cutmix else float(cutmix > 0))
    alpha = np.where(cut, cutmix, mixup)
    share = betaincinv(alpha, alpha, quantile)  # Beta(alpha, alpha) by inversion
    half = np.sqrt(1 - share) / 2
    rows = np.zeros((len(pairs), 6), np.float32)
    rows[:, _OUTSIDE] = np.where(cut, 1, share)
    for first, last, centre, size in ((_TOP, _BOTTOM, y, height), (_LEFT, _RIGHT, x, width)):
        rows[:, first] = cut * np.floor(np.clip(centre - half, 0, 1) * size)
        rows[:, last] = cut * np.floor(np.clip(centre + half, 0, 1) * size)
    area = (rows[:, _BOTTOM] - rows[:, _TOP]) * (rows[:, _RIGHT] - rows[:, _LEFT])
    rows[:, _TARGET] = np.where(cut, 1 - area / (height * width), share)
    return rows


def blend(images: torch.Tensor, targets: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix images [B, C, H, W] and targets [B, K] with their partners', as draws [B / 2, 6] say; the same shapes come back."""
    rows = draws.to(images.dtype).repeat_interleave(2, dim=0)[:, :, None, None]  # [B, 6, 1, 1]
    y = torch.arange(images.shape[2], device=images.device)[:, None]
    x = torch.arange(images.shape[3], device=images.device)[None, :]
    in_box = (y >= rows[:, _TOP]) & (y < rows[:, _BOTTOM]) & (x >= rows[:, _LEFT]) & (x < rows[:, _RIGHT])  # [B, H, W]
    own = torch.where(in_box[:, None], 0.0, rows[:, _OUTSIDE, None])  # [B, 1, H, W]
    own_target = rows[:, _TARGET, :, 0].to(targets.dtype)  # [B, 1]
    return (
        images * own + _partners(images) * (1 - own),
        targets * own_target + _partners(targets) * (1 - own_target),
    )


def _partners(batch: torch.Tensor) -> torch.Tensor:
    """Rows 2i and 2i + 1 change places."""
    return batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
