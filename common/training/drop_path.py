"""Stochastic depth and dropout: what a sample skips, independent of the layout of the run."""

import inspect

import numpy as np
import torch
from timm.layers import DropPath
from torch import nn

from common.patches.torch import change_class
from common.randomness import key_of, sample_uniform


class PositionalDropPath(DropPath):
    """Stochastic depth per sample: [batch, ...] -> [batch, ...].

    Random numbers that are set from outside decide which samples skip the branch. The layer
    computes what timm's DropPath does; in eval mode it is the identity. If a forward calls it
    several times, these branches are dropped together.

    Source: Huang et al. 2016, "Deep Networks with Stochastic Depth" (arXiv:1603.09382).
    """

    layer: int
    uniforms: "_DropUniforms"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        mask = (self.uniforms.by_layer[self.layer] < keep_prob).to(x.dtype)
        if keep_prob > 0 and self.scale_by_keep:
            mask = mask / keep_prob
        # Windows or patches are rows of their own: a sample's rows are dropped together.
        if len(mask) != len(x):
            mask = mask.repeat_interleave(len(x) // len(mask))
        mask_shape = [len(mask)] + [1] * (x.dim() - 1)
        return x * mask.view(mask_shape)


class PositionalDropout(nn.Dropout):
    """Dropout per sample: [batch, ...] -> [batch, ...].

    Its masks follow from random numbers that are set from outside. The layer computes what torch's
    Dropout does. What has no batch dimension, such as the table of a transformer's relative
    positions, gets one mask per step, the same for all samples. If a forward calls the layer
    several times, these calls have the same mask.
    """

    layer: int
    uniforms: "_DropUniforms"
    has_batch: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        uniforms = self.uniforms.by_layer[self.layer]
        if not self.has_batch or len(x) % len(uniforms):
            uniforms = self.uniforms.by_layer[-1, :1]
        keys = _hash((uniforms * 2**24).long() + (self.layer << 24))
        elements = torch.arange(x.numel() // len(keys), device=x.device)
        bits = _hash(elements + keys[:, None])
        mask = (bits >= int(self.p * 2**32)).view(x.shape)
        return x * mask / max(1 - self.p, 1e-9)


def _hash(x: torch.Tensor) -> torch.Tensor:
    """Mix the 32 bits of integers below 2**32, without an overflow: int64[...] -> int64[...].

    Source: constants of Wellons' hash prospector (github.com/skeeto/hash-prospector).
    """
    x = (x ^ (x >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x735A2D97 & 0xFFFFFFFF
    return x ^ (x >> 15)


class _DropUniforms:
    """The random numbers of the current micro-batch, shared by a model's layers.

    A deepcopy of the model has its own.
    """

    num_layers = 0
    by_layer: torch.Tensor  # float32[num_layers + 1, batch]


def convert_drop_layers(model: nn.Module) -> int:
    """Make every active DropPath and Dropout of `model` a positional one, and return their number.

    Layers are numbered in the order of their parents in `model.modules()`, drop paths first. Call
    `set_uniforms` before every forward in training.
    """
    _add_head_dropout(model)
    model.drop_uniforms = _DropUniforms()
    for parent in model.modules():
        for module in parent.children():
            if type(module) is DropPath and module.drop_prob > 0:
                change_class(module, PositionalDropPath)
                _number_layer(module, model.drop_uniforms)
    for parent_name, parent in model.named_modules():
        # The tables of relative positions in models of timm have no batch dimension.
        has_batch = "rel_pos." not in parent_name and "meta_mlp" not in parent_name
        for module in parent.children():
            if type(module) is nn.Dropout and module.p > 0:
                change_class(module, PositionalDropout)
                _number_layer(module, model.drop_uniforms)
                module.has_batch = has_batch
    return model.drop_uniforms.num_layers


def _number_layer(module: PositionalDropPath | PositionalDropout, uniforms: _DropUniforms) -> None:
    module.layer = uniforms.num_layers
    module.uniforms = uniforms
    uniforms.num_layers += 1


def _add_head_dropout(model: nn.Module) -> None:
    """Give a timm model a dropout layer if it drops inputs of its classifier by a function.

    ResNets do.
    """
    if not getattr(model, "drop_rate", 0):
        return
    if "F.dropout" not in inspect.getsource(type(model).forward_head):
        return
    head = model.get_classifier()
    head.input_dropout = nn.Dropout(model.drop_rate)
    head.register_forward_pre_hook(lambda head, inputs: head.input_dropout(*inputs))
    model.drop_rate = 0.0


def count_drop_layers(model: nn.Module) -> int:
    """How many layers of a converted model drop something."""
    return getattr(model, "drop_uniforms", _DropUniforms).num_layers


def draw_uniforms(
    positions: np.ndarray, batch_size: int, seed: int, num_layers: int
) -> torch.Tensor | None:
    """Uniform random numbers in [0, 1] for samples: positions int64[n] -> float32[num_layers + 1, n].

    A pure function of (seed, position, layer): a sample gets the same column in any batch. The last
    row is a function of the step, whose global batch has `batch_size` samples. None without layers.
    """
    if not num_layers:
        return None
    rows = [
        sample_uniform(positions, key_of(seed, "drop path", layer)) for layer in range(num_layers)
    ]
    rows.append(sample_uniform(positions // batch_size, key_of(seed, "dropout")))
    return torch.from_numpy(np.array(rows, dtype=np.float32))


def set_uniforms(model: nn.Module, uniforms: torch.Tensor | None) -> None:
    """Give a converted model the random numbers of its next micro-batch.

    They are float32[num_layers + 1, batch] on its device, or None for a model without such layers.
    """
    if uniforms is not None:
        model.drop_uniforms.by_layer = uniforms
