"""The optimizers that a sharded run takes make the step that they make of whole weights; all others are refused."""

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
USUAL = ("adamw", "sgd", "lamb", "lars", "adan", "rmsprop", "muon")  # the long test looks at all of them
HANGS = ("adamp", "cadamp", "csgdp", "sgdp")  # each rank decides by its own shard whether to begin a collective


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


def rank_trains(names: tuple[str, ...]) -> dict[str, float | str]:
    """How far sharded weights are from whole ones, as a share of how far these moved; or the error."""
    sharding.begin(sharding.Sharding(), torch.device("cpu"))
    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    start = sum(SHARES[world][:rank])
    for name in names:
        whole, model = vit(2), vit(2)
        sharding.shard(model, torch.float64)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(optimization, "ON_SHARDS", {name})  # also those that are refused
                trained(model, name, slice(start, start + SHARES[world][rank]), world)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        trained(whole, name, slice(None), 1)
        triples = zip(model.parameters(), whole.parameters(), vit(2).parameters(), strict=True)
        pairs = [(sharding.whole(mine.detach()) - theirs, theirs - before) for mine, theirs, before in triples]
        apart, moved = (sum(each.square().sum() for each in part).sqrt() for part in zip(*pairs, strict=True))
        found[name] = (apart / moved).item()
    return found


@pytest.mark.parametrize(
    "ranks, names", [(2, USUAL), pytest.param(3, tuple(sorted(ON_SHARDS)), marks=pytest.mark.long)]
)
def test_optimizers_of_the_table_make_the_same_steps_on_shards(processes, ranks: int, names: tuple[str, ...]) -> None:
    assert set(USUAL) <= ON_SHARDS
    for found in processes.run(rank_trains, names, ranks=ranks):
        assert {name: error for name, error in found.items() if isinstance(error, str) or error > 1e-10} == {}


@pytest.mark.long
def test_the_table_has_every_optimizer_that_makes_the_same_steps(processes) -> None:
    others = [name for name in timm.optim.list_optimizers(exclude_filters=_UNFIT) if name not in {*ON_SHARDS, *HANGS}]
    [found, _] = processes.run(rank_trains, tuple(others), ranks=2)
    assert [name for name, error in found.items() if not isinstance(error, str) and error <= 1e-10] == []


def rank_is_refused() -> None:
    sharding.begin(sharding.Sharding(), torch.device("cpu"))
    model = vit(2)
    sharding.shard(model, torch.float64)
    with pytest.raises(Refused, match=r"^--opt adamp: .* adamw, .*[^\n]$"):
        build_optimizer(Config(opt="adamp"), model)


def test_another_optimizer_is_refused_by_a_line_that_names_those_that_work(processes) -> None:
    processes.run(rank_is_refused, ranks=2)
