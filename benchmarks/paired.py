"""Compares a recipe with a loop written by hand that does the same work. Shared by loop.py and detection.py.

Blocks of steps of both run in one process in the order ABBA, several times. Ratios between blocks of the same kind show how far
the machine alone moves a ratio.
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

ROOT = Path(__file__).resolve().parent.parent
LR, WEIGHT_DECAY = 1e-3, 0.05
TOTAL_STEPS = 100_000  # of the schedule; a block ends much earlier
WARM_UP = 3  # steps at the start of a block that are not measured
PER_STEP_MS, PER_SAMPLE_US, THROUGHPUT = 1.0, 10.0, 0.97  # goals


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


def recipe(name: str, flags: Callable[[Setting], dict]) -> Loop:
    """Returns `main` of recipes/<name>.py as a loop, with `flags` for each setting, and no evaluation or checkpoint."""
    path = ROOT / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def loop(setting: Setting) -> None:
        folder = tempfile.mkdtemp()
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
            shutil.rmtree(folder)

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
            rows.append(
                {
                    "clock": name,
                    "recipe_ms": ours / 2,
                    "bare_ms": theirs / 2,
                    "overhead_ms": (ours - theirs) / 2,
                    "throughput": theirs / ours,
                    "recipe_again": a_again[kind] / a[kind],
                    "bare_again": b_again[kind] / b[kind],
                }
            )
    result = {"setting": asdict(setting), "quartets": quartets}
    for name in ("wall", "cpu"):
        mine = [row for row in rows if row["clock"] == name]
        result[name] = {key: statistics.median(row[key] for row in mine) for key in mine[0] if key != "clock"}
        ratios = [row["throughput"] for row in mine]
        result[name] |= {"throughput_least": min(ratios), "throughput_most": max(ratios)}
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
        wall = result["wall"]
        setting = Setting(**result["setting"])
        rows.append(
            Row(
                f"{name}.py, {setting.model}, {setting.image_size} px, batch {setting.batch_size}",
                "ms per step",
                wall["recipe_ms"],
                "a bare loop",
                wall["bare_ms"],
                wall["throughput"],
                wall["bare_ms"],
                THROUGHPUT if result is results[0] else None,
            )
        )
    return rows


def report(recipe: Loop, bare: Loop, settings: tuple[Setting, Setting, Setting], quartets: int) -> list[dict]:
    """Prints and returns the comparison in three settings: a usual one, and two with short steps (few and many samples)."""
    print(f"medians of {quartets} x ABBA")
    print(f"{'':36}{'step (ms)':>19}{'images/s':>21}{'against itself':>19}")
    print(f"{'':28}{'clock':>8}{'bare':>10}{'recipe':>9}{'recipe / bare':>21}{'bare':>11}{'recipe':>8}")
    results = []
    for setting in settings:
        measure(recipe, setting), measure(bare, setting)  # warm up both
        results.append(compare(recipe, bare, setting, quartets))
        for name in ("wall", "cpu"):
            row = results[-1][name]
            print(
                f"{str(setting) if name == 'wall' else '':<30}{name:>6}{row['bare_ms']:10.2f}{row['recipe_ms']:9.2f}"
                f"{row['throughput']:7.3f} ({row['throughput_least']:.3f}-{row['throughput_most']:.3f})"
                f"{row['bare_again']:10.3f}{row['recipe_again']:8.3f}",
                flush=True,
            )
    for name in ("wall", "cpu"):
        a_step, a_sample = overhead(*results[1:], name)
        print(f"overhead ({name}): {a_step:.2f} ms per step + {a_sample:.1f} µs per sample")
    print(
        f"goals: images/s at least {THROUGHPUT}; at most {PER_STEP_MS:g} ms per step + {PER_SAMPLE_US:g} µs per sample"
    )
    return results
