"""Tools: the runs that they are given, starting them on several ranks, and what they refuse."""

import fcntl
import functools
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import Refused
from common.launching import launch
from tests.harness.forked import Fork, Forks
from tests.harness.outcomes import read as read
from tests.harness.outcomes import read_rows as read_rows


def copy_run(run: Path, to: Path) -> Path:
    """A copy of a run folder, without its checkpoints and what dashboards keep."""
    return shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoints", "wandb"))


def catch_refusal(main: Callable, argv: Sequence[object]) -> str:
    """The line with which a tool's `main` refuses `argv`."""
    with pytest.raises(Refused) as refused:
        main(list(map(str, argv)))
    return str(refused.value)


def start_tool(forks: Forks, processes: int, tool: str, argv: Sequence[object]) -> list[Fork]:
    """`python -m tools.<tool> <argv>` on as many ranks, which are forks of a warm process;
    `.end()` waits for one.
    """
    return forks.start_main(processes, functools.partial(_run_tool, tool, list(map(str, argv))))


def _run_tool(tool: str, argv: list[str]) -> None:
    sys.argv = [tool] + argv
    launch.run(importlib.import_module(f"tools.{tool}.__main__").main)


@contextmanager
def train_once(tmp_path_factory, name: str) -> Iterator[tuple[Path, bool]]:
    """The folder of a run, and True if it is to be trained, by one of the parallel test processes
    while the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "train_once"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder / name, not (folder / name / "summary.json").exists()
