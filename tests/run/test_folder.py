"""Only one start at a time writes a run folder, and its files are complete and exact after any kill."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import Refused
from common.run.folder import RunFolder
from tests.harness.disks import limit_file_size


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    opened = RunFolder(tmp_path / "runs" / "a")
    yield opened
    opened.close()


def read_rows(path: Path) -> list[dict]:
    text = (path / "metrics.jsonl").read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


HOLDER = """
import os, sys, time
from pathlib import Path
from common.run.folder import RunFolder

folder = RunFolder(Path(sys.argv[1]))
if os.fork() == 0:
    os.setsid()  # a data worker that outlives a kill
    sys.stdout.close()
    time.sleep(600)
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.smoke
def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path) -> None:
    path = tmp_path / "a"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        pid = int(holder.stdout.readline())
        workers = [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        try:
            with pytest.raises(Refused) as raised:
                RunFolder(path)
            assert str(raised.value) == (
                f"{path} is in use by process {pid} on {os.uname().nodename}: "
                "wait for it, stop it, or give this run another --name"
            )
            assert not (path / "log.txt").read_text()
            holder.kill()
            holder.wait()
            os.kill(workers[0], 0)  # still there
            second = RunFolder(path)
            assert (path / ".lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}"
            second.close()
        finally:
            holder.kill()
            for worker in workers:
                os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize(
    "torn", ["", '{"step": 40, "train/loss": 0.1', "\n", '{"step": 40}', "[" * 100_000]
)
def test_a_resume_drops_rows_beyond_its_step_and_a_torn_last_one(folder, torn: str) -> None:
    text = "".join(
        json.dumps({"step": step, "train/loss": 1 / step}) + "\n" for step in (10, 20, 30)
    )
    (folder.path / "metrics.jsonl").write_text(text + torn)
    assert [row["step"] for row in folder.rewind(20)] == [10, 20]
    folder.row({"step": 30, "train/loss": 0.25, "train/grad_norm": float("inf")})
    assert [(row["step"], row["train/loss"]) for row in read_rows(folder.path)] == [
        (10, 0.1),
        (20, 0.05),
        (30, 0.25),
    ]
    assert read_rows(folder.path)[-1]["train/grad_norm"] is None, "JSON has no infinity"


def test_a_row_that_does_not_fit_on_the_disk_is_not_half_there(folder: RunFolder) -> None:
    folder.rewind(0)
    folder.row({"step": 1})
    with limit_file_size(40):
        with pytest.raises(OSError):
            folder.row({"step": 2, "text": "x" * 100})
        folder.log("x" * 100)  # the log is not worth a run
    assert read_rows(folder.path) == [{"step": 1}]
    folder.row({"step": 2})
    assert read_rows(folder.path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("name", [".lock", "log.txt"])
def test_no_link_is_followed_and_no_fifo_waited_for(tmp_path, name) -> None:
    victim = tmp_path / "victim"
    run = tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    (run / name).symlink_to(victim)
    with pytest.raises(Refused, match="can't be written"):
        RunFolder(run)
    assert victim.read_text() == "mine"
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(Refused, match="can't be written"):
        RunFolder(run)
