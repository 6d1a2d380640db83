"""Runs several.py; in the given steps the last rank's gradients overflow: overflowing.py 1,4 RECIPE CASES.json ...

Of a sharded model, one number of the last rank's shard overflows.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from common.distributed import sharding
from common.distributed.collectives import rank, world_size
from common.run.run import Run
from tests.harness import several

overflows = {int(step) for step in sys.argv[1].split(",")}
steps, backward, clip_gradients = Run.steps, Run.backward, Run.clip_gradients
making, is_sharded = 0, False  # number of the current step; whether the model is in shards


def overflows_here() -> bool:
    return making in overflows and rank() == world_size() - 1


def watched_steps(run: Run) -> Iterator[int]:
    global making, is_sharded
    is_sharded = sharding.is_sharded(run.model)
    for step in steps(run):
        making = step + 1
        yield step


def overflowing_backward(run: Run, losses: torch.Tensor) -> None:
    if overflows_here() and not is_sharded:
        losses.register_hook(lambda gradient: 1e30 * gradient)
    backward(run, losses)


def overflowing_clip(run: Run, *options: object) -> torch.Tensor:
    if is_sharded and overflows_here():
        shards = [sharding.local(parameter.grad) for parameter in run.model.parameters()]
        next(shard for shard in shards if shard.numel()).view(-1)[:1].fill_(torch.inf)
    return clip_gradients(run, *options)


Run.steps, Run.backward, Run.clip_gradients = watched_steps, overflowing_backward, overflowing_clip
several.main(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
