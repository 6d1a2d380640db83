"""Launched runs that are watched, interrupted at a step, and leave no process behind."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.harness.launching import Started
from tests.harness.outcomes import read
from tests.harness.waiting import Limit, end_with_stacks


class Watched:
    """A run folder that is being written, by one start after the other."""

    def __init__(self, folder: Path, started: list[Started]) -> None:
        self.folder = folder
        self.started = started

    def until(
        self, condition: Callable[[], bool], what: str, seconds: float = 90, pause: float = 0.01
    ) -> float:
        """Wait for it, at most `seconds` of an idle machine; the seconds that took."""
        began = time.monotonic()
        limit = Limit(seconds)
        while not condition():
            ended = [each for each in self.started if each.process.poll() is not None]
            if ended or limit.left() <= 0:
                end_with_stacks(
                    psutil.Process(each.process.pid) for each in self.started if each not in ended
                )
                texts = [each.stdout.read_text() + each.stderr.read_text() for each in self.started]
                raise AssertionError(
                    "\n".join([f"{what}: {'ended' if ended else 'not'} in {limit}"] + texts)
                )
            time.sleep(pause)
        return time.monotonic() - began

    def step(self) -> int:
        """The step of the last whole row; 0 if there is none."""
        rows = self.folder / "metrics.jsonl"
        if not rows.exists():
            return 0
        whole = rows.read_bytes().rpartition(b"\n")[0]
        return json.loads(whole.rpartition(b"\n")[2])["step"] if whole else 0

    def start_number(self) -> int:
        """Changes with each start: every start puts a new file of rows in the place of the old."""
        rows = self.folder / "metrics.jsonl"
        return rows.stat().st_ino if rows.exists() else 0

    def beyond(self, start: int, step: int = 0) -> bool:
        """True if a later start than `start` has made steps, and has come to `step`."""
        return self.start_number() != start and self.step() > step

    def world_size(self) -> int:
        return read(self.folder / "environment.json")["world_size"]


class Interrupted(Watched):
    """A launched run that is on its way."""

    def __init__(self, started: Started, folder: Path) -> None:
        super().__init__(folder, [started])
        self.launcher = psutil.Process(started.process.pid)
        self.started_before = self.start_number()

    def at_step(self, step: int) -> "Interrupted":
        """Return as soon as this start has written a row of `step` or a later one to metrics.jsonl."""
        self.until(
            lambda: self.beyond(self.started_before, step - 1),
            f"step {step}",
            seconds=600,
            pause=0.002,
        )
        self.family = [self.launcher] + self.launcher.children(recursive=True)
        return self

    def rank(self, number: int) -> psutil.Process:
        # The launcher's own children come first. MPICH's ranks are children of its proxy.
        for process in self.launcher.children() + self.launcher.children(recursive=True):
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
        """The launcher's exit code, once every process of the run is gone: those it had, and those
        it started since.
        """
        code = self.started[0].finish(seconds).returncode
        started_since = [process for process in psutil.process_iter() if self._is_mine(process)]
        alive = self.family + started_since
        limit = Limit(seconds)
        while alive and limit.left() > 0:
            _, alive = psutil.wait_procs(alive, 1.0)
        left = [
            process
            for process in alive
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]
        for process in left:
            process.kill()
        assert not left, f"left behind: {left}"
        return code

    def _is_mine(self, process: psutil.Process) -> bool:
        """By its command line, which a rank's workers have, too."""
        try:
            return str(self.folder.parent) in process.cmdline()
        except psutil.Error:
            return False
