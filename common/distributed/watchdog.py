"""Watchdog: finds the rank that blocks the others, reports its step, phase and stack, and ends the run.

Each process notes what it is about to do. A thread of the process writes this into the store every
two seconds (its heartbeat) and measures for how long nothing new was noted. When that takes too
long, the thread compares the heartbeats of all ranks. A rank whose heartbeat has stopped is itself
stopped or lost. Otherwise the rank that has begun the fewest collectives is to blame: the others,
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
COMPARISON = 6.0  # seconds between two looks at the heartbeats, which show whose have stopped
# How long the store may take to answer; after that, its process counts as stopped.
ANSWER = timedelta(seconds=3)
STACKS = 3  # that a message shows
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
    collectives: int = 0  # begun
    waits: bool = False  # for other processes
    stack: str = ""  # of the training thread, only if it has made no progress for too long

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    @property
    def place(self) -> str:
        """Step and phase, for a message."""
        return f"step {self.step}, {self.phase}"


_phase, _step, _notes = "starting", 0, 0  # written by the training thread only; notes are counted
_tell: Callable[[str], None] | None = None
_stop = threading.Event()
_threads: list[threading.Thread] = []


def note(phase: str, step: int | None = None) -> None:
    """Note what this process is about to do, such as "waiting for data"; this counts as progress.
    No communication.
    """
    global _phase, _step, _notes
    _phase, _step, _notes = phase, _step if step is None else step, _notes + 1


def set_end_callback(tell: Callable[[str], None] | None) -> None:
    """Call `tell(cause)` before the watchdog ends this process, so that the cause can be recorded."""
    global _tell
    _tell = tell


def start(store: Store, rank: int, world_size: int, timeout: float, program: str) -> None:
    """Start the watchdog. Until `stop`, a rank without progress for `timeout` seconds ends all ranks.

    `program` is its name for messages.
    """
    _stop.clear()
    watch = _Watch(PrefixStore("heartbeat", store), rank, world_size, timeout, program)
    for function in (watch.run, watch.guard):
        _threads.append(threading.Thread(target=function, name="watchdog", daemon=True))
        _threads[-1].start()


def stop() -> None:
    """Stop the watchdog: this process is about to end by itself. Returns when the watchdog's
    threads have ended.

    A thread that is inside torch when the interpreter shuts down would abort the process: Python
    unwinds its stack, and C++ takes that for an error ("terminate called without an active
    exception"). The store answers or fails within seconds. A thread that gets no answer at all is
    left behind: it never returns to the interpreter.
    """
    _stop.set()
    while _threads:
        _threads.pop().join(COMPARISON)
    set_end_callback(None)


class _IdleTimer:
    """Measures for how long this process has made no progress. Time in which it was stopped itself
    does not count.
    """

    def __init__(self) -> None:
        self._noted, self._asked, self._seconds = _notes, time.monotonic(), 0.0

    def seconds(self) -> float:
        """Seconds without progress so far. Must be called every few seconds."""
        passed, self._asked = time.monotonic() - self._asked, time.monotonic()
        self._seconds = 0.0 if self._noted != _notes else self._seconds + min(passed, COMPARISON)
        self._noted = _notes
        return self._seconds


class _Watch:
    """The watchdog of one rank; `run` and `guard` are threads."""

    def __init__(
        self, store: Store, rank: int, world_size: int, patience: float, name: str
    ) -> None:
        self.store, self.world_size, self.patience, self.name = store, world_size, patience, name
        self.mine = Heartbeat(rank, socket.gethostname(), os.getpid(), os.getppid())
        self.training_thread = threading.main_thread().ident
        self.answered = time.monotonic()  # when the store last answered
        self._beat()
        store.set_timeout(ANSWER)

    def run(self) -> None:
        """Send heartbeats until told to stop; compare all ranks' heartbeats when this process makes
        no progress.
        """
        idle, before = _IdleTimer(), None
        while not _stop.wait(INTERVAL):
            seconds = idle.seconds()
            try:
                self._beat(with_stack=seconds >= self.patience)
                if seconds < max(self.patience - COMPARISON, self.patience / 2):
                    before = None
                elif before is None:
                    before = self._read_all()
                elif seconds >= self.patience:
                    self._judge(before, self._read_all())
            except RuntimeError:
                # The store's process has ended, or a stranger wrote into the store.
                continue
            self.answered = time.monotonic()

    def guard(self) -> None:
        """Do the same if the store does not answer because its process is stopped; `run` is then
        stuck as well.
        """
        idle = _IdleTimer()
        while not _stop.wait(INTERVAL):
            if idle.seconds() >= self.patience and time.monotonic() - self.answered > COMPARISON:
                if self.mine.rank == 1:
                    self._report(
                        f"{_silent(self.last_of_first)}; this process stands at step {_step}"
                    )
                else:
                    time.sleep(2 * INTERVAL)  # rank 1 reports first
                self._end([self.last_of_first])

    def _beat(self, with_stack: bool = False) -> None:
        """Send a heartbeat, and read the one of rank 0, which may keep the store: the store then
        ends with it.
        """
        frame = sys._current_frames().get(self.training_thread or 0)
        self.mine.phase, self.mine.step = _phase, _step
        self.mine.count += 1
        self.mine.collectives, self.mine.waits = count_collectives(), _waits(frame)
        self.mine.stack = "".join(traceback.format_stack(frame)) if with_stack else ""
        del frame  # objects that the training thread releases are freed there, not in this thread
        self.store.set(str(self.mine.rank), json.dumps(asdict(self.mine)))
        self.last_of_first = _read(self.store.get("0"))

    def _read_all(self) -> list[Heartbeat]:
        return [
            _read(value)
            for value in self.store.multi_get([str(rank) for rank in range(self.world_size)])
        ]

    def _judge(self, before: list[Heartbeat], after: list[Heartbeat]) -> None:
        """Report who is to blame, if this is the first rank with a heartbeat, or wait for that
        rank's report; then end.
        """
        silent = [now for then, now in zip(before, after, strict=True) if then.count == now.count]
        alive = [beat for beat in after if beat not in silent]
        with suppress(RuntimeError):
            if self.mine.rank != alive[0].rank:
                self.store.wait(["reported"], timedelta(seconds=3 * INTERVAL))
            else:
                others = f"the others stand at step {max(beat.step for beat in alive)}"
                self._report(
                    f"{join_first([*map(_silent, silent)])}; {others}"
                    if silent
                    else self._about_late()
                )
                self.store.set("reported", "")
        self._end(silent)

    def _about_late(self) -> str:
        time.sleep(INTERVAL)  # until all ranks have sent their stacks
        late = find_stragglers(beats := self._read_all())
        does = "stands at" if late == beats else "keeps the others waiting:"
        text = join_first([f"{beat} {does} {beat.place}" for beat in late])
        if late == beats:
            text = (
                "no process is behind the others, so a device or the network between them hangs: "
                f"{text}"
            )
        stacks = [f"rank {beat.rank} is at\n{beat.stack}" for beat in late[:STACKS] if beat.stack]
        return "\n".join([text, *stacks]).rstrip()

    def _report(self, text: str) -> None:
        waited = f"No progress for {self.patience:.0f} s (--collective_timeout)"
        rest = "all processes end; the same command resumes from the last checkpoint"
        print(f"{self.name}: {text}\n{waited}: {rest}", file=sys.stderr, flush=True)
        if _tell:
            with suppress(OSError):
                _tell(text.partition("\n")[0])

    def _end(self, stopped: list[Heartbeat]) -> None:
        """End this process. Not earlier: the launcher would end the rank that still has to report.

        Stopped processes of this machine, which can't receive the signals of their launcher, are killed.
        """
        for beat in stopped:
            if (beat.host, beat.launcher) == (self.mine.host, self.mine.launcher):
                with suppress(psutil.Error):
                    process = psutil.Process(beat.process)
                    if process.ppid() == beat.launcher:
                        process.kill()
        sys.stdout.flush()
        os._exit(1)


def find_stragglers(beats: list[Heartbeat]) -> list[Heartbeat]:
    """The ranks that keep the others waiting: those with the fewest collectives, else those that
    don't wait for others, else those at the lowest step; all ranks if they are equal in all of
    this.
    """
    for count in (lambda beat: beat.collectives, lambda beat: beat.waits, lambda beat: beat.step):
        fewest = min(map(count, beats))
        if len(late := [beat for beat in beats if count(beat) == fewest]) < len(beats):
            return late
    return beats


def _read(text: bytes) -> Heartbeat:
    try:
        return Heartbeat(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise RuntimeError("not written by a process of this run") from error


def _waits(frame: FrameType | None) -> bool:
    return frame is not None and any(place in frame.f_code.co_filename for place in _WAITING)


def _silent(beat: Heartbeat) -> str:
    return (
        f"{beat} gives no sign of life, it is stopped or its machine hangs; its last was "
        f"{beat.place}"
    )
