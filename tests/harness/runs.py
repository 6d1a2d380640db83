"""Runs that tools are given, and what tools refuse."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import Refused


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
    assert "\n" not in str(refused.value)
    return str(refused.value)
