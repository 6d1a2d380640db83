"""Sampling of the anchors and proposals that an R-CNN learns from."""

import torch
from torch import Tensor

_RANK = 61  # bits of a lot, so that one more can say who goes first


def lots(ids: Tensor, key: int) -> Tensor:
    """Random numbers in [0, 2^61) that belong to `ids` int64[...]: a pure function of (id, key), on every device.

    It is `common.randomness.mix`, in the signed arithmetic that torch has on accelerators, without its last three bits.
    """
    x = (ids + _signed(key)) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return _shift(x ^ _shift(x, 31), 64 - _RANK)


def sample(foreground: Tensor, background: Tensor, lots: Tensor, size: int, share: float) -> tuple[Tensor, Tensor]:
    """Draw `size` of n places, foreground first up to `share` of them, by their lots.

    Args:
        foreground, background: bool[n], never both; what is neither is not drawn.
        lots: int64[n] in [0, 2^61).

    Returns:
        indices int64[k], k = min(size, n), and whether each was really drawn, bool[k]: there may be too few of both kinds.
        The numbers stay on the device: the host need not wait for them.
    """
    most = int(size * share)
    of_foreground = torch.where(foreground, lots, -1)
    if most < len(lots):
        least = of_foreground.topk(most).values[-1] if most else of_foreground.new_full((), 2**_RANK)
        foreground = foreground & (of_foreground >= least)
    order = torch.where(foreground, lots + 2**_RANK, torch.where(background, lots, -1))
    drawn, indices = order.topk(min(size, len(order)))
    return indices, drawn >= 0


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right as if unsigned."""
    return (x >> by) & ((1 << (64 - by)) - 1)
