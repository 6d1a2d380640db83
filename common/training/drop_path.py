"""Stochastic depth: which residual branches a sample skips, independent of the layout of the run."""

import numpy as np
import torch
from timm.layers import DropPath
from torch import nn

from common.randomness import key_of, uniforms


class PositionalDropPath(nn.Module):
    """Stochastic depth per sample, decided by numbers that are set from outside: [batch, ...] -> [batch, ...].

    It computes what timm's DropPath does; in eval mode it is the identity.
    If a forward calls the layer several times, these branches are dropped together.
    Source: Huang et al. 2016, "Deep Networks with Stochastic Depth" (arXiv:1603.09382).
    """

    def __init__(self, drop_prob: float, scale_by_keep: bool, layer: int, shared: "_Draws") -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep, self.layer, self.shared = drop_prob, scale_by_keep, layer, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        mask = (self.shared.draws[self.layer] < keep_prob).to(x.dtype)
        if keep_prob > 0 and self.scale_by_keep:
            mask = mask / keep_prob
        if len(mask) != len(x):  # windows or patches are rows of their own: a sample's rows are dropped together
            mask = mask.repeat_interleave(len(x) // len(mask))
        return x * mask.view(-1, *[1] * (x.dim() - 1))

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob:.3f}, layer={self.layer}"


class _Draws:
    """The numbers of the current micro-batch, shared by a model's layers. A deepcopy has its own."""

    draws: torch.Tensor  # float32[layers, batch]


def convert(model: nn.Module) -> int:
    """Replace every active timm DropPath of `model` by a `PositionalDropPath`, and return their number.

    Layers are numbered in the order of `model.named_modules()`. Call `set_draws` before every forward in training.
    """
    shared = _Draws()
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, DropPath) and child.drop_prob > 0
    ]
    for layer, (parent, name, child) in enumerate(places):
        setattr(parent, name, PositionalDropPath(child.drop_prob, child.scale_by_keep, layer, shared))
    return len(places)


def layers(model: nn.Module) -> int:
    """How many layers of a converted model drop paths."""
    return sum(isinstance(module, PositionalDropPath) for module in model.modules())


def draws(positions: np.ndarray, seed: int, layers: int) -> torch.Tensor | None:
    """Uniform numbers in [0, 1] for the samples at these positions of the stream: int64[n] -> float32[layers, n].

    A pure function of (seed, position, layer): a sample gets the same column in any batch. None without layers.
    """
    if not layers:
        return None
    rows = [uniforms(positions, key_of(seed, "drop path", layer)) for layer in range(layers)]
    return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(layers, len(positions)))


def set_draws(model: nn.Module, draws: torch.Tensor | None) -> None:
    """Give a converted model the numbers of its next micro-batch: float32[layers, batch] on the model's device.

    `draws` is None for a model without such layers.
    """
    if draws is None:
        return
    layer = next((module for module in model.modules() if isinstance(module, PositionalDropPath)), None)
    if layer is not None:
        layer.shared.draws = draws
