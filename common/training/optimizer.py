"""Optimizer, learning rate schedule, gradient clipping and moving average of the weights."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import timm.optim
import torch
from accelerate import Accelerator
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.utils import ModelEmaV3
from timm.utils.agc import adaptive_clip_grad, unitwise_norm
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.config.fields import OptimizationConfig
from common.config.parsing import suggest_names
from common.data.stream import Stream
from common.distributed.collectives import all_sum
from common.distributed.sharding import (
    SelfSharded,
    clone_model,
    get_full_tensor,
    get_local_tensor,
    get_total_norm,
    group_by_mesh,
    has_shards,
    is_sharded,
    shard_like,
)
from common.errors import Refused
from common.patches.timm import orthogonalize_shards
from common.training.parts import group_parameters

# Optimizers of torch in timm's factory, which have a fused form: 6 times as fast, and no host sync
# under fp16.
_FUSED = {"adam", "adamw", "sgd", "momentum"}
_FUSED_ON_SHARDS = {"adam", "adamw"}  # torch has no fused kernel of SGD for shards
# Kron has a random generator of its own and keeps lists of tensors; AdaHessian needs second
# derivatives.
_UNSUPPORTED = ["kron*", "adahessian"]
# Optimizers whose step on shards equals the step on whole weights within 1e-10 in float64; a test
# has the table.
ON_SHARDS = set(
    """
    adabelief adadelta adagrad adam adamax adamc adamw adamwlegacy adan adanw adopt adoptc adoptw
    lamb lambc lambcd lambcw lambw larc lars madgrad madgradw momentum muon nadam nadamc
    nadamlegacy nadamw nesterov nesterovw nlarc nlars nmuon radabelief radam radamlegacy radamw
    rmsprop rmsproptf rmsproptfc rmsproptfw sgd sgdc sgdw
    """.split()
)

_BUILT: WeakSet[torch.optim.Optimizer] = WeakSet()  # optimizers that flags have made


def build_optimizer(config: OptimizationConfig, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of timm's factory over the trainable parameters of `model`.

    Norms, biases and what `model.no_weight_decay()` names have no weight decay. With `layer_decay`
    or a factor of a part's rate, parameter groups have an `lr_scale`. Raises `Refused` for an
    unknown name or part.
    """
    name = config.opt.lower()
    supported = timm.optim.list_optimizers(exclude_filters=_UNSUPPORTED)
    if name not in supported:
        advice = suggest_names(name, supported)
        raise Refused(f"--opt {config.opt}: not an optimizer of timm that fits here{advice}")
    fused_names = _FUSED
    if has_shards(model):
        _check_shardable(config.opt, model)
        fused_names = _FUSED_ON_SHARDS
        orthogonalize_shards(get_full_tensor, shard_like)
    options = {"fused": True} if name in fused_names else {}
    try:
        optimizer = timm.optim.create_optimizer_v2(
            model,
            opt=name,
            lr=compute_peak_lr(config),
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            param_group_fn=partial(_build_param_groups, config),
            **options,
        )
    except (ImportError, AssertionError, TypeError, ValueError, RuntimeError) as error:
        raise Refused(
            f"--opt {config.opt}: can't be built here ({error}); adamw, sgd, lion and lamb always "
            "can"
        ) from None
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["fused"]:
        optimizer.register_step_pre_hook(_init_momentum)
    _BUILT.add(optimizer)
    return optimizer


def _check_shardable(opt: str, model: nn.Module) -> None:
    """Raise `Refused` if the step of an optimizer on a shard differs from its step on whole weights."""
    allowed = ON_SHARDS
    if not is_sharded(model):
        # Lamb's norm of all gradients takes them whole or in shards, but not some of each.
        allowed = {name for name in ON_SHARDS if not name.startswith("lamb")}
    if opt.lower() not in allowed:
        raise Refused(
            f"--opt {opt}: its step on a shard differs from its step on whole weights; a sharded "
            f"run takes {', '.join(sorted(allowed))}"
        )


def _init_momentum(optimizer: torch.optim.SGD, *_) -> None:
    """Initialise each momentum with 0, which gives the same first step as no momentum.

    torch's fused SGD begins with uninitialised memory, which the next step would read if fp16 skips
    the first one.
    """
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _build_param_groups(config: OptimizationConfig, model: nn.Module) -> list[dict]:
    """Parameters with the same weight decay and the same factor of the learning rate."""
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    options = {"weight_decay": config.weight_decay, "no_weight_decay_list": exempt}
    if config.layer_decay < 1:
        _check_has_layers(config, model)
        groups = param_groups_layer_decay(model, layer_decay=config.layer_decay, **options)
    else:
        groups = param_groups_weight_decay(model, **options)
    # Their parameters may be in shards beside whole ones, which no group may mix.
    self_sharded: set[int] = set()
    for module in model.modules():
        if isinstance(module, SelfSharded):
            for parameter in module.parameters():
                self_sharded.add(id(parameter))
    groups = [group for _, group in _split_groups(groups, self_sharded.__contains__)]
    factors = get_lr_factors(config)
    if set(factors.values()) == {1}:
        return groups
    parameters_by_part = group_parameters(model)
    if config.neck_lr_factor != 1 and not parameters_by_part["neck"]:
        raise Refused(
            f"--neck_lr_factor {config.neck_lr_factor}: {type(model).__name__} has no neck; leave "
            "it out"
        )
    factor_by_id = {}
    for part, parameters in parameters_by_part.items():
        for parameter in parameters:
            factor_by_id[id(parameter)] = factors[part]
    scaled_groups = []
    for factor, group in _split_groups(groups, factor_by_id.get):
        lr_scale = factor * group.get("lr_scale", 1.0)
        scaled_groups.append(group | {"lr_scale": lr_scale})
    return scaled_groups


def _check_has_layers(config: OptimizationConfig, model: nn.Module) -> None:
    if not any(hasattr(model, name) for name in ("group_matcher", "pretrained_cfg", "backbone")):
        raise Refused(
            f"--layer_decay {config.layer_decay}: {type(model).__name__} does not say which "
            "parameters form a layer; give it a method group_matcher() as timm's models have, or "
            "leave the flag out"
        )


def _split_groups(groups: list[dict], get_key: Callable[[int], Any]) -> list[tuple[Any, dict]]:
    """The groups, split by `get_key(id(parameter))`, each with that key."""
    split = []
    for group in groups:
        parameters_by_key: dict[Any, list] = {}
        for parameter in group["params"]:
            parameters_by_key.setdefault(get_key(id(parameter)), []).append(parameter)
        for key, parameters in parameters_by_key.items():
            split.append((key, group | {"params": parameters}))
    return split


def get_lr_factors(config: OptimizationConfig) -> dict[str, float]:
    """Factor of the learning rate of each part of a model."""
    return {
        "backbone": config.backbone_lr_factor,
        "neck": config.neck_lr_factor,
        "head": config.head_lr_factor,
    }


def describe_optimization(
    config: OptimizationConfig,
    model: nn.Module,
    schedule: Callable[[int], float],
    optimizers: Sequence[torch.optim.Optimizer],
    total_steps: int,
) -> str:
    """Learning rate, schedule and optimizers of a run, for people.

    Of the flags it has only those that made one of the optimizers.
    """
    names = [_describe_optimizer(optimizer, config.opt) for optimizer in optimizers]
    text = f"{_describe_schedule(schedule, total_steps)}, {' and '.join(names)}"
    if _BUILT.isdisjoint(optimizers):
        return text
    peak = compute_peak_lr(config)
    factors = get_lr_factors(config)
    if len(set(factors.values())) > 1:
        rates = []
        for part, parameters in group_parameters(model).items():
            if parameters:
                rates.append(f"{part} {peak * factors[part]:.4g}")
        text += f"; {', '.join(rates)}"
    if config.layer_decay < 1:
        text += f"; times {config.layer_decay:g} per layer from the head down"
    return text


def _describe_schedule(schedule: Callable[[int], float], total_steps: int) -> str:
    if isinstance(schedule, Schedule):
        return f"{schedule.peak:.4g}, {schedule.config.schedule}"
    stride = max(1, total_steps // 1000)
    highest = max(float(schedule(step)) for step in range(0, total_steps, stride))
    name = getattr(schedule, "__name__", type(schedule).__name__)
    first = float(schedule(0))
    last = float(schedule(total_steps - 1))
    return f"{first:.4g} to {highest:.4g} to {last:.4g} by {name}"


def _describe_optimizer(optimizer: torch.optim.Optimizer, opt: str) -> str:
    """`opt` if the flags made the optimizer, else its class and hyperparameters.

    These are as in `RMSprop (alpha 0.99, momentum 0)`.
    """
    if optimizer in _BUILT:
        return opt
    values = []
    for name, value in optimizer.defaults.items():
        is_switch = value is None or isinstance(value, bool)
        if name not in ("lr", "lr_scale") and not is_switch:
            values.append(f"{name} {value}")
    return f"{type(optimizer).__name__} ({', '.join(values)})"


def compute_peak_lr(config: Any) -> float:
    """`lr`, scaled from its reference batch to the run's global batch.

    Source: Goyal et al., 2017 (linear); Krizhevsky, 2014 (square root).
    """
    ratio = config.global_batch_size / config.lr_batch_size
    scale = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]
    return config.lr * scale


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a pure function of the step, for a run of `total_steps`."""

    config: OptimizationConfig
    stream: Stream
    total_steps: int

    def __post_init__(self) -> None:
        with suppress(ValueError):
            if all(0 < epochs < math.inf for epochs in self._parse_step_epochs()):
                return
        raise Refused(
            f"--step_epochs {self.config.step_epochs}: must be epochs above 0, such as 30 (a drop "
            "every 30 epochs) or 8,11 (a drop after each)"
        )

    def _parse_step_epochs(self) -> list[float]:
        return list(map(float, self.config.step_epochs.split(",")))

    @property
    def peak(self) -> float:
        return compute_peak_lr(self.config)

    def __call__(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        peak = self.peak
        warmup = min(self.stream.count_steps(self.config.warmup_epochs), self.total_steps)
        if step < warmup:
            return peak * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.total_steps - warmup)
        min_rate = peak * self.config.min_lr_ratio
        if self.config.schedule == "cosine":
            return min_rate + (peak - min_rate) * (1 + math.cos(math.pi * progress)) / 2
        if self.config.schedule == "linear":
            return min_rate + (peak - min_rate) * (1 - progress)
        if self.config.schedule == "step":
            return peak * self.config.step_factor ** self._count_falls(step)
        return peak

    def _count_falls(self, step: int) -> int:
        """How often the rate of a `step` schedule has fallen: every so many epochs, or after each."""
        all_epochs = self._parse_step_epochs()
        if len(all_epochs) == 1:
            return step // self._count_steps(all_epochs[0])
        return sum(step >= self._count_steps(epochs) for epochs in all_epochs)

    def _count_steps(self, epochs: float) -> int:
        return max(1, self.stream.count_steps(epochs))


def build_schedule(config: Any, stream: Stream) -> Schedule:
    """The schedule that the flags name, for a run of `count_steps`."""
    return Schedule(config, stream, count_steps(config, stream))


def count_steps(config: Any, stream: Stream) -> int:
    """The length of a run: `--max_steps`, or else `--epochs` in whole steps, rounded up.

    Two steps for `--dry_run`.
    """
    steps = config.max_steps or stream.count_steps(config.epochs)
    if steps < 1:
        raise Refused(
            f"--epochs {config.epochs}: no step to make; train longer, or take --eval_only"
        )
    return min(2, steps) if config.dry_run else steps


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every parameter group to `rate` times the group's `lr_scale`.

    A group without `lr_scale`, but with a rate of its own as in `{"params": ..., "lr": 1e-4}`,
    keeps its ratio to the optimizer's rate.
    """
    for group in optimizer.param_groups:
        # In the first step, when the group still has the rate it was built with.
        if "lr_scale" not in group:
            default_rate = optimizer.defaults.get("lr")
            group["lr_scale"] = float(group["lr"] / default_rate) if default_rate else 1.0
        group["lr"] = rate * group["lr_scale"]


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, mode: str) -> Tensor:
    """Clip in place if `limit` > 0, and return the global L2 norm before clipping.

    The norm is a scalar on the device, without a wait. Mode `norm` scales all gradients together
    (Pascanu et al., 2013), `agc` each unit's by the norm of its weights (adaptive gradient
    clipping: Brock et al., 2021).
    """
    clipped: list[nn.Parameter] = []
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            clipped.append(parameter)
            gradients.append(parameter.grad)
    norm = get_total_norm(gradients)
    if limit and mode == "agc":
        if any(isinstance(parameter, DTensor) for parameter in clipped):
            _clip_sharded_units(clipped, limit)
        else:
            adaptive_clip_grad(clipped, limit)
    elif limit:
        for subset in group_by_mesh(clipped):
            nn.utils.clip_grads_with_norm_(subset, limit, norm)
    return norm


def unscale_gradients(
    accelerator: Accelerator, optimizers: Sequence, parameters: Iterable[nn.Parameter]
) -> None:
    """Undo the loss scale under fp16. If a gradient overflows on any rank, all ranks will skip the step.

    torch's scaler does not take whole gradients beside those in shards. So it does not see the
    latter, whose overflow is carried over to a whole gradient, which all ranks have.
    """
    if not accelerator.scaler:
        accelerator.unscale_gradients(optimizers)
        return
    in_shards: list[Any] = []
    whole_gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if isinstance(parameter, DTensor):
            in_shards.append(parameter)
        else:
            whole_gradients.append(parameter.grad)
    if not in_shards or not whole_gradients:
        accelerator.unscale_gradients(optimizers)
        return
    gradients = []
    for parameter in in_shards:
        gradients.append(parameter.grad)
        parameter.grad = None
    carrier = whole_gradients[0]
    for gradient in gradients:
        carrier += 0 * all_sum(get_local_tensor(gradient).sum())  # NaN if one value is not finite
    scale = accelerator.scaler.scale(torch.ones((), device=carrier.device))
    accelerator.unscale_gradients(optimizers)
    for parameter, gradient in zip(in_shards, gradients, strict=True):
        parameter.grad = gradient.div_(scale)


def _clip_sharded_units(parameters: list[nn.Parameter], limit: float) -> None:
    """timm's `adaptive_clip_grad` of parameters in shards.

    A shard has whole rows of a weight, but only a chunk of a vector, so norms of vectors are
    gathered: one collective.
    """
    pairs: list[tuple[Any, Any]] = [(weight.detach(), weight.grad) for weight in parameters]
    vector_norms: list[Tensor] = []
    for weight, gradient in pairs:
        if weight.ndim < 2:
            vector_norms += [weight.norm(), gradient.norm()]
    gathered_norms = iter(get_full_tensor(torch.stack(vector_norms)) if vector_norms else ())
    for weight, sharded_gradient in pairs:
        gradient = get_local_tensor(sharded_gradient)
        if weight.ndim < 2:
            weight_norm = next(gathered_norms)
            gradient_norm = next(gathered_norms)
        else:
            weight_norm = unitwise_norm(get_local_tensor(weight))
            gradient_norm = unitwise_norm(gradient)
        max_norm = weight_norm.clamp(min=1e-3) * limit
        clipped = gradient * (max_norm / gradient_norm.clamp(min=1e-6))
        gradient.copy_(torch.where(gradient_norm < max_norm, gradient, clipped))


def build_ema(config: OptimizationConfig, model: nn.Module) -> ModelEmaV3 | None:
    """timm's exponential moving average of weights and buffers, or None. Its decay warms up.

    Build it before Accelerate prepares the model: a copy of a prepared model would run the
    original's forward.
    """
    if not config.ema_decay:
        return None
    ema_class = ShardedEma if is_sharded(model) else ModelEmaV3
    return ema_class(model, decay=config.ema_decay, use_warmup=True)


class ShardedEma(ModelEmaV3):
    """timm's moving average of a sharded model, in shards, too."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(nn.Linear(1, 1), **options)
        self.module = clone_model(model).eval()

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        averages = []
        values = []
        ema_state = self.module.state_dict().values()
        for average, value in zip(ema_state, model.state_dict().values(), strict=True):
            if average.is_floating_point():
                averages.append(get_local_tensor(average))
                values.append(get_local_tensor(value))
            else:
                get_local_tensor(average).copy_(get_local_tensor(value))
        torch._foreach_lerp_(averages, values, weight=1 - decay)
