"""Runs several.py; in the given steps the last rank's gradients overflow: overflowing.py 1,4 RECIPE CASES.json ..."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator

from common.distributed.collectives import rank, world_size
from common.run.run import Run
from tests.harness import several

overflows = {int(step) for step in sys.argv[1].split(",")}
steps, backward = Run.steps, Accelerator.backward
making = 0  # number of the current step


def watched_steps(run: Run) -> Iterator[int]:
    global making
    for step in steps(run):
        making = step + 1
        yield step


def overflowing_backward(accelerator: Accelerator, loss: torch.Tensor, **options: object) -> None:
    factor = 1e30 if making in overflows and rank() == world_size() - 1 else 1
    backward(accelerator, loss * factor, **options)


Run.steps, Accelerator.backward = watched_steps, overflowing_backward
several.main(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
