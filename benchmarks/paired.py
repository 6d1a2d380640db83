"""Compares a recipe with a loop written by hand that does the same work. Shared by loop.py and detection.py.

Blocks of steps of both run in one process in the order ABBA, several times.
"""

import contextlib
import gc
import importlib.util
import io
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from table import Row
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.distributed.collectives import is_main

ROOT = Path(__file__).resolve().parent.parent
LR, WEIGHT_DECAY = 1e-3, 0.05
TOTAL_STEPS = 100_000  # of the schedule; a block ends much earlier
WARM_UP = 3  # steps at the start of a block that are not measured
THROUGHPUT = 0.97  # goal


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
        everything = flags(setting) | {
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
        }
        own = sys.argv
        sys.argv = [path.name, *(f"--{flag}={value}" for flag, value in everything.items())]
        try:
            module.main()
        finally:
            sys.argv = own
            if is_main():  # which writes until it ends
                shutil.rmtree(folder, ignore_errors=True)

    return loop


def measure(loop: Loop, setting: Setting) -> tuple[float, float]:
    """Wall and CPU milliseconds per step of `loop`, taken at the optimizer steps."""
    stamps = []

    def stamp(*_) -> None:
        stamps.append((time.perf_counter(), time.process_time()))
        if len(stamps) == WARM_UP + setting.steps:
            raise Enough

    gc.collect()
    quiet, hook = io.StringIO(), register_optimizer_step_post_hook(stamp)
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(Enough):
            loop(setting)
    finally:
        hook.remove()
    (wall, cpu), (wall_end, cpu_end) = stamps[WARM_UP - 1], stamps[-1]
    return 1e3 * (wall_end - wall) / setting.steps, 1e3 * (cpu_end - cpu) / setting.steps


def compare(recipe: Loop, bare: Loop, setting: Setting, quartets: int) -> dict:
    """Runs blocks in the order recipe, bare, bare, recipe, `quartets` times; returns medians of times, ratios and overhead."""
    rows = []
    for _ in range(quartets):
        a, b, b_again, a_again = (measure(loop, setting) for loop in (recipe, bare, bare, recipe))
        for kind, name in enumerate(("wall", "cpu")):
            ours, theirs = a[kind] + a_again[kind], b[kind] + b_again[kind]
            row = {"clock": name, "recipe_ms": ours / 2, "bare_ms": theirs / 2}
            rows.append(row | {"overhead_ms": (ours - theirs) / 2, "throughput": theirs / ours})
    result = {"setting": asdict(setting), "quartets": quartets}
    for name in ("wall", "cpu"):
        mine = [row for row in rows if row["clock"] == name]
        result[name] = {key: statistics.median(row[key] for row in mine) for key in mine[0] if key != "clock"}
    return result


def overhead(small: dict, large: dict, clock: str) -> tuple[float, float]:
    """Milliseconds per step and microseconds per sample that the recipe adds, from two batch sizes of one model."""
    few, many = small["setting"]["batch_size"], large["setting"]["batch_size"]
    a_sample = (large[clock]["overhead_ms"] - small[clock]["overhead_ms"]) / (many - few)
    return small[clock]["overhead_ms"] - few * a_sample, 1e3 * a_sample


def rows_of_loops(name: str, results: list[dict]) -> list[Row]:
    """Rows for the common table; the bare loop is both peer and bound."""
    rows = []
    for result in results:
        wall, what = result["wall"], f"{name}.py, {Setting(**result['setting'])}"
        ours, theirs, goal = wall["recipe_ms"], wall["bare_ms"], None if rows else THROUGHPUT
        rows.append(Row(what, "ms per step", ours, "a bare loop", theirs, wall["throughput"], theirs, goal))
    return rows


def report(recipe: Loop, bare: Loop, settings: tuple[Setting, ...], quartets: int) -> list[dict]:
    """The comparison in a usual setting, and in two with short steps (few and many samples), whose overhead it prints."""
    results = []
    for setting in settings:
        measure(recipe, setting), measure(bare, setting)  # warm up both
        results.append(compare(recipe, bare, setting, quartets))
    for name in ("wall", "cpu"):
        a_step, a_sample = overhead(*results[1:], name)
        print(f"overhead ({name}): {a_step:.2f} ms per step + {a_sample:.1f} µs per sample (goal: 1 ms + 10 µs)")
    return results
