"""Sampling of the anchors and proposals that an R-CNN learns from."""

import torch
from torch import Tensor

_BITS = 61  # of a random number, so that one more bit can put some numbers first


def draws_of(ids: Tensor, key: int) -> Tensor:
    """Random numbers in [0, 2^61) for `ids` int64[...]: a pure function of (id, key), equal on every device.

    It is `common.randomness.mix` without its last three bits, in the signed arithmetic that torch has on accelerators.
    """
    x = (ids + _signed(key)) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return _shift(x ^ _shift(x, 31), 64 - _BITS)


def sample(foreground: Tensor, background: Tensor, draws: Tensor, size: int, share: float) -> tuple[Tensor, Tensor]:
    """Sample `size` of n places by their random numbers; foreground comes first, up to `share` of them.

    Args:
        foreground, background: bool[n], never both; what is neither is not sampled.
        draws: int64[n] in [0, 2^61).

    Returns:
        indices int64[k], k = min(size, n), and whether each was really sampled, bool[k]: there may be too few of both kinds.
        The counts stay on the device, so the host need not wait.
    """
    limit = int(size * share)
    of_foreground = torch.where(foreground, draws, -1)
    if limit < len(draws):
        bound = of_foreground.topk(limit).values[-1] if limit else of_foreground.new_full((), 2**_BITS)
        foreground = foreground & (of_foreground >= bound)
    order = torch.where(foreground, draws + 2**_BITS, torch.where(background, draws, -1))
    drawn, indices = order.topk(min(size, len(order)))
    return indices, drawn >= 0


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right as if unsigned."""
    return (x >> by) & ((1 << (64 - by)) - 1)
