"""Optimizer, learning rate schedule, gradient clipping and moving average of the weights."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import compress
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
from common.config.parsing import nearest
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
from common.training.parts import parts

# Optimizers of torch in timm's factory, which have a fused form: 6 times as fast, and no host sync
# under fp16. Torch has no fused kernel for the shards of the last two.
_FUSED, _FUSED_UNLESS_IN_SHARDS = {"adam", "adamw"}, {"sgd", "momentum"}
# Kron has a random generator of its own and keeps lists of tensors; AdaHessian needs second
# derivatives.
_UNFIT = ["kron*", "adahessian"]
# Optimizers whose step on shards equals the step on whole weights within 1e-10 in float64; a test
# has the table.
ON_SHARDS = {
    *(
        "adabelief adadelta adagrad adam adamax adamc adamw adamwlegacy adan adanw adopt adoptc "
        "adoptw lamb lambc"
    ).split(),
    *(
        "lambcd lambcw lambw larc lars madgrad madgradw momentum muon nadam nadamc nadamlegacy "
        "nadamw nesterov"
    ).split(),
    *(
        "nesterovw nlarc nlars nmuon radabelief radam radamlegacy radamw rmsprop rmsproptf "
        "rmsproptfc rmsproptfw"
    ).split(),
    *"sgd sgdc sgdw".split(),
}


_BUILT: WeakSet[torch.optim.Optimizer] = WeakSet()  # optimizers that flags have made


def build_optimizer(config: OptimizationConfig, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of timm's factory over the trainable parameters of `model`.

    Norms, biases and what `model.no_weight_decay()` names have no weight decay. With `layer_decay`
    or a factor of a part's rate, parameter groups have an `lr_scale`. Raises `Refused` for an
    unknown name or part.
    """
    name, known = config.opt.lower(), timm.optim.list_optimizers(exclude_filters=_UNFIT)
    if name not in known:
        raise Refused(
            f"--opt {config.opt}: not an optimizer of timm that fits here{nearest(name, known)}"
        )
    in_shards = has_shards(model)
    # Lamb's norm of all gradients takes them whole or in shards, but not some of each.
    on_shards = (
        ON_SHARDS
        if is_sharded(model)
        else {each for each in ON_SHARDS if not each.startswith("lamb")}
    )
    if in_shards and name not in on_shards:
        told = f"--opt {config.opt}: its step on a shard differs from its step on whole weights"
        raise Refused(f"{told}; a sharded run takes {', '.join(sorted(on_shards))}")
    fused = _FUSED if in_shards else _FUSED | _FUSED_UNLESS_IN_SHARDS
    if in_shards:
        orthogonalize_shards(get_full_tensor, shard_like)
    try:
        optimizer = timm.optim.create_optimizer_v2(
            model,
            opt=name,
            lr=peak_learning_rate(config),
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            param_group_fn=partial(_groups, config),
            **({"fused": True} if name in fused else {}),
        )
    except (ImportError, AssertionError, TypeError, ValueError, RuntimeError) as error:
        told = f"--opt {config.opt}: can't be built here ({error})"
        raise Refused(f"{told}; adamw, sgd, lion and lamb always can") from None
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["fused"]:
        optimizer.register_step_pre_hook(_begin_momentum)
    _BUILT.add(optimizer)
    return optimizer


def _begin_momentum(optimizer: torch.optim.SGD, *_) -> None:
    """Initialise each momentum with 0, which gives the same first step as no momentum.

    torch's fused SGD begins with uninitialised memory, which the next step would read if fp16 skips
    the first one.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _groups(config: OptimizationConfig, model: nn.Module) -> list[dict]:
    """Parameters with the same weight decay and the same factor of the learning rate."""
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    options = {"weight_decay": config.weight_decay, "no_weight_decay_list": exempt}
    if config.layer_decay < 1:
        if not any(map(partial(hasattr, model), ("group_matcher", "pretrained_cfg", "backbone"))):
            told = (
                f"--layer_decay {config.layer_decay}: {type(model).__name__} does not say which "
                "parameters form a layer"
            )
            raise Refused(
                f"{told}; give it a method group_matcher() as timm's models have, or leave the "
                "flag out"
            )
        groups = param_groups_layer_decay(model, layer_decay=config.layer_decay, **options)
    else:
        groups = param_groups_weight_decay(model, **options)
    # Their parameters may be in shards beside whole ones, which no group may mix.
    self_sharded: set[int] = set()
    for module in model.modules():
        if isinstance(module, SelfSharded):
            self_sharded.update(map(id, module.parameters()))
    groups = [group for _, group in _split(groups, self_sharded.__contains__)]
    factors = lr_factors(config)
    if set(factors.values()) == {1}:
        return groups
    found = parts(model)
    if config.neck_lr_factor != 1 and not found["neck"]:
        raise Refused(
            f"--neck_lr_factor {config.neck_lr_factor}: {type(model).__name__} has no neck; leave "
            "it out"
        )
    groups = _split(
        groups, {id(parameter): factors[part] for part in found for parameter in found[part]}.get
    )
    return [group | {"lr_scale": factor * group.get("lr_scale", 1.0)} for factor, group in groups]


def _split(groups: list[dict], key: Callable[[int], Any]) -> list[tuple[Any, dict]]:
    """The groups, divided by `key(id(parameter))`, with that key."""
    divided = []
    for group in groups:
        parts: dict[Any, list] = {}
        for parameter in group["params"]:
            parts.setdefault(key(id(parameter)), []).append(parameter)
        divided += [(value, group | {"params": part}) for value, part in parts.items()]
    return divided


def lr_factors(config: OptimizationConfig) -> dict[str, float]:
    """Factor of the learning rate of each part of a model."""
    return {
        "backbone": config.backbone_lr_factor,
        "neck": config.neck_lr_factor,
        "head": config.head_lr_factor,
    }


def describe(
    config: OptimizationConfig,
    model: nn.Module,
    schedule: Callable[[int], float],
    optimizers: Sequence[torch.optim.Optimizer],
    total_steps: int,
) -> str:
    """Learning rate, schedule and optimizers of a run, for people; of the flags only those that made them."""
    names = [
        config.opt if optimizer in _BUILT else _describe_optimizer(optimizer)
        for optimizer in optimizers
    ]
    text = f"{_describe_schedule(schedule, total_steps)}, {' and '.join(names)}"
    if not any(optimizer in _BUILT for optimizer in optimizers):
        return text
    peak = peak_learning_rate(config)
    factors = lr_factors(config)
    if len(set(factors.values())) > 1:
        rates = [
            f"{part} {peak * factors[part]:.4g}"
            for part, of_part in parts(model).items()
            if of_part
        ]
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


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Class and hyperparameters, as in `RMSprop (alpha 0.99, momentum 0)`, of an optimizer that no
    flag has made.
    """
    values = []
    for name, value in optimizer.defaults.items():
        is_switch = value is None or isinstance(value, bool)
        if name not in ("lr", "lr_scale") and not is_switch:
            values.append(f"{name} {value}")
    return f"{type(optimizer).__name__} ({', '.join(values)})"


def peak_learning_rate(config: Any) -> float:
    """`lr` scaled from its reference batch to the run's global batch (Goyal et al., 2017;
    Krizhevsky, 2014).
    """
    ratio = config.global_batch_size / config.lr_batch_size
    return config.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a pure function of the step, for a run of `total_steps`."""

    config: OptimizationConfig
    stream: Stream
    total_steps: int

    def __post_init__(self) -> None:
        with suppress(ValueError):
            if all(0 < float(epochs) < math.inf for epochs in self.config.step_epochs.split(",")):
                return
        told = f"--step_epochs {self.config.step_epochs}: must be epochs above 0"
        raise Refused(f"{told}, such as 30, or 8,11 for each fall")

    @property
    def peak(self) -> float:
        return peak_learning_rate(self.config)

    def __call__(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        config, peak = self.config, self.peak
        warmup = min(self.stream.steps(config.warmup_epochs), self.total_steps)
        if step < warmup:
            return peak * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.total_steps - warmup)
        least = peak * config.min_lr_ratio
        if config.schedule == "cosine":
            return least + (peak - least) * (1 + math.cos(math.pi * progress)) / 2
        if config.schedule == "linear":
            return least + (peak - least) * (1 - progress)
        if config.schedule == "step":
            at = [
                max(1, self.stream.steps(float(epochs))) for epochs in config.step_epochs.split(",")
            ]
            return peak * config.step_factor ** (
                step // at[0] if len(at) == 1 else sum(step >= fall for fall in at)
            )
        return peak


def build_schedule(config: Any, stream: Stream) -> Schedule:
    """The schedule that the flags name, for a run of `count_steps`."""
    return Schedule(config, stream, count_steps(config, stream))


def count_steps(config: Any, stream: Stream) -> int:
    """The length of a run: `--max_steps`, or else `--epochs` in whole steps, rounded up; two steps
    for `--dry_run`.
    """
    steps = config.max_steps or stream.steps(config.epochs)
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
            common = optimizer.defaults.get("lr")
            group["lr_scale"] = float(group["lr"] / common) if common else 1.0
        group["lr"] = rate * group["lr_scale"]


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, mode: str) -> Tensor:
    """Clip in place if `limit` > 0, and return the global L2 norm before clipping: a scalar on the
    device, without a wait.

    Mode `norm` scales all gradients together (Pascanu et al., 2013), `agc` each unit's by the norm
    of its weights (adaptive gradient clipping: Brock et al., 2021).
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None]
    )
    if limit and mode == "agc":
        in_shards = any(isinstance(parameter, DTensor) for parameter in parameters)
        (_clip_sharded_units if in_shards else adaptive_clip_grad)(parameters, limit)
    elif limit:
        for part in group_by_mesh(parameters):
            nn.utils.clip_grads_with_norm_(part, limit, norm)
    return norm


def unscale_gradients(
    accelerator: Accelerator, optimizers: Sequence, parameters: Iterable[nn.Parameter]
) -> None:
    """Under fp16 undo the loss scale. If a gradient overflows on any rank, all ranks will skip the step.

    torch's scaler does not take whole gradients beside those in shards. So it does not see the
    latter, whose overflow is carried over to a whole gradient, which all ranks have.
    """
    if not accelerator.scaler:
        accelerator.unscale_gradients(optimizers)
        return
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    in_shards = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if len(in_shards) in (0, len(parameters)):
        accelerator.unscale_gradients(optimizers)
        return
    gradients: list[Any] = [parameter.grad for parameter in in_shards]
    for parameter in in_shards:
        parameter.grad = None
    carrier: Any = next(parameter.grad for parameter in parameters if parameter.grad is not None)
    for gradient in gradients:
        carrier += 0 * all_sum(get_local_tensor(gradient).sum())  # NaN if one number is not finite
    scale = accelerator.scaler.scale(torch.ones((), device=carrier.device))
    accelerator.unscale_gradients(optimizers)
    for parameter, gradient in zip(in_shards, gradients, strict=True):
        parameter.grad = gradient.div_(scale)


def _clip_sharded_units(parameters: list[nn.Parameter], limit: float) -> None:
    """timm's `adaptive_clip_grad` of parameters in shards, which have whole rows of weights, but
    parts of a vector.
    """
    pairs: list[Any] = [(parameter.detach(), parameter.grad) for parameter in parameters]
    vectors = [tensor.norm() for pair in pairs for tensor in pair if tensor.ndim < 2]
    norms = iter(get_full_tensor(torch.stack(vectors)) if vectors else ())
    for pair in pairs:
        of_weight, of_gradient = (
            next(norms) if tensor.ndim < 2 else unitwise_norm(get_local_tensor(tensor))
            for tensor in pair
        )
        highest, gradient = of_weight.clamp(min=1e-3) * limit, get_local_tensor(pair[1])
        clipped = gradient * (highest / of_gradient.clamp(min=1e-6))
        gradient.copy_(torch.where(of_gradient < highest, gradient, clipped))


def build_ema(config: OptimizationConfig, model: nn.Module) -> ModelEmaV3 | None:
    """timm's exponential moving average of weights and buffers, or None. Its decay warms up with the step.

    Build it before Accelerate prepares the model: a copy of a prepared model would run the
    original's forward.
    """
    if not config.ema_decay:
        return None
    average = ShardedAverage if is_sharded(model) else ModelEmaV3
    return average(model, decay=config.ema_decay, use_warmup=True)


class ShardedAverage(ModelEmaV3):
    """timm's moving average of a sharded model, in shards, too."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(nn.Linear(1, 1), **options)
        self.module = clone_model(model).eval()

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        mine, theirs = (
            [*map(get_local_tensor, module.state_dict().values())]
            for module in (self.module, model)
        )
        floats = [tensor.is_floating_point() for tensor in mine]
        torch._foreach_lerp_(
            [*compress(mine, floats)], [*compress(theirs, floats)], weight=1 - decay
        )
        for average, newest in zip(mine, theirs, strict=True):
            if not average.is_floating_point():
                average.copy_(newest)
