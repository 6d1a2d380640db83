"""Runs that are killed at a step, and their comparison with the run that was not."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.harness.outcomes import Outcome, best_files, identical

if TYPE_CHECKING:  # a fork imports it once its environment is made
    from common.run.run import Run

STEPS = 12


def after_step(act: Callable[["Run"], None], step: int = 0, once_written: bool = True) -> None:
    """In a fork: `act(run)` when `step` is done (0: after each), by default once no checkpoint is being written."""
    from common.run.run import Run

    end_step = Run.end_step

    def end_and_act(run: Run, grad_norm) -> None:
        end_step(run, grad_norm)
        if step in (0, run.step):
            if once_written:
                run._saving.writer.wait()
            act(run)

    Run.end_step = end_and_act


def die(run: "Run") -> None:
    """SIGKILL to the process itself."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_step(step: int, once_written: bool = True) -> None:
    """In a fork: SIGKILL when `step` steps are done, before what follows on it."""
    after_step(die, step, once_written)


def assert_same_run(folder: Path, reference: Path, steps: int = STEPS) -> None:
    """Losses of every step, evaluations, weights, statistics, optimizer and moving average agree bit for bit."""
    one, other = (Outcome(folder=path) for path in (folder, reference))
    assert [row["step"] for row in one.rows] == list(range(1, steps + 1)), "a step is missing or there twice"
    for row, expected in zip(one.rows, other.rows, strict=True):
        assert _without_pace(row) == _without_pace(expected)
    for file in one.checkpoint.glob("*.safetensors"):
        assert identical(one.tensors(file.stem), other.tensors(file.stem)), file.name
    records = [json.loads((each.checkpoint / "record.json").read_text()) for each in (one, other)]
    for record in records:
        record["ledger"].pop("seconds")
    assert one.checkpoint.name == other.checkpoint.name
    for key in ("step", "identity", "numbers", "ledger"):
        assert records[0][key] == records[1][key], key
    assert best_files(folder) == best_files(reference)
    assert read(folder, "status.json")["status"] == "finished"


def _without_pace(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith("perf/")}


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())
