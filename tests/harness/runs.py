"""Tools: the runs that they are given, starting them on several ranks, and what they refuse."""

import functools
import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import Refused
from common.launching import launch
from tests.harness.forked import Fork, Forks, _be_rank
from tests.harness.launching import free_port


def copied(run: Path, to: Path) -> Path:
    """A copy of a run folder, without its checkpoints and what dashboards keep."""
    return shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoints", "wandb"))


def read(file: Path) -> dict:
    return json.loads(file.read_text())


def rows_of(file: Path) -> list[dict]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def refusal(call: Callable, *words: object) -> str:
    """What a tool's `main` says about these words, in one line."""
    with pytest.raises(Refused) as refused:
        call([*map(str, words)])
    return str(refused.value)


def start_tool(forks: Forks, processes: int, tool: str, *words: object) -> list[Fork]:
    """`python -m tools.<tool> <words>` on as many ranks, which are forks of a warm process; `.end()` waits for one."""
    main, port = functools.partial(_be_tool, tool, [*map(str, words)]), free_port()
    ranks = [functools.partial(_be_rank, rank, processes, port, None) for rank in range(processes)]
    return [forks._start(main, rank, None, (), True) for rank in ranks]


def _be_tool(tool: str, words: list[str]) -> None:
    sys.argv = [tool, *words]
    launch.run(importlib.import_module(f"tools.{tool}.__main__").main)
