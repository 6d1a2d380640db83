"""Starting the real scripts as a person would, and waiting for their end."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.waiting import Limit, end_with_stacks

ROOT = Path(__file__).parents[2]
# A test's launch inherits no world, no precision and no account from the shell it was started in.
NOT_INHERITED = (
    "ACCELERATE_",
    "HF_",
    "WANDB_",
    "XDG_",
    "VISION_RECIPES_",
    "TORCHELASTIC_",
    "MASTER_",
    "SLURM_",
)
NOT_INHERITED += ("OMPI_", "PMI_", "PMIX_", "PET_")
NOT_INHERITED_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
)
# The recipes' defaults are for photographs, and such a run takes minutes on a CPU.
SMALL = {
    "cls": (
        "--data digits --model test_resnet --image_size 32 --crop_pct 1 --crop_scale 0.7 --hflip 0 "
        "--lr 4e-3 --warmup_epochs 0"
    ),
    "det": (
        "--data digits --model test_resnet --levels 3-4 --width 64 --short_sides 128 "
        "--long_side 128 --hflip 0 --lr 2e-3 --warmup_epochs 0"
    ),
    "seg": (
        "--data digits --model test_resnet --width 32 --crop_size 64 --hflip 0 --lr 5e-3 "
        "--warmup_epochs 0"
    ),
}
# Flags that a family of detectors refuses.
NOT_OF_FAMILY = {
    name: {"--levels", "--long_side"}
    for name in ("rtdetr_v2", "dfine", "deimv2", "rf_detr", "rf_detr_seg")
}
for name in ("rf_detr", "rf_detr_seg"):
    NOT_OF_FAMILY[name] |= {"--width"}


def add_small_defaults(args: Sequence[object], recipe: str | Path = "cls") -> list[object]:
    """A recipe's command line with the settings of a small run where it has none: digits, the
    smallest model, a data worker.

    A preset or the run of a model to evaluate has settings of its own. What tests make of det.py
    and seg.py has a name that begins so.
    """
    prefix = Path(recipe).stem[:3]
    recipe = prefix if prefix in SMALL else "cls"
    flags_given = {str(word).partition("=")[0] for word in args}
    defaults = "--tracker none --workers 1"
    if not {"--config", "--eval_only"} & flags_given:
        defaults = f"{SMALL[recipe]} {defaults}"
    left_out = set(flags_given)
    for word in flags_given:
        left_out |= NOT_OF_FAMILY.get(word, set())
    if "--init" in flags_given and "--data" not in flags_given:  # the weights decide
        left_out |= {"--model", "--levels", "--width", "--short_sides", "--long_side"}
    argv = list(args)
    flags = defaults.split()
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        if flag not in left_out:
            argv += [flag, value]
    return argv


def add_small_defaults_to_command(args: Sequence[object]) -> list[object]:
    """The same for the words of any command that starts a recipe, or a script named after the one
    that it runs.
    """
    for word in map(str, args):
        if re.fullmatch(r"(cls|det|seg)(_\w+)?\.py", Path(word).name):
            return add_small_defaults(args, word)
    return list(args)


@dataclass
class Started:
    """A command that runs. Its output goes to files: a pipe would stay open as long as an orphaned
    rank lives.
    """

    process: subprocess.Popen
    stdout: Path
    stderr: Path

    def finish(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait for the end, at most `timeout` seconds of an idle machine; past that all its
        processes end with their stacks.
        """
        limit = Limit(timeout)
        while self.process.poll() is None and limit.left() > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        if self.process.poll() is None:
            end_with_stacks([psutil.Process(self.process.pid)])
            pytest.fail(
                f"no end within {limit}\n{self.stdout.read_text()}\n{self.stderr.read_text()}"
            )
        return subprocess.CompletedProcess(
            self.process.args,
            self.process.returncode,
            self.stdout.read_text(),
            self.stderr.read_text(),
        )


def inherit_environment() -> dict[str, str]:
    """What a launched process gets of this one's environment."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(NOT_INHERITED) and name not in NOT_INHERITED_NAMES
    }


def find_free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Launcher:
    """Starts scripts as a person would: in the root of the checkout, with an empty home, and one
    thread a process.

    `before` stands before each command, such as words that run it on another machine.
    """

    def __init__(self, home: Path, before: Sequence[str] = ()) -> None:
        self.home = home
        self.before = list(before)

    def start(
        self, config: str, argv: list, *, flags: Sequence[object] = (), **options: Any
    ) -> Started:
        """`accelerate launch --config_file accelerate_configs/<config>.yaml <flags> <argv>`."""
        file = ROOT / "accelerate_configs" / f"{config}.yaml"
        launcher = ["-m", "accelerate.commands.launch", "--config_file", file]
        return self.start_python(launcher + list(flags) + argv, **options)

    def start_python(self, argv: list, **options: Any) -> Started:
        """`python <argv>`."""
        return self.start_command([sys.executable] + argv, **options)

    def start_command(
        self,
        argv: list,
        env: Mapping[str, str] | None = None,
        process_group: int | None = None,
        cwd: Path = ROOT,
    ) -> Started:
        """Any command, which finds the programs of this environment, such as accelerate; a recipe's
        run has the settings of a small one.

        With `process_group` 0 it is in a group of its own, as a shell starts it.
        """
        out = self._create_file(".out")
        err = self._create_file(".err")
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                list(map(str, self.before + add_small_defaults_to_command(argv))),
                cwd=cwd,
                env={
                    **inherit_environment(),
                    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                    "HOME": str(self.home),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONFAULTHANDLER": "1",
                    **(env or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=process_group,
            )
        return Started(process, out, err)

    def __call__(
        self, *args: Any, timeout: float = 120, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """`start` and wait for the end."""
        return self.start(*args, **options).finish(timeout)

    def _create_file(self, suffix: str) -> Path:
        return Path(tempfile.mkstemp(dir=self.home, suffix=suffix)[1])
