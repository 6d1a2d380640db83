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
        self.keep_prob, self.scale_by_keep, self.layer, self.shared = 1 - drop_prob, scale_by_keep, layer, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        mask = (self.shared.draws[self.layer] < self.keep_prob).to(x.dtype)
        if self.keep_prob > 0 and self.scale_by_keep:
            mask = mask / self.keep_prob
        if len(mask) != len(x):  # windows or patches are rows of their own: a sample's rows are dropped together
            mask = mask.repeat_interleave(len(x) // len(mask))
        return x * mask.view(-1, *[1] * (x.dim() - 1))


class _Draws:
    """The numbers of the current micro-batch, shared by a model's layers. A deepcopy has its own."""

    layers = 0
    draws: torch.Tensor  # float32[layers, batch]


def convert(model: nn.Module) -> int:
    """Replace every active timm DropPath of `model` by a `PositionalDropPath`, and return their number.

    Layers are numbered in the order of `model.named_modules()`. Call `set_draws` before every forward in training.
    """
    model.path_draws = shared = _Draws()
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, DropPath) and child.drop_prob > 0
    ]
    for layer, (parent, name, child) in enumerate(places):
        setattr(parent, name, PositionalDropPath(child.drop_prob, child.scale_by_keep, layer, shared))
    shared.layers = len(places)
    return len(places)


def layers(model: nn.Module) -> int:
    """How many layers of a converted model drop paths."""
    shared = getattr(model, "path_draws", None)
    return shared.layers if shared else 0


def draws(positions: np.ndarray, seed: int, layers: int) -> torch.Tensor | None:
    """Uniform numbers in [0, 1] for the samples at these positions of the stream: int64[n] -> float32[layers, n].

    A pure function of (seed, position, layer): a sample gets the same column in any batch. None without layers.
    """
    if not layers:
        return None
    rows = [uniforms(positions, key_of(seed, "drop path", layer)) for layer in range(layers)]
    return torch.from_numpy(np.array(rows, dtype=np.float32))


def set_draws(model: nn.Module, draws: torch.Tensor | None) -> None:
    """Give a converted model the numbers of its next micro-batch: float32[layers, batch] on its device, or None."""
    if draws is not None:
        model.path_draws.draws = draws
