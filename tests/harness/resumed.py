"""Runs that something happens to at a step, and the comparison of a run that was killed with one
that was not.
"""

import functools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.run import Observer, Run
from tests.harness.outcomes import Outcome, identical, read, read_best_files

STEPS = 12


@dataclass
class AfterStep(Observer):
    """Calls `act(run)` when a rank has made `step` (0: each), by default once no checkpoint is
    being written.
    """

    act: Callable[[Run], None]
    step: int = 0
    once_written: bool = True

    def on_end_step(self, run: Run, step: int) -> None:
        if self.step not in (0, step):
            return
        if self.once_written:
            run._saving.writer.wait()
        self.act(run)


def signal_at(
    step: int, number: int = signal.SIGKILL, times: int = 1, once_written: bool = True
) -> AfterStep:
    """A process sends itself a signal when `step` is made, before what follows on it."""
    return AfterStep(functools.partial(_signal_self, number, times), step, once_written)


def _signal_self(number: int, times: int, run: Run) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)


def assert_same_run(folder: Path, reference: Path, steps: int = STEPS) -> None:
    """Losses of every step, evaluations, weights, statistics, optimizer and moving average agree
    bit for bit.
    """
    actual, expected = (Outcome(folder=path) for path in (folder, reference))
    assert [row["step"] for row in actual.rows] == list(range(1, steps + 1)), (
        "a step is missing or there twice"
    )
    for rows in zip(actual.rows, expected.rows, strict=True):
        actual_record, expected_record = (
            {key: value for key, value in row.items() if not key.startswith("perf/")}
            for row in rows
        )
        assert actual_record == expected_record
    assert actual.checkpoint.name == expected.checkpoint.name
    for file in actual.checkpoint.glob("*.safetensors"):
        assert identical(actual.tensors(file.stem), expected.tensors(file.stem)), file.name
    actual_record, expected_record = (
        read(run.checkpoint / "record.json") for run in (actual, expected)
    )
    for record in (actual_record, expected_record):
        record["ledger"].pop("seconds")
    for key in ("step", "identity", "numbers", "ledger"):
        assert actual_record[key] == expected_record[key], key
    assert read_best_files(folder) == read_best_files(reference)
    assert actual.read("status.json")["status"] == "finished"
