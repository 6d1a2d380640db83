"""Launched runs that are interrupted at a step, and leave no process behind."""

import json
import os
import signal
import time
from pathlib import Path

import psutil

from tests.harness.launching import Started
from tests.harness.waiting import Limit


class Interrupted:
    """A launched run that is on its way."""

    def __init__(self, started: Started, folder: Path) -> None:
        self.started, self.folder = started, folder
        self.launcher = psutil.Process(started.process.pid)
        self.started_before = start_number(folder)

    def at_step(self, step: int) -> "Interrupted":
        """Return as soon as this start has written a row of `step` or a later one to metrics.jsonl."""
        while start_number(self.folder) == self.started_before or last_step(self.folder) < step:
            if self.started.process.poll() is not None:
                done = self.started.finish()
                raise AssertionError(f"ended before step {step}\n{done.stdout}\n{done.stderr}")
            time.sleep(0.002)
        self.family = [self.launcher, *self.launcher.children(recursive=True)]
        return self

    def rank(self, number: int) -> psutil.Process:
        # The launcher's own children come first. MPICH's ranks are those of its proxy.
        for process in [*self.launcher.children(), *self.launcher.children(recursive=True)]:
            environ = process.environ()
            names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
            if next((environ[name] for name in names if name in environ), "0") == str(number):
                return process
        raise AssertionError(f"no rank {number}")

    def interrupt(self, what: str) -> "Interrupted":
        """`what` is a signal and where it goes: "KILL launcher", "TERM rank 1", "INT group", "KILL all"."""
        name, _, target = what.partition(" ")
        number = signal.Signals[f"SIG{name}"]
        if target == "group":
            os.killpg(os.getpgid(self.launcher.pid), number)
        elif target == "all":
            for process in self.family[::-1]:  # children first: the launcher is to notice nothing
                process.send_signal(number)
        elif target == "launcher":
            self.launcher.send_signal(number)
        else:
            self.rank(int(target.removeprefix("rank "))).send_signal(number)
        return self

    def gone(self, seconds: float = 60) -> int:
        """The launcher's exit code, once every process of the run is gone: those it had, and those it started since."""
        code = self.started.finish(seconds).returncode
        alive, limit = (
            [*self.family, *(process for process in psutil.process_iter() if self._is_mine(process))],
            Limit(seconds),
        )
        while alive and (left := limit.left()) > 0:
            _, alive = psutil.wait_procs(alive, min(left, 1.0))
        left = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
        assert not left, f"left behind: {left}"
        return code

    def _is_mine(self, process: psutil.Process) -> bool:
        """By its command line: a rank's workers have that of their rank."""
        try:
            return str(self.folder.parent) in process.cmdline()
        except psutil.Error:
            return False


def start_number(folder: Path) -> int:
    """Changes with each start: every start puts a new file of rows in the place of the old."""
    rows = folder / "metrics.jsonl"
    return rows.stat().st_ino if rows.exists() else 0


def last_step(folder: Path) -> int:
    """The step of the last whole row; 0 if there is none."""
    rows = folder / "metrics.jsonl"
    whole = rows.read_bytes().rpartition(b"\n")[0] if rows.exists() else b""
    return json.loads(whole.rpartition(b"\n")[2])["step"] if whole else 0
