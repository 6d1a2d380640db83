"""Optimizers follow the published methods, at a learning rate that is a pure function of the step."""

import copy
import itertools
import math
from dataclasses import dataclass, replace

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.utils import ModelEmaV3
from timm.utils.agc import adaptive_clip_grad
from torch import nn

from common.config.fields import OptimizationConfig, RunConfig
from common.data.stream import Stream
from common.errors import Refused
from common.training.optimizer import (
    Schedule,
    build_ema,
    build_optimizer,
    clip_gradients,
    peak_learning_rate,
    set_learning_rate,
)


@dataclass
class Config(OptimizationConfig, RunConfig):
    """What every recipe has."""

    warmup_epochs: float = 0.0


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


def backward(model: nn.Module, seed: int = 0) -> float:
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(model(images), torch.arange(8) % 5)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("name", ["adamw", "sgd", "momentum", "lion", "lamb", "rmsprop", "adan", "adafactor", "muon"])
def test_an_optimizer_is_built_by_name_and_learns(name: str) -> None:
    model = network()
    rate = {"sgd": 0.1, "momentum": 0.1, "muon": 0.02}.get(name, 0.01)
    optimizer = build_optimizer(Config(opt=name.upper(), lr=rate), model)
    losses = []
    for _ in range(20):
        losses.append(backward(model))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    "options, told",
    [
        (dict(opt="adamww"), "--opt adamww: not an optimizer of timm that fits here; did you mean adamw"),
        (dict(opt="xyz"), "--opt xyz: not an optimizer of timm that fits here$"),
        (dict(opt="kron"), "--opt kron: not an optimizer"),  # it draws from a generator of its own
        (dict(opt="adahessian"), "--opt adahessian: not an optimizer"),  # it wants second derivatives
        (dict(opt="sgd", momentum=0.0), "--opt sgd: can't be built here .*[Nn]esterov"),
        (dict(opt="bnblion"), "--opt bnblion: can't be built here .*; adamw, sgd, lion and lamb always can"),
    ],
)
def test_an_optimizer_that_can_not_be_built_is_refused_in_one_line(options: dict, told: str) -> None:
    with pytest.raises(Refused, match=told) as raised:
        build_optimizer(Config(**options), network())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("architecture", ["test_vit", "test_resnet", "test_convnext"])
@pytest.mark.parametrize("layer_decay", [1.0, 0.7])
def test_norms_biases_and_what_the_model_exempts_do_not_decay(architecture: str, layer_decay: float) -> None:
    model = timm.create_model(architecture, num_classes=3)
    frozen = next(iter(model.parameters())).requires_grad_(False)
    optimizer = build_optimizer(Config(weight_decay=0.05, layer_decay=layer_decay), model)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(trained) == len(groups)
    assert id(frozen) not in groups
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    for name, parameter in trained.items():
        without = parameter.ndim <= 1 or name in exempt
        assert groups[id(parameter)]["weight_decay"] == (0.0 if without else 0.05), name


def test_layer_decay_slows_the_layers_from_the_head_down() -> None:
    model = timm.create_model("test_vit", num_classes=3)
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(Config(opt="momentum", momentum=0.0, weight_decay=0.0, layer_decay=0.5), model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    moved = {name: (before[name] - value).mean().item() for name, value in model.state_dict().items()}
    depth = len(model.blocks)
    assert moved["head.weight"] == pytest.approx(0.1, rel=1e-4)
    for block in range(depth):
        expected = 0.1 * 0.5 ** (depth - block)
        assert moved[f"blocks.{block}.attn.qkv.weight"] == pytest.approx(expected, rel=1e-3)
    assert moved["patch_embed.proj.weight"] == pytest.approx(0.1 * 0.5 ** (depth + 1), rel=1e-3)


def test_layer_decay_is_refused_for_a_module_that_does_not_tell_its_layers() -> None:
    build_optimizer(Config(), network())
    with pytest.raises(Refused, match=r"--layer_decay 0.5: Sequential does not say which parameters form a layer"):
        build_optimizer(Config(layer_decay=0.5), network())


class Detector(nn.Module):
    """A backbone of features and a pyramid, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({"features": nn.Conv2d(3, 4, 3), "fpn": nn.Conv2d(4, 4, 1)})
        self.backbone.trunk, self.head = self.backbone["features"], nn.Linear(4, 2)


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_the_backbone_takes_smaller_steps_than_what_stands_on_it(layer_decay: float) -> None:
    kinds = {"classifier": timm.create_model("test_resnet", num_classes=3), "detector": Detector()}
    for kind, model in kinds.items():
        plain, slow = (
            build_optimizer(Config(layer_decay=layer_decay, backbone_lr_factor=factor), model) for factor in (1.0, 0.1)
        )
        rates = []
        for optimizer in (plain, slow):
            set_learning_rate(optimizer, 1.0)
            groups = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
            rates.append({id(parameter): (group["lr"], group["weight_decay"]) for parameter, group in groups})
        for name, parameter in model.named_parameters():
            inside = name.startswith("backbone.features") if kind == "detector" else not name.startswith("fc.")
            (rate, decay), before = rates[1][id(parameter)], rates[0][id(parameter)]
            assert (rate, decay) == (pytest.approx(before[0] * (0.1 if inside else 1.0)), before[1]), name


def test_the_rate_of_a_step_reaches_every_group() -> None:
    optimizer = build_optimizer(Config(lr=1.0), network())
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25] * len(optimizer.param_groups)


def test_a_group_with_a_rate_of_its_own_keeps_its_ratio() -> None:
    """As torch's own optimizers take it, in every step; a rate of a step that replaced it would be another training."""
    (one, *_), (*_, other) = (network().parameters() for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 1e-4}, {"params": [other]}], lr=1e-2)
    for rate in (1e-2, 5e-3, 0.0, 1e-2):
        set_learning_rate(optimizer, rate)
        assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(rate / 100), rate]


@pytest.mark.parametrize("scaling, expected", [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_rate_follows_the_global_batch_as_asked(scaling: str, expected: float) -> None:
    config = Config(lr=0.1, lr_batch_size=64, global_batch_size=256, lr_scaling=scaling)
    assert peak_learning_rate(config) == pytest.approx(expected)


STREAM = Stream(640, 64, 0)  # ten steps an epoch


def rates(total: int, **options) -> list[float]:
    schedule = Schedule(Config(lr=1.0, **options), STREAM, total)
    return [schedule(step) for step in range(total)]


@pytest.mark.smoke
def test_a_cosine_begins_at_the_peak_after_the_warm_up_and_ends_at_its_least() -> None:
    values = rates(50, warmup_epochs=1, min_lr_ratio=0.1)
    assert values[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert values[10] == 1 and values[30] == pytest.approx(0.55)  # half-way
    assert values[20] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert 0.1 < values[-1] < 0.102 and Schedule(Config(lr=1.0, min_lr_ratio=0.1), STREAM, 50)(50) == pytest.approx(0.1)


def test_linear_constant_and_step_schedules() -> None:
    assert rates(20, schedule="linear", warmup_epochs=1)[10:] == pytest.approx([1 - step / 10 for step in range(10)])
    assert rates(30, schedule="constant", warmup_epochs=1)[9:] == [1.0] * 21
    stairs = rates(70, schedule="step", step_epochs="2", step_factor=0.5, warmup_epochs=1)
    assert stairs[10:20] == [1.0] * 10 and stairs[20:40] == [0.5] * 20 and stairs[60:] == [0.125] * 10
    milestones = rates(70, schedule="step", step_epochs="4, 5.5", step_factor=0.1)
    assert milestones == pytest.approx([1.0] * 40 + [0.1] * 15 + [0.01] * 15)


@pytest.mark.parametrize("epochs", ["", "0", "-1", "8,", "8,x", "nan", "inf"])
def test_epochs_at_which_no_rate_can_fall_are_refused_in_one_line(epochs: str) -> None:
    with pytest.raises(Refused, match=f"^--step_epochs {epochs}: must be epochs above 0"):
        Schedule(Config(step_epochs=epochs), STREAM, 10)


@given(
    st.sampled_from(["cosine", "linear", "step", "constant"]),
    st.integers(1, 400),
    st.decimals(0, 30, places=1),
    st.floats(0, 1),
    st.floats(1e-6, 10),
)
def test_every_schedule_is_positive_bounded_rising_then_falling_and_without_jumps(
    kind: str, total: int, warmup: float, least: float, peak: float
) -> None:
    config = Config(lr=peak, schedule=kind, warmup_epochs=float(warmup), min_lr_ratio=least, step_epochs="5")
    schedule = Schedule(config, STREAM, total)
    values = [schedule(step) for step in range(total)]
    assert values == [schedule(step) for step in reversed(range(total))][::-1]  # a function of the step alone
    assert all(0 < value <= peak * (1 + 1e-12) for value in values)
    rising = min(STREAM.steps(float(warmup)), total)
    assert all(low < high for low, high in itertools.pairwise(values[:rising]))
    if kind != "step":
        after = values[max(0, rising - 1) :]
        assert all(high >= low - 1e-12 * peak for high, low in itertools.pairwise(after))
        if rising < total and rising:
            assert values[rising] == pytest.approx(peak) == values[rising - 1]
        longest = peak * max(1 / max(1, rising), math.pi / 2 / max(1, total - rising)) * (1 + 1e-9)
        assert all(abs(high - low) <= longest for high, low in itertools.pairwise(values))


def test_a_longer_run_has_the_schedule_that_it_would_have_had_from_the_start() -> None:
    schedule = Schedule(Config(lr=1.0), STREAM, 50)
    assert replace(schedule, total_steps=100)(50) == pytest.approx(0.5)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_clipping_by_norm_is_torchs(limit: float) -> None:
    mine, theirs = network(), network()
    backward(mine), backward(theirs)
    mine[0].weight.grad = theirs[0].weight.grad = None  # a parameter that was not used
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    assert torch.equal(clip_gradients(mine.parameters(), limit, "norm"), expected)
    for one, other in zip(gradients(mine), gradients(theirs), strict=True):
        assert torch.equal(one, other)


def test_adaptive_clipping_is_timms_and_still_tells_the_norm_before_it() -> None:
    mine, theirs = network(), network()
    backward(mine), backward(theirs)
    expected = torch.nn.utils.get_total_norm(gradients(mine))
    adaptive_clip_grad(theirs.parameters(), 0.01)
    before = gradients(mine)
    assert torch.equal(clip_gradients(mine.parameters(), 0.01, "agc"), expected)
    for one, other in zip(gradients(mine), gradients(theirs), strict=True):
        assert torch.equal(one, other)
    assert not all(torch.equal(one, other) for one, other in zip(gradients(mine), before, strict=True))
    # Each unit's gradient is at most 0.01 of its weights' norm.
    weight = mine[0].weight
    assert (weight.grad.flatten(1).norm(dim=1) <= 0.01 * weight.flatten(1).norm(dim=1) * 1.001).all()


@pytest.mark.parametrize("mode", ["norm", "agc"])
def test_a_limit_of_zero_only_measures(mode: str) -> None:
    model = network()
    backward(model)
    before = gradients(model)
    norm = clip_gradients(model.parameters(), 0.0, mode)
    assert norm == torch.nn.utils.get_total_norm(before)
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), before, strict=True))


def test_an_overflow_shows_in_the_norm() -> None:
    model = network()
    backward(model)
    model[4].bias.grad[0] = float("inf")
    assert not clip_gradients(model.parameters(), 1.0, "norm").isfinite()


def test_the_moving_average_equals_its_formula() -> None:
    """decay(step) = min(decay, 1 - step ** (-2 / 3)), steps counted from 1: the first copies the weights."""
    model = network().double()
    ema = build_ema(Config(ema_decay=0.9), model)
    optimizer = build_optimizer(Config(opt="sgd", lr=0.1), model)
    expected: dict[str, torch.Tensor] = {}
    for step in range(1, 41):
        backward(model.float(), step)
        model.double()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model, step)
        decay = min(0.9, 1 - step ** (-2 / 3))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                expected[name] = value.clone() if step == 1 else decay * expected[name] + (1 - decay) * value
            else:
                expected[name] = value.clone()  # the count of batches
    for name, value in ema.module.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=1e-12, atol=1e-14), name
    assert not torch.equal(ema.module[0].weight, model[0].weight)


def test_the_moving_average_goes_on_from_its_weights_and_the_step_alone() -> None:
    models = [network() for _ in range(3)]
    whole, first = (ModelEmaV3(models[0], decay=0.99, use_warmup=True), build_ema(Config(ema_decay=0.99), models[0]))
    for step, model in enumerate(models, 1):
        with torch.no_grad():
            model[0].weight.add_(step)
        whole.update(model, step)
    first.update(models[0], 1), first.update(models[1], 2)
    resumed = build_ema(Config(ema_decay=0.99), network())
    resumed.module.load_state_dict(first.module.state_dict())
    resumed.update(models[2], 3)
    assert torch.equal(resumed.module[0].weight, whole.module[0].weight)


def test_without_a_decay_there_is_no_moving_average() -> None:
    assert build_ema(Config(), network()) is None
