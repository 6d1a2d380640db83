"""Finished runs that tests of tools look at: made once per session. Copy what a test changes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness.forked import Ended, Forks
from tests.harness.launching import Launcher
from tests.harness.runs import start_tool, train_once


@pytest.fixture(scope="session")
def run_tool(forks: Forks) -> Callable[..., list[Ended]]:
    """`run_tool(2, "compare", [run, other])`: how two ranks of a tool have ended, which they must do well."""

    def run(ranks: int, tool: str, argv: Sequence[object]) -> list[Ended]:
        ended = [rank.end(300) for rank in start_tool(forks, ranks, tool, argv)]
        assert {rank.code for rank in ended} == {0}, ended
        return ended

    return run


@pytest.fixture(scope="session")
def trained_classifier(launch: Launcher, tmp_path_factory) -> Path:
    """The run of the digits preset, 5 epochs, launched on two processes with data workers and W&B
    offline: top-1 98 %.
    """
    with train_once(tmp_path_factory, "cls") as (run, is_to_be_made):
        if is_to_be_made:
            argv = ["recipes/cls.py", "--config", "recipes/presets/digits.yaml", "--epochs", 5]
            argv += ["--output_dir", run.parent, "--name", run.name]
            done = launch("multi_cpu", argv, timeout=300)
            assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="session")
def trained_detector(run_several, tmp_path_factory) -> Path:
    """The run of the det_digits preset, 80 steps, on two processes with data workers."""
    with train_once(tmp_path_factory, "det") as (run, is_to_be_made):
        if is_to_be_made:
            args = ["--config", "recipes/presets/det_digits.yaml", "--max_steps", 80]
            args += ["--workers", 1, "--output_dir", run.parent]
            run_several(2, {run.name: args}, recipe="recipes/det.py", pictures=True)
    return run
