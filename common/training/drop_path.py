"""Stochastic depth and dropout: what a sample skips, independent of the layout of the run."""

import inspect

import numpy as np
import torch
from timm.layers import DropPath
from torch import nn

from common.patches.torch import change_class
from common.randomness import key_of, uniforms


class PositionalDropPath(DropPath):
    """Stochastic depth per sample, decided by numbers that are set from outside: [batch, ...] ->
    [batch, ...].

    It computes what timm's DropPath does; in eval mode it is the identity.
    If a forward calls the layer several times, these branches are dropped together.
    Source: Huang et al. 2016, "Deep Networks with Stochastic Depth" (arXiv:1603.09382).
    """

    layer: int
    draws: "_Draws"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        mask = (self.draws.by_layer[self.layer] < keep_prob).to(x.dtype)
        if keep_prob > 0 and self.scale_by_keep:
            mask = mask / keep_prob
        # Windows or patches are rows of their own: a sample's rows are dropped together.
        if len(mask) != len(x):
            mask = mask.repeat_interleave(len(x) // len(mask))
        return x * mask.view(-1, *[1] * (x.dim() - 1))


class PositionalDropout(nn.Dropout):
    """Dropout whose masks follow from numbers that are set from outside: [batch, ...] -> [batch, ...].

    It computes what torch's Dropout does. What has no batch dimension, such as the table of a
    transformer's relative positions, gets one mask per step, the same for all samples. If a forward
    calls the layer several times, these calls have the same mask.
    """

    layer: int
    draws: "_Draws"
    has_batch: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        draws = self.draws.by_layer[self.layer]
        if not self.has_batch or len(x) % len(draws):
            draws = self.draws.by_layer[-1, :1]
        keys = _hash((draws * 2**24).long() + (self.layer << 24))
        elements = torch.arange(x.numel() // len(keys), device=x.device)
        bits = _hash(elements + keys[:, None])
        mask = (bits >= int(self.p * 2**32)).view(x.shape)
        return x * mask / max(1 - self.p, 1e-9)


def _hash(x: torch.Tensor) -> torch.Tensor:
    """32 well-mixed bits of integers below 2**32, without an overflow of int64: int64[...] -> int64[...].

    Source: constants of Wellons' hash prospector (github.com/skeeto/hash-prospector).
    """
    x = (x ^ (x >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x735A2D97 & 0xFFFFFFFF
    return x ^ (x >> 15)


class _Draws:
    """The numbers of the current micro-batch, shared by a model's layers. A deepcopy has its own."""

    layers = 0
    by_layer: torch.Tensor  # float32[layers + 1, batch]


def convert(model: nn.Module) -> int:
    """Make every active DropPath of timm and Dropout of torch in `model` a positional one, and
    return their number.

    Layers are numbered in the order of their parents in `model.modules()`, drop paths first. Call
    `set_draws` before every forward in training.
    """
    _add_head_dropout(model)
    draws = _Draws()
    model.path_draws = draws
    for kind, positional, rate in (
        (DropPath, PositionalDropPath, "drop_prob"),
        (nn.Dropout, PositionalDropout, "p"),
    ):
        for parent_name, parent in model.named_modules():
            for module in parent.children():
                if type(module) is kind and getattr(module, rate) > 0:
                    change_class(module, positional)
                    module.layer = draws.layers
                    module.draws = draws
                    # The tables of relative positions in models of timm.
                    module.has_batch = (
                        "rel_pos." not in parent_name and "meta_mlp" not in parent_name
                    )
                    draws.layers += 1
    return draws.layers


def _add_head_dropout(model: nn.Module) -> None:
    """Give a timm model that drops inputs of its classifier by a function, as ResNets do, a module for it."""
    if getattr(model, "drop_rate", 0) and "F.dropout" in inspect.getsource(
        type(model).forward_head
    ):
        head = model.get_classifier()
        head.input_dropout = nn.Dropout(model.drop_rate)
        head.register_forward_pre_hook(lambda head, inputs: head.input_dropout(*inputs))
        model.drop_rate = 0.0


def layers(model: nn.Module) -> int:
    """How many layers of a converted model drop something."""
    return getattr(model, "path_draws", _Draws).layers


def draws(positions: np.ndarray, batch_size: int, seed: int, layers: int) -> torch.Tensor | None:
    """Uniform numbers in [0, 1] for the samples at these positions of the stream: int64[n] ->
    float32[layers + 1, n].

    A pure function of (seed, position, layer): a sample gets the same column in any batch. The last
    row is a function of the step, whose global batch has `batch_size` samples. None without layers.
    """
    if not layers:
        return None
    rows = [uniforms(positions, key_of(seed, "drop path", layer)) for layer in range(layers)]
    rows.append(uniforms(positions // batch_size, key_of(seed, "dropout")))
    return torch.from_numpy(np.array(rows, dtype=np.float32))


def set_draws(model: nn.Module, draws: torch.Tensor | None) -> None:
    """Give a converted model the numbers of its next micro-batch: float32[layers + 1, batch] on its
    device, or None.
    """
    if draws is not None:
        model.path_draws.by_layer = draws
