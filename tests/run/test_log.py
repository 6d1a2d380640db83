"""A step has one row, the same everywhere; a full disk is noticed; only the main process writes."""

import json
from pathlib import Path

import pytest

from common.run.folder import RunFolder
from common.run.log import RunLog
from tests.harness.dashboard import Dashboard


@pytest.fixture
def opened(tmp_path: Path):
    folder = RunFolder(tmp_path / "a")
    folder.rewind(0)
    journal, dashboard = RunLog(folder), Dashboard()
    journal.open(dashboard, 0, 30)
    yield journal, dashboard, tmp_path / "a"
    folder.close()


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_the_dashboard_begins_after_the_first_step(opened) -> None:
    journal, dashboard, _ = opened
    assert not dashboard.begun
    journal.advance(1)
    assert dashboard.begun


def test_all_values_of_a_step_are_in_one_row(opened) -> None:
    journal, dashboard, path = opened
    journal.note(10, {"train/loss": 0.5})
    journal.note(10, {"eval/top1": 0.9})
    assert rows(path) == []  # more may come
    journal.note(20, {"train/loss": 0.25})
    journal.flush()
    journal.flush()
    assert rows(path) == [{"step": 10, "train/loss": 0.5, "eval/top1": 0.9}, {"step": 20, "train/loss": 0.25}]
    assert dashboard.rows == [(10, {"train/loss": 0.5, "eval/top1": 0.9}), (20, {"train/loss": 0.25})]


def test_lines_go_to_the_terminal_and_the_log(opened, capsys: pytest.CaptureFixture) -> None:
    journal, _, path = opened
    journal.say("hello")
    journal.table({"data": "digits", "model": "resnet"})
    journal.note(10, {"train/loss": 0.51234, "eval/top1": 0.875, "train/lr": 1.0, "eval/loss": None})
    journal.note(20, {"eval/top1": 1.0})
    journal.flush()
    said = capsys.readouterr().out
    assert said.startswith("hello\n  data   digits\n  model  resnet\nstep 10/30  loss 0.5123  top-1 0.875\n")
    assert "step 20/30  top-1 1  " in said and said.endswith(" s left\n")  # once there is a pace
    assert [line.split("  ", 1)[1] for line in (path / "log.txt").read_text().splitlines()] == said.splitlines()


def test_lines_without_a_terminal_are_rare_but_never_leave_out_an_evaluation_or_the_end(
    opened, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _, _ = opened
    now = [1000.0]
    monkeypatch.setattr("common.run.log.time.perf_counter", lambda: now[0])
    for step in range(1, 31):
        now[0] += 0.5
        journal.note(step, {"train/loss": 1.0} | ({"eval/top1": 0.5} if step == 7 else {}))
        journal.flush()
    lines = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert 7 in lines and 30 in lines and len(lines) < 12


def test_results_go_to_the_summary_and_the_dashboard(opened) -> None:
    journal, dashboard, path = opened
    values = {"step": 30, "best": {"step": 20, "eval/top1": 0.9}, "last": {"step": 30, "eval/top1": 0.8}}
    journal.summary(values)
    assert json.loads((path / "summary.json").read_text()) == values
    expected = {"best/step": 20, "best/eval/top1": 0.9, "last/step": 30, "last/eval/top1": 0.8}
    assert dashboard.results == expected
    journal.pictures(30, {"curves": path})
    assert dashboard.shown == {30: {"curves": path}} and dashboard.boxed == []
    journal.pictures(31, {"predictions": path}, ["an image with boxes"])
    assert dashboard.boxed == [31, "an image with boxes"]
    assert journal.close(exit_code=1, patience=2.0) == "over there" and dashboard.ended == (1, 2.0)


def test_after_a_row_that_could_not_be_written_there_is_no_other(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, dashboard, path = opened
    journal.check()
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "row", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        journal.note(1, {"train/loss": 1.0})
        journal.flush()
    assert journal.failed
    journal.note(2, {"train/loss": 1.0})
    journal.flush()
    assert rows(path) == [] and [step for step, _ in dashboard.rows] == [1, 2]
    with pytest.raises(OSError, match="No space"):
        journal.check()


def test_all_but_the_main_process_are_silent(capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal, dashboard = RunLog(None), Dashboard()
    journal.say("hello")
    journal.table({"a": "b"})
    journal.open(dashboard, 0, 10)
    journal.advance(1)
    journal.note(1, {"train/loss": 1.0})
    journal.note(2, {"train/loss": 1.0})
    journal.flush()
    journal.summary({"best": {}, "last": {}})
    output = capsys.readouterr()
    assert output.out == output.err == "" and not journal.failed
    assert dashboard.rows == [] and dashboard.results == {} and list(tmp_path.iterdir()) == []


def test_control_characters_in_names_are_escaped(opened, capsys) -> None:
    journal, _, path = opened
    journal.say("a\nb \x1b[2J \x9b \u202e \udcff é 足")
    journal.table({"model": "x\r\ny"})
    told = ["a\\nb \\x1b[2J \\x9b \\u202e \\udcff é 足", "  model  x\\r\\ny"]
    assert capsys.readouterr().out.splitlines() == told
    assert [line[21:] for line in (path / "log.txt").read_text().splitlines()] == told
