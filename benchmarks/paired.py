"""Compares a recipe with a loop written by hand that does the same work. Shared by the scripts that
measure steps.

Blocks of steps of both run in one process in the order ABBA, several times.
"""

import contextlib
import gc
import importlib
import io
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from table import Row, compare, take_turns
from timm.optim import create_optimizer_v2
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.distributed.collectives import is_main

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
LR = 1e-3
WEIGHT_DECAY = 0.05
TOTAL_STEPS = 100_000  # of the schedule; a block ends much earlier
WARM_UP = 3  # steps at the start of a block that are not measured
THROUGHPUT = 0.97  # goal
BARE = "a bare loop"


@dataclass(frozen=True)
class Setting:
    """One model at one batch size."""

    model: str
    image_size: int
    batch_size: int
    steps: int  # in a block

    def __str__(self) -> str:
        return f"{self.model}, {self.image_size} px, batch {self.batch_size}"


Loop = Callable[[Setting], None]  # trains until it is stopped


class BlockEnd(Exception):
    """Ends a block."""


def build_recipe_loop(
    name: str,
    build_flags: Callable[[Setting], dict],
    make_folder: Callable[[], str] = tempfile.mkdtemp,
) -> Loop:
    """`main` of recipes/<name>.py as a loop, with the flags of each setting, and no evaluation or
    checkpoint.
    """
    sys.path.append(str(RECIPES))
    module = importlib.import_module(name)

    def loop(setting: Setting) -> None:
        folder = make_folder()
        flags = {
            "data": "digits",
            "hflip": 0,
            "warmup_epochs": 0,
            "model": setting.model,
            "global_batch_size": setting.batch_size,
            "max_micro_batch_size": setting.batch_size,
            "max_steps": TOTAL_STEPS,
            "eval_every": TOTAL_STEPS,
            "checkpoint_every": TOTAL_STEPS,
            "lr": LR,
            "weight_decay": WEIGHT_DECAY,
            "workers": 0,
            "tracker": "none",
            "output_dir": folder,
            **build_flags(setting),
        }
        argv = [
            f"{name}.py",
            *(
                f"--{flag}" if value is True else f"--{flag}={value}"
                for flag, value in flags.items()
            ),
        ]
        try:
            with patch.object(sys, "argv", argv):
                module.main()
        finally:
            if is_main():  # which writes until it ends
                shutil.rmtree(folder, ignore_errors=True)

    return loop


def time_steps(loop: Callable[[], None], num_skipped: int, num_steps: int) -> float:
    """Milliseconds of a step of `loop`, over `num_steps` steps after the first `num_skipped`."""
    num_done = 0
    times = []

    def record(*_) -> None:
        nonlocal num_done
        num_done += 1
        if num_done in (num_skipped, num_skipped + num_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())
        if len(times) == 2:
            raise BlockEnd

    gc.collect()
    output = io.StringIO()
    hook = register_optimizer_step_post_hook(record)
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            contextlib.suppress(BlockEnd),
        ):
            loop()
    finally:
        hook.remove()
    return 1e3 * (times[1] - times[0]) / num_steps


def measure_block(loop: Loop, setting: Setting) -> float:
    """Milliseconds per step of a block."""
    return time_steps(partial(loop, setting), WARM_UP, setting.steps)


def train_by_hand(model: nn.Module, batches: Iterable[tuple], compute_loss: Callable) -> None:
    """The loop written by hand, without an end: `compute_loss(*batch)` is the mean loss of a batch."""
    optimizer = create_optimizer_v2(model, "adamw", lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    parameters = list(model.parameters())
    metrics = torch.zeros(2)
    model.train()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 + math.cos(math.pi * step / TOTAL_STEPS)) / 2
        loss = compute_loss(*batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        previous = metrics.tolist()
        if not all(map(math.isfinite, previous)):
            raise FloatingPointError(f"step {step}: {previous}")
        metrics = torch.stack([loss.detach(), norm])


def compare_loops(
    name: str, recipe: Loop, bare: Loop, settings: Sequence[Setting], turns: int, quick: bool
) -> list[Row]:
    """A row per setting; the goal is the first one's."""
    rows = []
    for setting in settings:
        if quick:
            setting = replace(setting, steps=1)
        ways = {
            BARE: partial(measure_block, bare, setting),
            "ours": partial(measure_block, recipe, setting),
        }
        take_turns(ways, 1)  # warms up both
        times = take_turns(ways, 2 * turns)
        goal = None if rows else THROUGHPUT
        rows.append(compare(f"{name}, {setting}", "ms per step", times, BARE, goal=goal))
    return rows
