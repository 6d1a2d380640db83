"""Compares a recipe with a loop written by hand that does the same work. Shared by loop.py and detection.py.

Blocks of steps of both run in one process in the order ABBA, several times.
"""

import contextlib
import gc
import importlib.util
import io
import itertools
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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

ROOT = Path(__file__).resolve().parent.parent
LR, WEIGHT_DECAY = 1e-3, 0.05
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


class Enough(Exception):
    """Ends a block."""


def recipe(name: str, flags: Callable[[Setting], dict], folder_of_runs: Callable[[], str] = tempfile.mkdtemp) -> Loop:
    """Returns `main` of recipes/<name>.py as a loop, with `flags` for each setting, and no evaluation or checkpoint."""
    path = ROOT / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def loop(setting: Setting) -> None:
        folder = folder_of_runs()
        everything = {
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
            "resume": "never",
            "output_dir": folder,
            **flags(setting),
        }
        words = [f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in everything.items()]
        try:
            with patch.object(sys, "argv", [path.name, *words]):
                module.main()
        finally:
            if is_main():  # which writes until it ends
                shutil.rmtree(folder, ignore_errors=True)

    return loop


def timed(loop: Callable[[], None], skipped: int, steps: int) -> tuple[float, float]:
    """Wall and CPU milliseconds of a step of `loop`: of `steps` steps after the first `skipped`."""
    made, stamps = itertools.count(1), []

    def stamp(*_) -> None:
        number = next(made)
        if number in (skipped, skipped + steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            stamps.append((time.perf_counter(), time.process_time()))
        if number == skipped + steps:
            raise Enough

    gc.collect()
    quiet, hook = io.StringIO(), register_optimizer_step_post_hook(stamp)
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(Enough):
            loop()
    finally:
        hook.remove()
    (wall, cpu), (wall_end, cpu_end) = stamps
    return 1e3 * (wall_end - wall) / steps, 1e3 * (cpu_end - cpu) / steps


def measure(loop: Loop, setting: Setting) -> tuple[float, float]:
    """Wall and CPU milliseconds per step of a block."""
    return timed(partial(loop, setting), WARM_UP, setting.steps)


def train_by_hand(model: nn.Module, batches: Iterable[tuple], loss_of: Callable) -> None:
    """The loop written by hand, without an end: `loss_of(*batch)` is the mean loss of a batch."""
    optimizer = create_optimizer_v2(model, "adamw", lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    parameters = list(model.parameters())
    numbers = torch.zeros(2)
    model.train()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 + math.cos(math.pi * step / TOTAL_STEPS)) / 2
        loss = loss_of(*batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        late = numbers.tolist()  # of the previous step
        if not all(map(math.isfinite, late)):
            raise FloatingPointError(f"step {step}: {late}")
        numbers = torch.stack([loss.detach(), norm])


def compare_loops(
    name: str, recipe: Loop, bare: Loop, settings: Sequence[Setting], quartets: int
) -> tuple[list[Row], list[dict[str, list[tuple[float, float]]]]]:
    """A row per setting, with the bare loop as peer and bound; and the milliseconds of all blocks.

    It prints what the recipe adds to short steps: to the last two of three settings, of few and many
    samples.
    """
    rows, figures = [], []
    for setting in settings:
        ways = {BARE: partial(measure, bare, setting), "ours": partial(measure, recipe, setting)}
        take_turns(ways, 1)  # warm up both
        figures.append(taken := take_turns(ways, 2 * quartets))
        wall = {way: [times[0] for times in of_way] for way, of_way in taken.items()}
        options = {"limit": statistics.median(wall[BARE]), "goal": None if rows else THROUGHPUT}
        rows.append(compare(f"{name}.py, {setting}", "ms per step", wall, BARE, **options))
    for clock, of_clock in enumerate(("wall", "cpu") if len(settings) == 3 else ()):
        few, many = (setting.batch_size for setting in settings[1:])
        small, large = (
            statistics.median(a[clock] - b[clock] for a, b in zip(taken["ours"], taken[BARE], strict=True))
            for taken in figures[1:]
        )
        a_sample = (large - small) / (many - few)
        a_step = small - few * a_sample
        print(
            f"overhead ({of_clock}): {a_step:.2f} ms per step + {1e3 * a_sample:.1f} µs per sample (goal: 1 ms + 10 µs)"
        )
    return rows, figures
