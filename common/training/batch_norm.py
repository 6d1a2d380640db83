"""Batch normalisation over a chosen set of samples, so that a run's layout does not change its statistics.

`convert_batch_norm` turns every batch norm of a model into a `StepBatchNorm`, in place and with the
same parameters and keys. Its forward never touches the running statistics: it collects the mean and
variance that it normalised with, and `update_running_statistics` updates them once per optimizer
step, from all micro-batches of all ranks at once.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.distributed.collectives import is_distributed, node_group
from common.errors import Refused
from common.patches.torch import change_class
from common.training.shared_normalization import normalize_shared

CONVERTIBLE = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    BatchNormAct2d,
    SyncBatchNormAct,
)
DESCRIPTIONS = {
    "local": (
        "statistics of each micro-batch: fastest, but the result depends on the layout; "
        "--batch_norm group avoids that"
    ),
    "group": (
        "statistics of fixed groups of consecutive samples: the same on every layout, no "
        "communication in the forward"
    ),
    "node": (
        "statistics of the micro-batches of a machine's ranks together: the result depends on the "
        "layout"
    ),
    "global": (
        "statistics of the micro-batches of all ranks together: exact on every layout without "
        "accumulation"
    ),
    "frozen": "running statistics as loaded, never changed; weight and bias are trained",
}


class StepBatchNorm(_BatchNorm):
    """Batch normalisation of [batch, channels, ...] in a mode of `DESCRIPTIONS`.

    Running statistics are updated once per step. `convert_batch_norm` makes these layers and sets
    their attributes.

    Source: Ioffe & Szegedy 2015 (arXiv:1502.03167); group: ghost batch norm, Hoffer et al. 2017
    (arXiv:1705.08741).
    """

    mode: str
    group_size: int  # samples
    step_statistics: "_StepStatistics"  # shared by the model's layers
    has_activation: bool  # timm's BatchNormAct2d drops and activates too
    # [3, channels]: sums over groups of the mean, of the unbiased variance, and of one.
    statistic_sums: Tensor
    latest_statistics: Tensor  # [3, channels]: the same of the latest group
    latest_rows: tuple[Tensor, ...]  # the rows of `latest_statistics`; () before the first update
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "frozen" or not self.training:
            y = F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        elif self.mode == "group":
            y = self._normalize_groups(x)
        elif self.mode in ("node", "global") and is_distributed():
            group = node_group() if self.mode == "node" else dist.group.WORLD
            y, statistics = normalize_shared(x, self.weight, self.bias, self.eps, group)
            self._collect(statistics)
        else:
            y = self._normalize(x)
        # An export to any batch size must not ask for the length.
        if (
            y.requires_grad
            and y.shape[0] == 1
            and y.device.type == "cpu"
            and not torch.compiler.is_compiling()
        ):
            # torch 2.14 misreads the gradient of a single sample whose pixels became tokens.
            y.register_hook(Tensor.contiguous)
        if self.has_activation:
            y = self.act(self.drop(y))
        return y

    def _normalize(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not self.latest_rows:
            statistics = torch.ones_like(self.statistic_sums)
            y = self._normalize_into(x, statistics[0], statistics[1])
            self._collect(statistics)
            return y
        if self in self.step_statistics.pending:
            self._collect(self.latest_statistics)
        y = self._normalize_into(x, self.latest_rows[0], self.latest_rows[1])
        self.step_statistics.pending.add(self)
        return y

    def _normalize_into(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Normalise `x`, and write its mean and unbiased variance, [channels] each."""
        # A trial on this rank alone may have a single value of a channel, which has no variance.
        is_training = True
        if self.mode == "rank":
            is_training = x.numel() > x.shape[1]
        # With momentum 1 the kernel writes just this batch's statistics.
        return F.batch_norm(x, mean, variance, self.weight, self.bias, is_training, 1.0, self.eps)

    def _normalize_groups(self, x: Tensor) -> Tensor:
        num_groups, remainder = divmod(self.step_statistics.num_samples, self.group_size)
        if remainder or not num_groups:
            raise Refused(
                f"a micro-batch of {self.step_statistics.num_samples} samples is not whole groups of "
                f"norm_batch_size {self.group_size}: choose a multiple of it"
            )
        if num_groups == 1:
            return self._normalize(x)
        # Some layers see several rows of each sample (windows, tokens), so the rows of a group are
        # counted here. Launching kernels costs nothing there, but two copies of the activations do.
        if x.device.type == "cpu":
            groups = x.split(x.shape[0] // num_groups)
            return torch.cat([self._normalize(group) for group in groups])
        return self._normalize_groups_at_once(x, num_groups)

    def _normalize_groups_at_once(self, x: Tensor, num_groups: int) -> Tensor:
        """Normalise all groups by one batch norm of [rows of a group, groups * channels, ...].

        It takes as many kernels for any number of groups.
        """
        channels_last = x.dim() > 2 and x.stride(1) == 1
        if channels_last:
            # [rows, ..., groups, channels]
            rows = x.movedim(1, -1).unflatten(0, (num_groups, -1)).movedim(0, -2)
            rows = rows.flatten(-2).movedim(-1, 1)
        else:
            rows = x.unflatten(0, (num_groups, -1)).transpose(0, 1).flatten(1, 2)
        statistics = self.statistic_sums.new_ones(3, num_groups * self.num_features)
        weight = None if self.weight is None else self.weight.repeat(num_groups)
        bias = None if self.bias is None else self.bias.repeat(num_groups)
        y = F.batch_norm(rows, statistics[0], statistics[1], weight, bias, True, 1.0, self.eps)
        self._collect(statistics.unflatten(1, (num_groups, -1)).sum(1))
        if channels_last:
            y = y.movedim(1, -1).unflatten(-1, (num_groups, -1)).movedim(-2, 0)
            return y.flatten(0, 1).movedim(-1, 1)
        return y.unflatten(1, (num_groups, -1)).transpose(0, 1).flatten(0, 1)

    def _collect(self, statistics: Tensor) -> None:
        self.statistic_sums += statistics
        self.step_statistics.has_collected = True

    def _apply(self, function: Any, recurse: bool = True) -> "StepBatchNorm":
        # `statistic_sums` follows the module to a device or dtype, but is no buffer: DDP would overwrite
        # it with rank 0's.
        super()._apply(function, recurse)
        self.statistic_sums = function(self.statistic_sums)
        self.latest_rows = ()
        self.step_statistics.layers = []
        return self


class _StepStatistics:
    """What the layers of a model share in a step.

    A method is the hook that counts samples, so that a deepcopy of the model has its own.
    """

    def __init__(self) -> None:
        self.num_samples = 0  # in the current forward pass of training
        self.layers: list[StepBatchNorm] = []  # their tensors are views of the following
        self.num_channels: list[int] = []  # by layer
        self.latest_statistics = torch.empty(0)  # [3, channels of all layers]
        self.running = torch.empty(0)  # [2, channels of all layers]: mean and variance
        self.num_batches = torch.empty(0)  # [layers]: `num_batches_tracked`
        # Layers whose `latest_statistics` are not in `statistic_sums` yet.
        self.pending: set[StepBatchNorm] = set()
        self.has_collected = False  # True if any layer has something in `statistic_sums`

    def join_layers(self, layers: list[StepBatchNorm]) -> None:
        """Put the tensors of `layers` into one memory each.

        So an update takes few kernels for any number of layers.
        """
        if self.layers == layers:
            return
        means = torch.cat([layer.running_mean for layer in layers])
        variances = torch.cat([layer.running_var for layer in layers])
        self.layers = layers
        self.running = torch.stack([means, variances])
        self.num_batches = torch.stack([layer.num_batches_tracked for layer in layers])
        self.latest_statistics = torch.cat(
            [torch.zeros_like(self.running), torch.ones_like(self.running[:1])]
        )
        self.num_channels = [layer.num_features for layer in layers]
        running_by_layer = self.running.split(self.num_channels, dim=1)
        latest_by_layer = self.latest_statistics.split(self.num_channels, dim=1)
        for i, layer in enumerate(layers):
            layer.running_mean, layer.running_var = running_by_layer[i]
            layer.num_batches_tracked = self.num_batches[i]
            layer.latest_statistics = latest_by_layer[i]
            # With versions of their own: backward passes don't read what batch norm wrote there.
            layer.latest_rows = layer.latest_statistics.data.unbind()

    def clear(self) -> None:
        """Forget what layers have collected."""
        if self.has_collected:
            torch._foreach_zero_([layer.statistic_sums for layer in self.layers])
        self.pending.clear()
        self.has_collected = False

    def count_samples(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Set `num_samples` to the length of the model's first input; a pre-hook of its forward."""
        if model.training:  # an export to any batch size must not ask for the length
            inputs = args[0] if args else next(iter(kwargs.values()))
            self.num_samples = len(inputs)


def convert_batch_norm(model: nn.Module, mode: str, *, group_size: int = 0) -> int:
    """Turn every batch norm of `model` into a `StepBatchNorm`, in place, and return their number.

    `mode` is one of `DESCRIPTIONS`. Parameters, buffers, hooks and state_dict keys stay, so weights
    can be exchanged with the plain model. With mode "node" this is a collective. With "group" the
    model's first input must be as long as the micro-batch, and `group_size` is the number of
    samples in a group, at least 2. Raises `Refused` for a batch norm of an unknown class.
    """
    step = _StepStatistics()
    layers = []
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        if type(layer) not in CONVERTIBLE or layer.running_mean is None:
            raise Refused(
                f"{name} ({layer}) can't be converted: needs a known batch norm with running "
                "statistics"
            )
        statistic_sums = layer.running_mean.new_zeros(3, layer.num_features)
        change_class(layer, StepBatchNorm)
        layer.mode = mode
        layer.group_size = group_size
        layer.step_statistics = step
        layer.has_activation = hasattr(layer, "act")
        layer.statistic_sums = statistic_sums
        layer.latest_rows = ()
        layers.append(layer)
    model.step_batch_norms = layers  # walking through a large model takes 0.1 ms per step
    if mode == "group" and layers:
        model.register_forward_pre_hook(step.count_samples, with_kwargs=True)
    if mode == "node":
        node_group()  # all ranks make it here, not in the middle of a forward
    return len(layers)


@contextlib.contextmanager
def normalize_per_rank(model: nn.Module) -> Iterator[None]:
    """In this context, `node` and `global` use the samples of this rank and wait for no other rank.

    For a trial that some ranks may leave by an exception. On a GPU it takes the same memory as
    sharing; on the CPU sharing needs a few copies of one layer's activations more.
    """
    modes = {}
    for layer in _get_updated_layers(model):
        if layer.mode in ("node", "global"):
            modes[layer] = layer.mode
            layer.mode = "rank"
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.mode = mode


def freeze_modules(*modules: nn.Module) -> None:
    """Freeze modules of a model: their weights stay, and the statistics of their batch norms.

    Raises `Refused` before `convert_batch_norm`.
    """
    for module in modules:
        module.requires_grad_(False)
        for layer in module.modules():
            if isinstance(layer, _BatchNorm) and not isinstance(layer, StepBatchNorm):
                raise Refused(
                    "freeze_modules was called before prepare_layers, which converts batch norms: "
                    "call it after that"
                )
            if isinstance(layer, StepBatchNorm):
                layer.mode = "frozen"


def get_group_size(model: nn.Module) -> int:
    """How many consecutive samples `model` normalises together, so that they stay on one rank."""
    group_size = 1
    for layer in _get_updated_layers(model):
        if layer.mode == "group":
            group_size = max(group_size, layer.group_size)
    return group_size


def get_undivided_flag(model: nn.Module) -> str:
    """The flag that needs all samples of a process at once, if layers of `model` do; else ""."""
    for layer in _get_updated_layers(model):
        if layer.mode in ("node", "global"):
            return f"--batch_norm {layer.mode}"
    return ""


def describe_batch_norm(model: nn.Module) -> str:
    """The mode of a converted model and what it means, for people.

    It also says how many layers are frozen, or half frozen.
    """
    layers = model.step_batch_norms
    if not layers:
        return "none in this model: the same on every layout"
    num_trained = 0
    num_half_frozen = 0
    for layer in layers:
        if layer.weight is None:
            continue
        if layer.weight.requires_grad:
            num_trained += 1
        elif layer.mode != "frozen":
            num_half_frozen += 1
    updated = _get_updated_layers(model)
    if not updated and not num_trained:
        return "frozen: all layers are in frozen stages"
    mode = updated[0].mode if updated else "frozen"
    text = f"{mode}: {DESCRIPTIONS[mode]}"
    if updated and len(updated) < len(layers):
        text += f"; {len(layers) - len(updated)} of {len(layers)} layers are frozen"
    if num_half_frozen:
        text += (
            f"; {num_half_frozen} layers with frozen weights still update running statistics: "
            "freeze_modules(...) stops both"
        )
    return text


@torch.no_grad()
def update_running_statistics(model: nn.Module) -> None:
    """Update the running statistics with those that the step's forwards collected.

    Called once per optimizer step, on all ranks. Each group, micro-batch or shared batch of the
    step has the same weight, and so has its second forward under gradient checkpointing. A layer
    that no rank used keeps its statistics. One collective for all layers; none if there are no
    layers.
    """
    layers = _get_updated_layers(model)
    if not layers:
        return
    step = layers[0].step_statistics
    # In the usual step each layer was used once, so nothing has to be summed on this rank.
    if step.layers == layers and len(step.pending) == len(layers) and not step.has_collected:
        sums = step.latest_statistics
    else:
        for layer in step.pending:
            layer._collect(layer.latest_statistics)
        sums = torch.cat([layer.statistic_sums for layer in layers], dim=1)  # [3, channels of all]
        step.has_collected = True
        step.join_layers(layers)
    if is_distributed():
        sums = sums.clone()
        dist.all_reduce(sums)
    # On one process, the latest statistics of a single pass are their mean.
    means = sums[:2] if sums is step.latest_statistics else sums[:2] / sums[2]
    # Not finite: a layer that was not used, or an fp16 overflow, where the optimizer skips the step
    # as well.
    means = torch.where(means.abs() < math.inf, means, step.running, out=step.latest_statistics[:2])
    step.num_batches += 1
    momenta = [_get_momentum(layer) for layer in layers]
    if len(set(momenta)) == 1:
        step.running.lerp_(means, momenta[0])
    else:
        running_by_layer = list(step.running.split(step.num_channels, dim=1))
        means_by_layer = list(means.split(step.num_channels, dim=1))
        torch._foreach_lerp_(running_by_layer, means_by_layer, momenta)
    step.clear()


def _get_momentum(layer: StepBatchNorm) -> float:
    """The weight of the newest statistics. Momentum None means the average over all steps."""
    if layer.momentum is None:
        return 1 / int(layer.num_batches_tracked)  # waits for the device
    return layer.momentum


@torch.no_grad()
def discard_statistics(model: nn.Module) -> None:
    """Discard what forwards collected since the last update, as after a warm-up, which is no step.

    No communication.
    """
    layers = _get_updated_layers(model)
    if not layers:
        return
    step = layers[0].step_statistics
    step.join_layers(layers)
    step.latest_statistics[:2].zero_()  # what is not finite would stay
    step.has_collected = True
    step.clear()


def _get_updated_layers(model: nn.Module) -> list[StepBatchNorm]:
    """The layers whose running statistics a step moves: all but the frozen ones."""
    # A deepcopy of a converted model has its own list.
    layers = getattr(model, "step_batch_norms", model.modules())
    return [
        layer for layer in layers if isinstance(layer, StepBatchNorm) and layer.mode != "frozen"
    ]
