"""A run that is killed and goes on with another strategy, sharded or not, on other worlds, ends as the undisturbed run."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults.campaign import Campaign
from tests.harness.forked import Fork, Forks

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}


class Strategies(Forks):
    """Starts forks, sharded where they are several processes: always, or two times in three."""

    def __init__(self, forks: Forks, always: bool = False) -> None:
        self.forks, self.always, self.starts = forks, always, 0

    def __call__(self, *words: object, **options: object):
        return self.forks(*words, **options)

    def start_ranks(
        self, processes: int, *words: object, before: Callable[[int], None], **options: object
    ) -> list[Fork]:
        self.starts += 1
        if processes > 1 and (self.always or self.starts % 3):
            before = functools.partial(shard, before)
        return self.forks.start_ranks(processes, *words, before=before, **options)


def shard(before: Callable[[int], None], rank: int) -> None:
    os.environ.update(FSDP)
    before(rank)


@pytest.mark.parametrize("kills, seed", [(4, 0), *(pytest.param(40, seed, marks=pytest.mark.long) for seed in (0, 1))])
def test_runs_that_are_killed_and_change_their_strategy_are_the_undisturbed(
    forks, tmp_path: Path, kills: int, seed: int
) -> None:
    """In float64, moving between one process, two and three."""
    assert Campaign(Strategies(forks), tmp_path / "campaign", (1, 2, 3), seed).run(kills).kills == kills


def test_sharded_runs_that_are_killed_are_bit_equal_to_the_undisturbed(forks, tmp_path: Path) -> None:
    """In float32, on the same two processes."""
    assert Campaign(Strategies(forks, always=True), tmp_path / "campaign", (2,)).run(2).kills == 2


def be_too_large() -> None:
    def to(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    torch.nn.Module.to = to


def test_a_model_that_does_not_fit_is_refused_by_a_line_that_names_the_file(forks) -> None:
    ended = forks("--max_steps", 1, "--name", "too_large", before=be_too_large)
    [line] = [line for line in ended.stderr.splitlines() if "memory" in line]
    assert ended.code == 2
    assert "does not fit into the memory of a device" in line and "accelerate_configs/fsdp_bf16.yaml" in line
