"""A step has one row, the same everywhere; a full disk is noticed; only the main process writes."""

from pathlib import Path

import pytest

from common.run.folder import RunFolder
from common.run.log import RunLog
from tests.harness.dashboard import Dashboard
from tests.harness.disks import limit_file_size
from tests.harness.outcomes import read_rows


@pytest.fixture
def opened(tmp_path: Path):
    folder = RunFolder(tmp_path / "a")
    folder.rewind(0)
    journal = RunLog(folder)
    dashboard = Dashboard()
    journal.open(dashboard, 0, 30)
    yield journal, dashboard, tmp_path / "a"
    folder.close()


def read_run_rows(path: Path) -> list[dict]:
    return read_rows(path / "metrics.jsonl")


def test_a_step_has_one_row_and_the_dashboard_begins_late(opened) -> None:
    journal, dashboard, path = opened
    assert not dashboard.has_begun
    journal.advance(1)
    assert dashboard.has_begun
    journal.note(10, {"train/loss": 0.5})
    journal.note(10, {"eval/top1": 0.9})
    assert read_run_rows(path) == []  # more may come
    journal.note(20, {"train/loss": 0.25})
    journal.flush()
    journal.flush()
    assert read_run_rows(path) == [
        {"step": 10, "train/loss": 0.5, "eval/top1": 0.9},
        {"step": 20, "train/loss": 0.25},
    ]
    assert dashboard.rows == [
        (10, {"train/loss": 0.5, "eval/top1": 0.9}),
        (20, {"train/loss": 0.25}),
    ]


def test_lines_are_logged_without_control_characters(opened, capsys) -> None:
    journal, _, path = opened
    journal.say("a\nb \x1b[2J \x9b \u202e \udcff é 足")
    journal.table({"data": "digits", "model": "x\r\ny"})
    journal.leading = "top1"
    journal.note(
        10, {"train/loss": 0.51234, "eval/top1": 0.875, "train/lr": 1.0, "eval/loss": None}
    )
    journal.note(20, {"eval/top1": 1.0})
    journal.flush()
    lines = capsys.readouterr().out.splitlines()
    table = ["  data   digits", "  model  x\\r\\ny"]
    assert lines[:4] == (
        ["a\\nb \\x1b[2J \\x9b \\u202e \\udcff é 足"]
        + table
        + ["step 10/30  loss 0.5123  top-1 0.875"]
    )
    # Once there is a pace.
    assert lines[4].startswith("step 20/30  top-1 1  ") and lines[4].endswith(" s left")
    assert [line.split("  ", 1)[1] for line in (path / "log.txt").read_text().splitlines()] == lines


def test_after_a_row_that_could_not_be_written_there_is_no_other(opened, capsys) -> None:
    journal, dashboard, path = opened
    journal.check()
    with limit_file_size():
        journal.note(1, {"train/loss": 1.0})
        journal.flush()
    journal.note(2, {"train/loss": 1.0})
    journal.flush()
    assert read_run_rows(path) == [] and [step for step, _ in dashboard.rows] == [1, 2]
    with pytest.raises(OSError, match="File too large"):
        journal.check()


def test_all_but_the_main_process_are_silent(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = RunLog(None)
    dashboard = Dashboard()
    journal.table({"a": "b"})
    journal.open(dashboard, 0, 10)
    journal.note(1, {"train/loss": 1.0})
    journal.flush()
    journal.summary({"best": {}, "last": {}})
    output = capsys.readouterr()
    assert (
        output.out == output.err == "" and dashboard.rows == [] and list(tmp_path.iterdir()) == []
    )
