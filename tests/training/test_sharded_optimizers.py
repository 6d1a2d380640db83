"""The optimizers that a sharded run takes make the step that they make of whole weights; all others
are refused.
"""

import math

import pytest
import timm.optim
import torch
import torch.distributed as dist
from torch import nn

from common.distributed import sharding
from common.errors import Refused
from common.training import optimizer as optimization
from common.training.optimizer import _UNFIT, ON_SHARDS, build_optimizer, clip_gradients
from tests.training.small import CLASSES, Config, vit

BATCH, STEPS = 12, 4
SHARES = {1: (12,), 2: (7, 5), 3: (5, 4, 3)}
# The long test looks at all of them.
USUAL = ("adamw", "sgd", "lamb", "lars", "adan", "rmsprop", "muon")
# Each rank decides by its own shard whether to begin a collective.
HANGS = {"adamp", "cadamp", "csgdp", "sgdp"}


def trained(model: nn.Module, name: str, share: slice, scale: float) -> None:
    """Make some steps on a share of each batch."""
    config = Config(opt=name, lr=3e-3, clip=0.1)
    optimizer, generator = build_optimizer(config, model), torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)[share]
        targets = torch.rand(BATCH, CLASSES, generator=generator, dtype=torch.float64)[share]
        (-(model(images).log_softmax(1) * targets).sum() * scale / BATCH).backward()
        clip_gradients(list(model.parameters()), config.clip, "norm")
        optimizer.step()
        optimizer.zero_grad()


def rank_trains(name: str) -> float:
    """How far sharded weights are from whole ones, as a share of how far these moved; infinite if
    there is no such step.
    """
    sharding.configure(sharding.Sharding(), torch.device("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    start = sum(SHARES[world][:rank])
    whole, model = vit(2), vit(2)
    sharding.shard_model(model, torch.float64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimization, "ON_SHARDS", {name})  # also those that are refused
            trained(model, name, slice(start, start + SHARES[world][rank]), world)
    except Exception:
        return math.inf
    trained(whole, name, slice(None), 1)
    apart, moved = 0.0, 0.0
    for actual, expected, start in zip(
        model.parameters(), whole.parameters(), vit(2).parameters(), strict=True
    ):
        apart += (sharding.get_full_tensor(actual.detach()) - expected).square().sum()
        moved += (expected - start).square().sum()
    return (apart / moved).sqrt().item()


ON_2 = [(2, name) for name in USUAL]
ON_3 = [pytest.param(3, name, marks=pytest.mark.long) for name in sorted(ON_SHARDS)]


@pytest.mark.parametrize("ranks, name", ON_2 + ON_3)
def test_an_optimizer_makes_the_same_steps_on_shards(processes, ranks: int, name: str) -> None:
    assert name in ON_SHARDS and max(processes.run(rank_trains, name, ranks=ranks)) <= 1e-10


@pytest.mark.long
@pytest.mark.parametrize(
    "name", sorted({*timm.optim.list_optimizers(exclude_filters=_UNFIT)} - ON_SHARDS - HANGS)
)
def test_an_optimizer_outside_the_table_makes_other_steps(processes, name: str) -> None:
    assert max(processes.run(rank_trains, name, ranks=2)) > 1e-10


def rank_is_refused() -> None:
    sharding.configure(sharding.Sharding(), torch.device("cpu"))
    model = vit(2)
    sharding.shard_model(model, torch.float64)
    with pytest.raises(Refused, match=r"^--opt adamp: .* adamw, .*[^\n]$"):
        build_optimizer(Config(opt="adamp"), model)


def test_another_optimizer_is_refused_with_those_that_work(processes) -> None:
    processes.run(rank_is_refused, ranks=2)
