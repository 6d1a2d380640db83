"""Batch normalisation over a chosen set of samples, so that a run's layout does not change its statistics.

`convert` turns every batch norm of a model into a `StepBatchNorm`, in place and with the same
parameters and keys. Its forward never touches the running statistics: it collects the mean and
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
    "node": "statistics of the micro-batches of a machine's ranks together: the result depends on the layout",
    "global": (
        "statistics of the micro-batches of all ranks together: exact on every layout without "
        "accumulation"
    ),
    "frozen": "running statistics as loaded, never changed; weight and bias are trained",
}


class StepBatchNorm(_BatchNorm):
    """Batch normalisation of [batch, channels, ...] in a mode of `DESCRIPTIONS`.

    Running statistics are updated once per step. Made by `convert`, which sets its attributes.

    Source: Ioffe & Szegedy 2015 (arXiv:1502.03167); group: ghost batch norm, Hoffer et al. 2017
    (arXiv:1705.08741).
    """

    mode: str
    group_size: int  # samples
    step: "_Step"  # shared by the model's layers
    activates: bool  # timm's BatchNormAct2d drops and activates too
    # [3, channels]: sums over groups of the mean, of the unbiased variance, and of one.
    collected: Tensor
    latest: Tensor  # [3, channels]: the same of the latest group
    rows: tuple[Tensor, ...]  # of `latest`; () before the first update
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
            # torch 2.14 misreads the gradient of a single sample whose places became tokens.
            y.register_hook(Tensor.contiguous)
        if self.activates:
            y = self.act(self.drop(y))
        return y

    def _normalize(self, x: Tensor) -> Tensor:
        # With momentum 1 the kernel writes just this batch's mean and unbiased variance. The last
        # row stays one.
        if own := torch.compiler.is_compiling() or not self.rows:
            statistics = torch.ones_like(self.collected)
        elif self in self.step.pending:
            self._collect(self.latest)
        mean, variance = (statistics[0], statistics[1]) if own else self.rows[:2]
        # The variance may need other ranks' values.
        is_enough = self.mode != "alone" or x.numel() > x.shape[1]
        y = F.batch_norm(x, mean, variance, self.weight, self.bias, is_enough, 1.0, self.eps)
        if own:
            self._collect(statistics)
        else:
            self.step.pending.add(self)
        return y

    def _normalize_groups(self, x: Tensor) -> Tensor:
        groups, rest = divmod(self.step.samples, self.group_size)
        if rest or not groups:
            told = (
                f"a micro-batch of {self.step.samples} samples is not whole groups of "
                f"norm_batch_size {self.group_size}"
            )
            raise Refused(f"{told}: choose a multiple of it")
        if groups == 1:
            return self._normalize(x)
        # Some layers see several rows of each sample (windows, tokens), so the rows of a group are
        # counted here. Launching kernels costs nothing there, but two copies of the activations do.
        if x.device.type == "cpu":
            return torch.cat([self._normalize(group) for group in x.split(x.shape[0] // groups)])
        return self._normalize_groups_at_once(x, groups)

    def _normalize_groups_at_once(self, x: Tensor, groups: int) -> Tensor:
        """One batch norm of [rows of a group, groups * channels, ...]: as many kernels for any
        number of groups.
        """
        channels_last = x.dim() > 2 and x.stride(1) == 1
        if channels_last:
            # [rows, ..., groups, channels]
            rows = x.movedim(1, -1).unflatten(0, (groups, -1)).movedim(0, -2)
            rows = rows.flatten(-2).movedim(-1, 1)
        else:
            rows = x.unflatten(0, (groups, -1)).transpose(0, 1).flatten(1, 2)
        statistics = self.collected.new_ones(3, groups * self.num_features)
        weight, bias = (
            each if each is None else each.repeat(groups) for each in (self.weight, self.bias)
        )
        y = F.batch_norm(rows, statistics[0], statistics[1], weight, bias, True, 1.0, self.eps)
        self._collect(statistics.unflatten(1, (groups, -1)).sum(1))
        if channels_last:
            return (
                y.movedim(1, -1)
                .unflatten(-1, (groups, -1))
                .movedim(-2, 0)
                .flatten(0, 1)
                .movedim(-1, 1)
            )
        return y.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)

    def _collect(self, statistics: Tensor) -> None:
        self.collected += statistics
        self.step.has_collected = True

    def _apply(self, function: Any, recurse: bool = True) -> "StepBatchNorm":
        # `collected` follows the module to a device or dtype, but is no buffer: DDP would overwrite
        # it with rank 0's.
        super()._apply(function, recurse)
        self.collected, self.rows, self.step.layers = function(self.collected), (), []
        return self


class _Step:
    """What the layers of a model share in a step. A method is the hook, so that a deepcopy has its own."""

    def __init__(self) -> None:
        self.samples = 0  # in the current forward pass of training
        self.layers: list[StepBatchNorm] = []  # whose tensors are parts of the following
        # [3, channels]; [2, channels], mean and variance; num_batches_tracked of each layer
        self.latest = self.running = self.counts = torch.empty(0)
        self.pending: set[StepBatchNorm] = set()  # layers whose `latest` is not in `collected` yet
        self.has_collected = False  # True if any layer has something in `collected`

    def join(self, layers: list[StepBatchNorm]) -> None:
        """Put the tensors of `layers` into one memory each, so that an update takes few kernels for
        any number of layers.
        """
        if self.layers == layers:
            return
        means, variances = (
            [getattr(layer, name) for layer in layers] for name in ("running_mean", "running_var")
        )
        self.layers, self.running = layers, torch.stack([torch.cat(means), torch.cat(variances)])
        self.counts = torch.stack([layer.num_batches_tracked for layer in layers])
        self.latest = torch.cat([torch.zeros_like(self.running), torch.ones_like(self.running[:1])])
        sizes = [layer.num_features for layer in layers]
        parts = zip(
            layers,
            self.running.split(sizes, 1),
            self.counts,
            self.latest.split(sizes, 1),
            strict=True,
        )
        for layer, running, count, latest in parts:
            layer.running_mean, layer.running_var = running
            layer.num_batches_tracked, layer.latest = count, latest
            # With versions of their own: backward passes don't read what batch norm wrote there.
            layer.rows = latest.data.unbind()

    def clear(self) -> None:
        """Forget what layers have collected."""
        if self.has_collected:
            torch._foreach_zero_([layer.collected for layer in self.layers])
        self.pending.clear()
        self.has_collected = False

    def note(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if model.training:  # an export to any batch size must not ask for the length
            self.samples = len(next(iter(args or kwargs.values())))


def convert(model: nn.Module, mode: str, *, group_size: int = 0) -> int:
    """Turn every batch norm of `model` into a `StepBatchNorm` of a mode of `DESCRIPTIONS`, in
    place; returns their number.

    Parameters, buffers, hooks and state_dict keys stay, so weights can be exchanged with the plain
    model. With mode "node" this is a collective. With "group" the model's first input must be as
    long as the micro-batch, and `group_size` is the number of samples in a group, at least 2.
    Raises `Refused` for a batch norm of an unknown class.
    """
    step, layers = _Step(), []
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        if type(layer) not in CONVERTIBLE or layer.running_mean is None:
            raise Refused(
                f"{name} ({layer}) can't be converted: needs a known batch norm with running "
                "statistics"
            )
        collected = layer.running_mean.new_zeros(3, layer.num_features)
        change_class(layer, StepBatchNorm)
        layer.mode, layer.group_size, layer.step, layer.activates = (
            mode,
            group_size,
            step,
            hasattr(layer, "act"),
        )
        layer.collected, layer.rows = collected, ()
        layers.append(layer)
    model.step_batch_norms = layers  # walking through a large model takes 0.1 ms per step
    if mode == "group" and layers:
        model.register_forward_pre_hook(step.note, with_kwargs=True)
    if mode == "node":
        node_group()  # all ranks make it here, not in the middle of a forward
    return len(layers)


@contextlib.contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """In this context, `node` and `global` normalise by this rank's own samples and wait for no other rank.

    For a trial that some ranks may leave by an exception. On a GPU it takes the same memory as
    sharing; on the CPU sharing needs a few copies of one layer's activations more.
    """
    shared = {layer: layer.mode for layer in _collecting(model) if layer.mode in ("node", "global")}
    for layer in shared:
        layer.mode = "alone"
    try:
        yield
    finally:
        for layer, mode in shared.items():
            layer.mode = mode


def freeze(*modules: nn.Module) -> None:
    """Freeze parts of a model after `convert`: their weights stay, and so do the statistics of
    their batch norms.
    """
    for module in modules:
        module.requires_grad_(False)
        for layer in module.modules():
            if isinstance(layer, _BatchNorm) and not isinstance(layer, StepBatchNorm):
                raise Refused(
                    "batch_norm.freeze was called before batch_norm.convert: call it after that"
                )
            if isinstance(layer, StepBatchNorm):
                layer.mode = "frozen"


def unit(model: nn.Module) -> int:
    """Consecutive samples that `model` normalises together, so that they stay on one rank: 1, or a group."""
    return max(
        (layer.group_size for layer in _collecting(model) if layer.mode == "group"), default=1
    )


def undivided_for(model: nn.Module) -> str:
    """The flag that needs the whole share of a process at once, if the layers of `model` do; else ""."""
    modes = {layer.mode for layer in _collecting(model)} & {"node", "global"}
    return f"--batch_norm {modes.pop()}" if modes else ""


def describe(model: nn.Module) -> str:
    """The mode of a converted model and its meaning, and how many layers are frozen or only half
    frozen, for people.
    """
    layers = model.step_batch_norms
    if not layers:
        return "none in this model: the same on every layout"
    moving = [layer for layer in layers if layer.mode != "frozen"]
    if not moving and not any(
        layer.weight is not None and layer.weight.requires_grad for layer in layers
    ):
        return "frozen: all layers are in frozen stages"
    mode = moving[0].mode if moving else "frozen"
    text = f"{mode}: {DESCRIPTIONS[mode]}"
    if moving and len(moving) < len(layers):
        text += f"; {len(layers) - len(moving)} of {len(layers)} layers are frozen"
    if half := sum(layer.weight is not None and not layer.weight.requires_grad for layer in moving):
        text += (
            f"; {half} layers whose weights are not trained have statistics that move: "
            "batch_norm.freeze(...) stops both"
        )
    return text


@torch.no_grad()
def update_running_statistics(model: nn.Module) -> None:
    """Update the running statistics with those that the step's forwards collected; once per
    optimizer step, on all ranks.

    Each group, micro-batch or shared batch of the step has the same weight, and so has its second
    forward under gradient checkpointing. A layer that no rank used keeps its statistics. One
    collective for all layers; none if there are no layers.
    """
    layers = _collecting(model)
    if not layers:
        return
    step = layers[0].step
    if step.layers == layers and len(step.pending) == len(layers) and not step.has_collected:
        sums = step.latest
    else:
        for layer in step.pending:
            layer._collect(layer.latest)
        # [3, channels of all]
        sums, step.has_collected = torch.cat([layer.collected for layer in layers], dim=1), True
        step.join(layers)
    if is_distributed():
        dist.all_reduce(sums := sums.clone())
    collected = sums[:2] if sums is step.latest else sums[:2] / sums[2]
    # Not finite: a layer that was not used, or an fp16 overflow, where the optimizer skips the step
    # as well.
    collected = torch.where(
        collected.abs() < math.inf, collected, step.running, out=step.latest[:2]
    )
    step.counts += 1
    # Momentum None means the average over all steps; reading the count waits for the device.
    momenta = [
        1 / int(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        for layer in layers
    ]
    if len({*momenta}) == 1:
        step.running.lerp_(collected, momenta[0])
    else:
        sizes = [layer.num_features for layer in layers]
        torch._foreach_lerp_([*step.running.split(sizes, 1)], [*collected.split(sizes, 1)], momenta)
    step.clear()


@torch.no_grad()
def discard_statistics(model: nn.Module) -> None:
    """Discard what forwards collected since the last update, as after a warm-up, which is no step.
    No communication.
    """
    if layers := _collecting(model):
        layers[0].step.join(layers)
        layers[0].step.latest[:2].zero_()  # what is not finite would stay
        layers[0].step.has_collected = True
        layers[0].step.clear()


def _collecting(model: nn.Module) -> list[StepBatchNorm]:
    # A deepcopy of a converted model has its own list.
    modules = getattr(model, "step_batch_norms", model.modules())
    return [
        module
        for module in modules
        if isinstance(module, StepBatchNorm) and module.mode != "frozen"
    ]
