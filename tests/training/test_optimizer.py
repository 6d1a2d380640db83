"""Optimizers follow the published methods, at a learning rate that is a pure function of the step."""

import itertools
import math

import pytest
import timm
import torch
from timm.utils.agc import adaptive_clip_grad
from torch import nn

from common.data.stream import Stream
from common.errors import Refused
from common.training.optimizer import (
    Schedule,
    build_ema,
    build_optimizer,
    clip_gradients,
    compute_peak_lr,
    set_learning_rate,
)
from tests.training.small import Config


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(opt="adamww"),
            "--opt adamww: not an optimizer of timm that fits here; did you mean adamw",
        ),
        (dict(opt="kron"), "--opt kron: not an optimizer"),  # it draws from a generator of its own
        (
            dict(opt="bnblion"),
            "--opt bnblion: can't be built here .*; adamw, sgd, lion and lamb always can",
        ),
        (
            dict(layer_decay=0.5),
            "--layer_decay 0.5: Sequential does not say which parameters form a layer",
        ),
    ],
)
def test_an_optimizer_that_can_not_be_built_is_refused(options: dict, message: str) -> None:
    with pytest.raises(Refused, match=message):
        build_optimizer(Config(**options), build_network())


def test_layer_decay_slows_the_layers_from_the_head_down() -> None:
    """Norms, biases and what the model exempts do not decay, and what is frozen is not trained."""
    model = timm.create_model("test_vit", num_classes=3)
    frozen = next(iter(model.parameters())).requires_grad_(False)
    optimizer = build_optimizer(Config(weight_decay=0.05, layer_decay=0.5), model)
    set_learning_rate(optimizer, 0.1)
    group_by_id = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            group_by_id[id(parameter)] = group
    depth = len(model.blocks)
    rates = {}
    for name, parameter in model.named_parameters():
        if parameter is not frozen:
            group = group_by_id[id(parameter)]
            is_exempt = parameter.ndim <= 1 or name in model.no_weight_decay()
            assert group["weight_decay"] == (0.0 if is_exempt else 0.05), name
            rates[name] = group["lr"]
    assert id(frozen) not in group_by_id
    assert len(group_by_id) == len(rates)
    assert rates["head.weight"] == 0.1
    assert rates["patch_embed.proj.weight"] == 0.1 * 0.5 ** (depth + 1)
    for block in range(depth):
        assert rates[f"blocks.{block}.attn.qkv.weight"] == 0.1 * 0.5 ** (depth - block)
    plain = build_optimizer(Config(weight_decay=0.05), build_network())
    assert [(len(group["params"]), group["weight_decay"]) for group in plain.param_groups] == [
        (4, 0.0),
        (2, 0.05),
    ]


def test_a_group_with_a_rate_of_its_own_keeps_its_ratio() -> None:
    """As torch's own optimizers take it, in every step: another rate would be another training."""
    first, *_, last = build_network().parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1e-4}, {"params": [last]}], lr=1e-2)
    for rate in (1e-2, 5e-3, 0.0, 1e-2):
        set_learning_rate(optimizer, rate)
        first_group, last_group = optimizer.param_groups
        assert first_group["lr"] == pytest.approx(rate / 100)
        assert last_group["lr"] == rate


STREAM = Stream(640, 64, 0)  # ten steps an epoch


def compute_rates(total: int, **options) -> list[float]:
    schedule = Schedule(Config(lr=1.0, **options), STREAM, total)
    return [schedule(step) for step in range(total)]


@pytest.mark.smoke
def test_a_cosine_falls_from_the_peak_to_its_minimum() -> None:
    values = compute_rates(50, warmup_epochs=1, min_lr_ratio=0.1)
    assert values[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert values[10] == 1
    assert values[30] == pytest.approx(0.55)  # half-way
    assert values[20] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert 0.1 < values[-1] < 0.102
    schedule = Schedule(Config(lr=1.0, min_lr_ratio=0.1), STREAM, 50)
    assert schedule(50) == pytest.approx(0.1)


@pytest.mark.parametrize("epochs", ["", "0", "-1", "8,", "8,x", "nan", "inf"])
def test_epochs_at_which_no_rate_can_fall_are_refused(epochs: str) -> None:
    with pytest.raises(Refused, match=f"^--step_epochs {epochs}: must be epochs above 0"):
        Schedule(Config(step_epochs=epochs), STREAM, 10)


@pytest.mark.parametrize("kind", ["cosine", "linear", "step", "constant"])
def test_every_rate_is_above_zero_and_at_most_the_peak(kind: str) -> None:
    for total, warmup in itertools.product((1, 2, 7, 50), (0.0, 0.1, 1.0, 30.0)):
        values = compute_rates(total, schedule=kind, warmup_epochs=warmup, step_epochs="5")
        assert all(0 < value <= 1 for value in values)
        rising = min(STREAM.count_steps(warmup), total)
        assert all(low < high for low, high in itertools.pairwise(values[:rising]))
        assert all(high >= low for high, low in itertools.pairwise(values[rising:]))


def test_schedules_and_the_peak_of_a_batch_size() -> None:
    assert compute_rates(20, schedule="linear", warmup_epochs=1)[10:] == pytest.approx(
        [1 - step / 10 for step in range(10)]
    )
    assert compute_rates(30, schedule="constant", warmup_epochs=1)[9:] == [1.0] * 21
    stairs = compute_rates(70, schedule="step", step_epochs="2", step_factor=0.5, warmup_epochs=1)
    assert stairs[10:20] == [1.0] * 10
    assert stairs[20:40] == [0.5] * 20
    assert stairs[60:] == [0.125] * 10
    milestones = compute_rates(70, schedule="step", step_epochs="4, 5.5", step_factor=0.1)
    assert milestones == pytest.approx([1.0] * 40 + [0.1] * 15 + [0.01] * 15)
    for scaling, expected in (("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)):
        config = Config(lr=0.1, lr_batch_size=64, global_batch_size=256, lr_scaling=scaling)
        assert compute_peak_lr(config) == pytest.approx(expected)


def get_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    "mode, limit, clip",
    [
        ("norm", 0.01, nn.utils.clip_grad_norm_),
        ("norm", 1e6, nn.utils.clip_grad_norm_),
        ("norm", 0, lambda parameters, limit: None),
        ("agc", 0.01, adaptive_clip_grad),
        ("agc", 0, lambda parameters, limit: None),
    ],
)
def test_clipping_is_that_of_torch_or_timm(mode: str, limit: float, clip) -> None:
    model = build_network()
    reference = build_network()
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for trained in (model, reference):
        nn.functional.cross_entropy(trained(images), torch.arange(8) % 5).backward()
        trained[0].weight.grad = None  # a parameter that was not used
    before = [gradient.clone() for gradient in get_gradients(reference)]
    clip(reference.parameters(), limit)
    norm = clip_gradients(model.parameters(), limit, mode)
    assert torch.equal(norm, nn.utils.get_total_norm(before))
    after = get_gradients(model)
    assert all(map(torch.equal, after, get_gradients(reference)))
    assert (limit == 0.01) != all(map(torch.equal, after, before))


def test_the_moving_average_begins_with_the_first_step() -> None:
    """decay(step) = min(decay, 1 - step ** (-2 / 3)), steps counted from 1."""
    model = nn.Linear(1, 1)
    average = build_ema(Config(ema_decay=0.5), model)
    expected = 0.0
    for step in range(1, 6):
        nn.init.constant_(model.weight, step**2)
        average.update(model, step)
        decay = min(0.5, 1 - step ** (-2 / 3))
        expected = decay * expected + (1 - decay) * step**2
        assert average.module.weight.item() == pytest.approx(expected)
