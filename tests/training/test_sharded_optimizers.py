"""The optimizers that a sharded run takes make the step of whole weights; all others are refused."""

import copy
import itertools
import math

import pytest
import timm.optim
import torch
import torch.distributed as dist
from timm.utils.agc import adaptive_clip_grad
from torch import nn
from torch.distributed.tensor import distribute_tensor

from common.distributed import sharding
from common.errors import Refused
from common.training import optimizer as optimization
from common.training.optimizer import _UNSUPPORTED, ON_SHARDS, build_optimizer, clip_gradients
from tests.training.small import CLASSES, Config, build_vit

BATCH = 12
STEPS = 4
SHARES = {1: (12,), 2: (7, 5), 3: (5, 4, 3)}
# The long test looks at all of them.
USUAL = ("adamw", "sgd", "lamb", "lars", "adan", "rmsprop", "muon")
# Each rank decides by its own shard whether to begin a collective.
HANGS = {"adamp", "cadamp", "csgdp", "sgdp"}


def train(model: nn.Module, name: str, share: slice, scale: float) -> None:
    """Make some steps on a share of each batch."""
    config = Config(opt=name, lr=3e-3, clip=0.1)
    optimizer = build_optimizer(config, model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)[share]
        targets = torch.rand(BATCH, CLASSES, generator=generator, dtype=torch.float64)[share]
        loss = -(model(images).log_softmax(1) * targets).sum()
        (loss * scale / BATCH).backward()
        clip_gradients(list(model.parameters()), config.clip, "norm")
        optimizer.step()
        optimizer.zero_grad()


def measure_difference(name: str) -> float:
    """How far sharded weights are from whole ones, as a share of how far these moved.

    Infinite if there is no such step.
    """
    sharding.configure(sharding.Sharding(), torch.device("cpu"))
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    start = sum(SHARES[world_size][:rank])
    whole = build_vit(2)
    model = build_vit(2)
    sharding.shard_model(model, torch.float64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimization, "ON_SHARDS", {name})  # also those that are refused
            train(model, name, slice(start, start + SHARES[world_size][rank]), world_size)
    except Exception:
        return math.inf
    train(whole, name, slice(None), 1)
    difference = 0.0
    distance = 0.0
    for actual, expected, initial in zip(
        model.parameters(), whole.parameters(), build_vit(2).parameters(), strict=True
    ):
        difference += (sharding.get_full_tensor(actual.detach()) - expected).square().sum()
        distance += (expected - initial).square().sum()
    return (difference / distance).sqrt().item()


ON_2 = [(2, name) for name in USUAL]
ON_3 = [pytest.param(3, name, marks=pytest.mark.long) for name in sorted(ON_SHARDS)]


@pytest.mark.parametrize("ranks, name", ON_2 + ON_3)
def test_an_optimizer_makes_the_same_steps_on_shards(processes, ranks: int, name: str) -> None:
    assert name in ON_SHARDS
    assert max(processes.run(measure_difference, name, ranks=ranks)) <= 1e-10


OTHERS = set(timm.optim.list_optimizers(exclude_filters=_UNSUPPORTED)) - ON_SHARDS - HANGS


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_an_optimizer_outside_the_table_makes_other_steps(processes, name: str) -> None:
    assert max(processes.run(measure_difference, name, ranks=2)) > 1e-10


def check_refusal() -> None:
    sharding.configure(sharding.Sharding(), torch.device("cpu"))
    model = build_vit(2)
    sharding.shard_model(model, torch.float64)
    with pytest.raises(Refused, match=r"^--opt adamp: .* adamw, .*[^\n]$"):
        build_optimizer(Config(opt="adamp"), model)


def test_another_optimizer_is_refused_with_those_that_work(processes) -> None:
    processes.run(check_refusal, ranks=2)


def clip_units() -> float:
    """The largest difference between gradients that were clipped in shards and whole ones."""
    sharding.configure(sharding.Sharding(), torch.device("cpu"))
    whole = build_vit(2)
    with torch.no_grad():
        for scale, parameter in zip(itertools.cycle([1, 1e-3, 0]), whole.parameters()):
            parameter *= scale  # below the norm that a weight counts at least: 1e-3
    model = copy.deepcopy(whole)
    sharding.shard_model(model, torch.float64)
    for network in (whole, model):
        network(torch.ones(2, 3, 8, 8, dtype=torch.float64)).square().sum().backward()
    generator = torch.Generator().manual_seed(0)
    for actual, expected in zip(model.parameters(), whole.parameters(), strict=True):
        expected.grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        local_gradient = distribute_tensor(expected.grad, actual.device_mesh, actual.placements)
        actual.grad.copy_(local_gradient)
    clip_gradients(list(model.parameters()), 0.01, "agc")
    adaptive_clip_grad(list(whole.parameters()), 0.01)
    differences = []
    for actual, expected in zip(model.parameters(), whole.parameters(), strict=True):
        gradient = sharding.get_full_tensor(actual.grad)
        differences.append(((gradient - expected.grad).abs() / expected.grad.norm()).max().item())
    return max(differences)


def test_units_of_small_weights_are_clipped_alike_in_shards(processes) -> None:
    assert max(processes.run(clip_units, ranks=2)) <= 1e-12
