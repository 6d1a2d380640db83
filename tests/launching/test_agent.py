"""This release of torch has what common/launching/agent.py relies on, which no public interface promises."""

import logging
import os
import signal
import sys

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from common.launching import agent
from common.launching.exit_codes import EXIT_FOLDER, STOPPING, handle_stopping


@pytest.fixture
def handlers(monkeypatch):
    """Signal handlers are those of before at the end."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGHUP")
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_launcher_hears_signals_and_reports_failed_processes(
    handlers, tmp_path, caplog
) -> None:
    reported = []
    heard = []
    agent.replace_log(lambda *failure: reported.append(failure))
    agent.handle_signals(lambda number, frame: heard.append(number))
    codes = {0: ("-c", "import sys; sys.exit(3)"), 1: ("-c", "import time; time.sleep(600)")}
    logs = DefaultLogsSpecs(log_dir=str(tmp_path))
    context = start_processes("test", sys.executable, codes, {0: {}, 1: {}}, logs)
    failed, sleeps = (psutil.Process(context.pids()[index]) for index in codes)
    for number in STOPPING:
        os.kill(os.getpid(), number)
    assert heard == list(STOPPING), "torch has taken a signal"
    sleeps.kill()
    agent.await_processes()
    assert failed.status() == sleeps.status() == psutil.STATUS_ZOMBIE, (
        "still to be collected by torch"
    )
    assert context.wait(60).is_failed()
    assert reported in [[(3, 0, failed.pid)], [(-signal.SIGKILL, 1, sleeps.pid)]]
    assert not caplog.records
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").filters.clear()
    context = start_processes("test", sys.executable, {0: codes[0]}, {0: {}}, logs)
    assert context.wait(60).is_failed() and "failed (exitcode" in caplog.text, (
        "nothing was logged before either"
    )


@pytest.mark.parametrize(
    "started_by, is_heard", [("the shell", False), ("torch", True), ("machines", False)]
)
def test_nohup_is_heeded_where_the_launcher_heeds_it(
    handlers, monkeypatch, started_by, is_heard
) -> None:
    """torch's own agent ends its processes at SIGHUP, ignored or not: they have to save before."""
    environ = {
        "the shell": [],
        "torch": ["TORCHELASTIC_RUN_ID"],
        "machines": ["TORCHELASTIC_RUN_ID", EXIT_FOLDER],
    }
    for name in environ[started_by]:
        monkeypatch.setenv(name, "x")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    heard = []
    handle_stopping(lambda number, frame: heard.append(number))
    os.kill(os.getpid(), signal.SIGHUP)
    assert heard == [signal.SIGHUP] * is_heard
