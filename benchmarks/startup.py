"""Measures start-up: the time from launching `recipes/cls.py` to the end of its first optimizer step.

    python benchmarks/startup.py [--quick] [--brief] [--output FILE]

The reference is a process that does `import torch, timm` and creates the same model; the goal is at most 1.3 times its time.
Each row is a fresh process on one CPU. The rows take turns: there and back, again and again. `accelerate launch` imports torch,
timm and more for its other subcommands before it starts the recipe; `accelerate-launch`, the same command on its own, imports
less.
"""

import os
import runpy
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from table import Row, compare, script, take_turns

ROOT = Path(__file__).resolve().parent.parent
MODEL = "test_resnet"
GOAL = 1.3  # times the bare import
BARE, PROCESS, LAUNCH, SHORT_LAUNCH = (
    "import torch, timm; create_model",
    "python recipes/cls.py",
    "accelerate launch recipes/cls.py",
    "accelerate-launch recipes/cls.py",
)
STARTED = "STARTUP_BENCHMARK_STARTED"  # environment variable: time of the launch, in seconds since 1970


def command(row: str, scratch: Path) -> list[str]:
    """The command line of a row. The process writes its time to `scratch/seconds`."""
    config = ["--config_file", ROOT / "accelerate_configs" / "cpu.yaml"]
    flags = ["--data", "digits", "--image_size", "32", "--model", MODEL]
    flags += ["--max_steps", "2", "--workers", "0", "--output_dir", scratch]
    recipe = ROOT / "recipes" / "cls.py"
    first_step = [__file__, "--first_step", scratch / "seconds", recipe, *flags]
    bin_folder = Path(sys.executable).parent
    words = {
        BARE: [sys.executable, __file__, "--bare", scratch / "seconds"],
        PROCESS: [sys.executable, *first_step],
        LAUNCH: [bin_folder / "accelerate", "launch", *config, *first_step],
        SHORT_LAUNCH: [bin_folder / "accelerate-launch", *config, *first_step],
    }
    return [str(word) for word in words[row]]


def seconds(row: str) -> float:
    """Seconds of one fresh start, until the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        # PYTHONPATH: for a checkout that is not the installed one.
        environ = os.environ | {STARTED: repr(time.time()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command(row, Path(folder)), env=environ, capture_output=True)
        if done.returncode:
            raise RuntimeError(f"{row}: {done.stderr.decode()}")
        return float(Path(folder, "seconds").read_text())


def bare(output: Path) -> None:
    """The reference: imports and model, as any script with timm needs them."""
    import timm
    import torch  # noqa: F401

    timm.create_model(MODEL)
    _leave(output)


def first_step(output: Path, words: list[str]) -> None:
    """Runs the recipe `words[0]` until the end of its first optimizer step."""
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)

    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: _leave(output))
    runpy.run_path(words[0], run_name="__main__")


def _leave(output: Path) -> None:
    """Writes the time since the launch, and ends the process at once."""
    output.write_text(str(time.time() - float(os.environ[STARTED])))
    os._exit(0)


def measure(quick: bool, brief: bool) -> tuple[list[Row], dict]:
    """Every way in turn; the bare import is the peer, so that the goal is 1 / GOAL."""
    ours = (PROCESS, LAUNCH, SHORT_LAUNCH)
    ways = {row: partial(seconds, row) for row in (BARE, *ours)}
    taken = take_turns(ways, 1 if quick else 2 if brief else 3)
    unit = "s to the first step"
    return [compare(row, unit, taken, BARE, row, goal=1 / GOAL) for row in ours], taken


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bare"]:  # the process of a row, as the next one
        bare(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--first_step"]:
        first_step(Path(sys.argv[2]), sys.argv[3:])
    else:
        script(__doc__, measure)
