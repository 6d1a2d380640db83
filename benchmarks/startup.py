"""Measures start-up: the time from launching `recipes/cls.py` to the end of its first optimizer step.

    python benchmarks/startup.py [--turns N]

The reference is a process that does `import torch, timm` and creates the same model; the goal is at
most 1.3 times its time. Each row is a fresh process on one CPU. The rows take turns: there and
back, again and again. `accelerate launch` imports torch, timm and more for its other subcommands
before it starts the recipe; `accelerate-launch`, the same command on its own, imports less.
"""

import os
import runpy
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from table import Row, compare, run_script, take_turns

ROOT = Path(__file__).resolve().parent.parent
RECIPE = str(ROOT / "recipes" / "cls.py")
MODEL = "test_resnet"
GOAL = 1.3  # times the bare import
BARE = "import torch, timm; create_model"
FIRST_STEP = "--first_step"


def build_commands() -> dict[str, list[object]]:
    """The command line of each row, but for the folder of its run."""
    bin_folder = Path(sys.executable).parent
    config = ["--config_file", ROOT / "accelerate_configs" / "cpu.yaml", __file__, FIRST_STEP]
    bare = f"import os, torch, timm; timm.create_model('{MODEL}'); os._exit(0)"
    return {
        BARE: [sys.executable, "-c", bare],
        "python recipes/cls.py": [sys.executable, __file__, FIRST_STEP],
        "accelerate launch recipes/cls.py": [bin_folder / "accelerate", "launch", *config],
        "accelerate-launch recipes/cls.py": [bin_folder / "accelerate-launch", *config],
    }


def time_start(command: list[object]) -> float:
    """Seconds of one fresh process, which ends with the first step."""
    # PYTHONPATH: for a checkout that is not the installed one.
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run([*command, folder], env=environ, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - start


def start_recipe(folder: str) -> None:
    """Runs the recipe until the end of its first optimizer step."""
    sys.argv = [RECIPE, "--data", "digits", "--image_size", "32", "--model", MODEL]
    sys.argv += ["--max_steps", "2", "--workers", "0", "--output_dir", folder]
    sys.path[0] = str(Path(RECIPE).parent)

    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: os._exit(0))
    runpy.run_path(RECIPE, run_name="__main__")


def measure(turns: int, _: bool) -> list[Row]:
    """Every way in turn; the bare import is the peer, so that the goal is 1 / GOAL."""
    ways = {name: partial(time_start, command) for name, command in build_commands().items()}
    seconds = take_turns(ways, turns)
    return [
        compare(name, "s to the first step", seconds, BARE, name, goal=1 / GOAL)
        for name in list(ways)[1:]
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == [FIRST_STEP]:  # the process of a row
        start_recipe(sys.argv[2])
    else:
        run_script(__doc__, measure)
