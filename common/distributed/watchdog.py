"""Watchdog: finds the rank that blocks the others, reports its step, phase and stack, and ends the run.

Each process notes what it is about to do. A thread of the process writes this into the store every
two seconds (its heartbeat) and measures for how long nothing new was noted. When that takes too
long, the thread compares the heartbeats of all ranks. A rank whose heartbeat has stopped is itself
stopped or lost. Otherwise the rank that has started the fewest collectives is to blame: the others,
or their devices, wait for it, wherever they are. One process reports it, and all end.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType

import psutil
from torch.distributed import PrefixStore, Store

from common.distributed.collectives import count_collectives, join_first

INTERVAL = 2.0  # seconds between two heartbeats
# Seconds between two readings of the heartbeats, which show whose have stopped.
COMPARISON = 6.0
# How long the store may take to answer; after that, its process counts as stopped.
ANSWER = timedelta(seconds=3)
MAX_STACKS = 3  # that a message shows
# Files in which a process that waits for others is: in a collective, in DDP's reduction, in the sum
# of step reports, or waiting for its device, which waits for others'. With many kernels queued, the
# host may wait in any other line, so collectives are compared first.
_WAITING = (
    os.path.join("torch", "distributed", ""),
    os.path.join("torch", "cuda", ""),
    os.path.join("torch", "autograd", "graph.py"),
    os.path.join("common", "run", "step_reports.py"),
)


@dataclass
class Heartbeat:
    """What a process tells the others about itself."""

    rank: int
    host: str
    process: int
    launcher: int
    count: int = 0  # of heartbeats
    step: int = 0
    phase: str = "starting"
    collectives: int = 0  # that it has started
    waits: bool = False  # for other processes
    stack: str = ""  # of the training thread, only if it has made no progress for too long

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    @property
    def progress(self) -> str:
        """Step and phase, for a message."""
        return f"step {self.step}, {self.phase}"


# Written by the training thread only.
_phase = "starting"
_step = 0
_num_notes = 0

_end_callback: Callable[[str], None] | None = None
_stop = threading.Event()
_threads: list[threading.Thread] = []


def note(phase: str, step: int | None = None) -> None:
    """Note what this process is about to do, such as "waiting for data"; this counts as progress.

    No communication.
    """
    global _phase, _step, _num_notes
    _phase = phase
    if step is not None:
        _step = step
    _num_notes += 1


def set_end_callback(callback: Callable[[str], None] | None) -> None:
    """Call `callback(cause)` before the watchdog ends this process, so that the cause can be recorded."""
    global _end_callback
    _end_callback = callback


def start(store: Store, rank: int, world_size: int, timeout: float, program: str) -> None:
    """Start the watchdog. Until `stop`, a rank without progress for `timeout` seconds ends all ranks.

    `program` is its name for messages.
    """
    _stop.clear()
    watch = _Watch(PrefixStore("heartbeat", store), rank, world_size, timeout, program)
    for function in (watch.run, watch.guard):
        thread = threading.Thread(target=function, name="watchdog", daemon=True)
        _threads.append(thread)
        thread.start()


def stop() -> None:
    """Stop the watchdog: this process is about to end by itself.

    Returns when the watchdog's threads have ended. A thread that is inside torch when the
    interpreter shuts down would abort the process: Python unwinds its stack, and C++ takes that for
    an error ("terminate called without an active exception"). The store answers or fails within
    seconds. A thread that gets no answer at all is left behind: it never returns to the
    interpreter.
    """
    _stop.set()
    while _threads:
        _threads.pop().join(COMPARISON)
    set_end_callback(None)


class _IdleTimer:
    """Measures for how long this process has made no progress.

    Time in which it was stopped itself does not count.
    """

    def __init__(self) -> None:
        self._num_notes = _num_notes
        self._last_reading = time.monotonic()
        self._idle_s = 0.0

    def read(self) -> float:
        """Seconds without progress so far. Must be called every few seconds."""
        now = time.monotonic()
        if self._num_notes != _num_notes:
            self._idle_s = 0.0
        else:
            self._idle_s += min(now - self._last_reading, COMPARISON)
        self._last_reading = now
        self._num_notes = _num_notes
        return self._idle_s


class _Watch:
    """The watchdog of one rank; `run` and `guard` are threads."""

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout: float, program: str
    ) -> None:
        self.store = store
        self.world_size = world_size
        self.timeout = timeout
        self.program = program
        self.heartbeat = Heartbeat(rank, socket.gethostname(), os.getpid(), os.getppid())
        self.training_thread = threading.main_thread().ident
        self.last_answer = time.monotonic()  # of the store
        self._send_heartbeat()
        store.set_timeout(ANSWER)

    def run(self) -> None:
        """Send heartbeats until told to stop; compare those of all ranks when this one makes no progress."""
        timer = _IdleTimer()
        first_reading = None
        while not _stop.wait(INTERVAL):
            idle_s = timer.read()
            try:
                self._send_heartbeat(with_stack=idle_s >= self.timeout)
                if idle_s < max(self.timeout - COMPARISON, self.timeout / 2):
                    first_reading = None
                elif first_reading is None:
                    first_reading = self._read_all()
                elif idle_s >= self.timeout:
                    self._end_run(first_reading, self._read_all())
            except RuntimeError:
                # The store's process has ended, or a stranger wrote into the store.
                continue
            self.last_answer = time.monotonic()

    def guard(self) -> None:
        """Do the same if the store does not answer because its process is stopped.

        `run` is then stuck as well.
        """
        timer = _IdleTimer()
        while not _stop.wait(INTERVAL):
            is_idle = timer.read() >= self.timeout
            if is_idle and time.monotonic() - self.last_answer > COMPARISON:
                if self.heartbeat.rank == 1:
                    silence = _describe_silence(self.main_heartbeat)
                    self._report(f"{silence}; this process stands at step {_step}")
                else:
                    time.sleep(2 * INTERVAL)  # rank 1 reports first
                self._end([self.main_heartbeat])

    def _send_heartbeat(self, with_stack: bool = False) -> None:
        """Send a heartbeat, and read the one of rank 0.

        Rank 0 may keep the store: the store then ends with it.
        """
        frame = sys._current_frames().get(self.training_thread or 0)
        heartbeat = self.heartbeat
        heartbeat.phase = _phase
        heartbeat.step = _step
        heartbeat.count += 1
        heartbeat.collectives = count_collectives()
        heartbeat.waits = _is_waiting(frame)
        heartbeat.stack = "".join(traceback.format_stack(frame)) if with_stack else ""
        del frame  # objects that the training thread releases are freed there, not in this thread
        self.store.set(str(heartbeat.rank), json.dumps(asdict(heartbeat)))
        self.main_heartbeat = _parse_heartbeat(self.store.get("0"))

    def _read_all(self) -> list[Heartbeat]:
        keys = [str(rank) for rank in range(self.world_size)]
        return [_parse_heartbeat(text) for text in self.store.multi_get(keys)]

    def _end_run(self, before: list[Heartbeat], after: list[Heartbeat]) -> None:
        """Report who is to blame, or wait for the report of another rank; then end.

        The first rank whose heartbeat has not stopped reports it.
        """
        silent = []
        alive = []
        for previous, current in zip(before, after, strict=True):
            if previous.count == current.count:
                silent.append(current)
            else:
                alive.append(current)
        with suppress(RuntimeError):
            if self.heartbeat.rank != alive[0].rank:
                self.store.wait(["reported"], timedelta(seconds=3 * INTERVAL))
            else:
                text = _describe_silent(silent, alive) if silent else self._describe_stragglers()
                self._report(text)
                self.store.set("reported", "")
        self._end(silent)

    def _describe_stragglers(self) -> str:
        time.sleep(INTERVAL)  # until all ranks have sent their stacks
        heartbeats = self._read_all()
        stragglers = find_stragglers(heartbeats)
        if len(stragglers) == len(heartbeats):
            descriptions = [f"{beat} stands at {beat.progress}" for beat in stragglers]
            text = (
                "no process is behind the others, so a device or the network between them hangs: "
                f"{join_first(descriptions)}"
            )
        else:
            text = join_first(
                [f"{beat} keeps the others waiting: {beat.progress}" for beat in stragglers]
            )
        for beat in stragglers[:MAX_STACKS]:
            if beat.stack:
                text += f"\nrank {beat.rank} is at\n{beat.stack}"
        return text.rstrip()

    def _report(self, text: str) -> None:
        print(
            f"{self.program}: {text}\n"
            f"No progress for {self.timeout:.0f} s (--collective_timeout): all processes end; the "
            "same command resumes from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        if _end_callback:
            with suppress(OSError):
                _end_callback(text.partition("\n")[0])

    def _end(self, stopped: list[Heartbeat]) -> None:
        """End this process. Not earlier: the launcher would end the rank that still has to report.

        Stopped processes of this machine, which can't receive the signals of their launcher, are killed.
        """
        for beat in stopped:
            if beat.host == self.heartbeat.host and beat.launcher == self.heartbeat.launcher:
                with suppress(psutil.Error):
                    process = psutil.Process(beat.process)
                    if process.ppid() == beat.launcher:
                        process.kill()
        sys.stdout.flush()
        os._exit(1)


def find_stragglers(heartbeats: list[Heartbeat]) -> list[Heartbeat]:
    """The ranks that keep the others waiting.

    Those with the fewest collectives, else those that don't wait for others, else those at the
    lowest step; all ranks if they are equal in all of this.
    """
    for field in ("collectives", "waits", "step"):
        lowest = min(getattr(beat, field) for beat in heartbeats)
        stragglers = [beat for beat in heartbeats if getattr(beat, field) == lowest]
        if len(stragglers) < len(heartbeats):
            return stragglers
    return heartbeats


def _parse_heartbeat(text: bytes) -> Heartbeat:
    try:
        return Heartbeat(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise RuntimeError("not written by a process of this run") from error


def _is_waiting(frame: FrameType | None) -> bool:
    """True if the training thread is in a function that waits for other processes."""
    if frame is None:
        return False
    return any(file in frame.f_code.co_filename for file in _WAITING)


def _describe_silent(silent: list[Heartbeat], alive: list[Heartbeat]) -> str:
    max_step = max(beat.step for beat in alive)
    descriptions = [_describe_silence(beat) for beat in silent]
    return f"{join_first(descriptions)}; the others stand at step {max_step}"


def _describe_silence(heartbeat: Heartbeat) -> str:
    return (
        f"{heartbeat} gives no sign of life, it is stopped or its machine hangs; its last was "
        f"{heartbeat.progress}"
    )
