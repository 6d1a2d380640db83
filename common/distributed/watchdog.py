"""Which process keeps the others waiting, what is it doing, and how do all of them end then?

Each process notes what it is about to do. A thread of it writes that into the store every other second, and counts how long
the process has not got on. When that is too long, it looks at what all have written: who writes no more is stopped or lost,
else who has begun the fewest collectives is to blame: for these the others, or their devices, wait, wherever that shows. One
process says so, with step, phase and stack, and every one ends.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType

import psutil
from torch.distributed import PrefixStore, Store

from common.distributed.collectives import begun

BEAT = 2.0  # seconds between two beats
LOOK = 6.0  # seconds between the two looks that tell who beats
ANSWER = timedelta(seconds=3)  # how long the store may take; its process is stopped if it takes longer
NAMED = 3  # processes that a message names
# Where the innermost call stands of a process that waits for others: in a collective, in DDP's reduction, in the sum of step
# reports, or for its device, which waits for others'. With many kernels queued it may wait anywhere, so collectives are counted
# first.
_WAITING = (
    os.path.join("torch", "distributed", ""),
    os.path.join("torch", "cuda", ""),
    os.path.join("torch", "autograd", "graph.py"),
    os.path.join("common", "run", "step_reports.py"),
)


@dataclass
class Beat:
    """What a process says of itself."""

    host: str
    process: int
    launcher: int
    count: int = 0
    step: int = 0
    phase: str = "starting"
    collectives: int = 0  # begun
    waits: bool = False  # for other processes
    stack: str = ""  # where it stands, once it has not got on for long


_place = ["starting", 0, 0]  # phase, step, how often noted; written by the training thread alone
_tell: Callable[[str], None] | None = None
_listener: Callable[[str], None] | None = None
_beating: threading.Event | None = None
_threads: list[threading.Thread] = []


def note(phase: str, step: int | None = None) -> None:
    """Say what this process is about to do, such as "waiting for data"; it has got on. No communication."""
    _place[0] = phase
    _place[1] = _place[1] if step is None else step
    _place[2] += 1
    if _listener:
        _listener(phase)


def listen(listener: Callable[[str], None] | None) -> None:
    """Have `listener(phase)` called with everything that this process notes, until another one or None is given."""
    global _listener
    _listener = listener


def on_end(tell: Callable[[str], None] | None) -> None:
    """Have `tell(cause)` called before this process is ended, to leave word of it."""
    global _tell
    _tell = tell


def begin(store: Store, rank: int, world_size: int, patience: float, name: str) -> None:
    """Watch from now on, until `end`: a rank that does not get on for `patience` seconds ends all of them.

    `name` is the program's, for what is said.
    """
    global _beating
    _beating = threading.Event()
    watch = _Watch(PrefixStore("heartbeat", store), rank, world_size, patience, name, _beating)
    for function in (watch.run, watch.guard):
        thread = threading.Thread(target=function, name="heartbeat", daemon=True)
        thread.start()
        _threads.append(thread)


def end() -> None:
    """Stop watching: this process is about to end by itself. Returns when the threads that watch have ended.

    A thread that is inside torch when the interpreter shuts down would abort the process: Python unwinds its stack, and C++
    takes that for an error ("terminate called without an active exception"). The store answers or gives up within seconds; a
    thread for which it never does is left behind, and never comes back to the interpreter.
    """
    global _beating
    if _beating:
        _beating.set()
        _beating = None
        while _threads:
            _threads.pop().join(LOOK)
    on_end(None)
    listen(None)


class _Idle:
    """For how long this process has not got on. Time in which it was stopped itself does not count."""

    def __init__(self):
        self._noted, self._asked, self._seconds = _place[2], time.monotonic(), 0.0

    def seconds(self) -> float:
        """Seconds of it, up to now; to be asked every few seconds."""
        passed, self._asked = time.monotonic() - self._asked, time.monotonic()
        self._seconds = 0.0 if self._noted != _place[2] else self._seconds + min(passed, LOOK)
        self._noted = _place[2]
        return self._seconds


class _Watch:
    def __init__(self, store: Store, rank: int, world_size: int, patience: float, name: str, stop: threading.Event):
        self.store, self.rank, self.world_size = store, rank, world_size
        self.patience, self.name, self.stop = patience, name, stop
        self.mine = Beat(socket.gethostname(), os.getpid(), os.getppid())
        self.trained_by = threading.main_thread().ident
        self.answered = time.monotonic()  # when the store did so last
        self._beat()
        self.last_of_first = self._first()  # rank 0 may keep the store, which then ends with it
        store.set_timeout(ANSWER)

    def run(self) -> None:
        """Beat until told to stop; look at the others when this process doesn't get on."""
        idle, before = _Idle(), None
        while not self.stop.wait(BEAT):
            seconds = idle.seconds()
            try:
                self._beat(with_stack=seconds >= self.patience)
                self.last_of_first = self._first()
                if seconds < max(self.patience - LOOK, self.patience / 2):
                    before = None
                elif before is None:
                    before = self._look()
                elif seconds >= self.patience:
                    self._judge(before, self._look())
            except RuntimeError:  # of the store, whose process has ended, or in which a stranger wrote
                continue
            self.answered = time.monotonic()

    def guard(self) -> None:
        """The same where the store gives no answer, since the process that keeps it is stopped: who asks it is stuck too."""
        idle = _Idle()
        while not self.stop.wait(BEAT):
            if idle.seconds() >= self.patience and time.monotonic() - self.answered > LOOK:
                first = self.last_of_first
                if self.rank == 1:
                    self._say(f"{_silent(0, first)}; this process stands at step {_place[1]}")
                else:
                    time.sleep(2 * BEAT)  # rank 1 has the word
                self._end([first])

    def _beat(self, with_stack: bool = False) -> None:
        frame = sys._current_frames().get(self.trained_by)
        self.mine.phase, self.mine.step, _ = _place
        self.mine.count += 1
        self.mine.collectives, self.mine.waits = begun(), _waits(frame)
        self.mine.stack = "".join(traceback.format_stack(frame)) if with_stack else ""
        del frame  # what the training thread lets go of is to end there, not in this thread
        self.store.set(str(self.rank), json.dumps(asdict(self.mine)))

    def _first(self) -> Beat:
        return _read(self.store.get("0"))

    def _look(self) -> list[Beat]:
        keys = [str(rank) for rank in range(self.world_size)]
        return [_read(value) for value in self.store.multi_get(keys)]

    def _judge(self, before: list[Beat], after: list[Beat]) -> None:
        """Say who is to blame, if this is the first process that beats, else let that one say it; then end."""
        silent = [rank for rank in range(self.world_size) if before[rank].count == after[rank].count]
        alive = [rank for rank in range(self.world_size) if rank not in silent]
        with contextlib.suppress(RuntimeError):
            if self.rank != alive[0]:
                self.store.wait(["said"], timedelta(seconds=3 * BEAT))
            else:
                self._say(self._of_silent(silent, after) if silent else self._of_late(alive))
                self.store.set("said", "")
        self._end([after[rank] for rank in silent])

    def _of_silent(self, silent: list[int], beats: list[Beat]) -> str:
        others = max(beat.step for rank, beat in enumerate(beats) if rank not in silent)
        return f"{_and_more([_silent(rank, beats[rank]) for rank in silent])}; the others stand at step {others}"

    def _of_late(self, alive: list[int]) -> str:
        time.sleep(BEAT)  # until all have left their stacks
        beats = self._look()
        late = blamed({rank: beats[rank] for rank in alive})
        stacks = [f"rank {rank} is at\n{beats[rank].stack}" for rank in late[:NAMED] if beats[rank].stack]
        if late == alive:
            stand = _and_more([f"{_who(rank, beats[rank])} stands at {_where(beats[rank])}" for rank in late])
            said = f"no process is behind the others, so that a device or the network between them hangs: {stand}"
        else:
            said = _and_more(
                [f"{_who(rank, beats[rank])} keeps the others waiting: {_where(beats[rank])}" for rank in late]
            )
        return "\n".join([said, *stacks]).rstrip()

    def _kill(self, beat: Beat) -> None:
        """End a process of this machine that can't hear its launcher: it is stopped."""
        if (beat.host, beat.launcher) == (self.mine.host, self.mine.launcher):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(beat.process)
                if process.ppid() == beat.launcher:
                    process.kill()

    def _say(self, said: str) -> None:
        waited = f"Nobody got on for {self.patience:.0f} s (--collective_timeout)"
        rest = "all processes end; the same command goes on from the last checkpoint"
        print(f"{self.name}: {said}\n{waited}: {rest}", file=sys.stderr, flush=True)
        if _tell:
            with contextlib.suppress(OSError):
                _tell(said.partition("\n")[0])

    def _end(self, stopped: list[Beat]) -> None:
        """End this process, and those that are stopped: only now, since their end alone would end the one that has the word."""
        for beat in stopped:
            self._kill(beat)
        sys.stdout.flush()
        os._exit(1)


def blamed(beats: dict[int, Beat]) -> list[int]:
    """The ranks that keep the others waiting: of the fewest collectives, else not waiting, else of the lowest step, or all."""
    for count in (lambda beat: beat.collectives, lambda beat: beat.waits, lambda beat: beat.step):
        fewest = min(map(count, beats.values()))
        if len(late := [rank for rank, beat in beats.items() if count(beat) == fewest]) < len(beats):
            return late
    return [*beats]


def _read(text: bytes) -> Beat:
    try:
        return Beat(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise RuntimeError("no process of this run wrote this") from error


def _waits(frame: FrameType | None) -> bool:
    return frame is not None and any(place in frame.f_code.co_filename for place in _WAITING)


def _who(rank: int, beat: Beat) -> str:
    return f"rank {rank} (process {beat.process} on {beat.host})"


def _where(beat: Beat) -> str:
    return f"step {beat.step}, {beat.phase}"


def _silent(rank: int, beat: Beat) -> str:
    return f"{_who(rank, beat)} gives no sign of life, it is stopped or its machine hangs; its last was {_where(beat)}"


def _and_more(texts: list[str]) -> str:
    more = len(texts) - NAMED
    return "; ".join(texts[:NAMED]) + (f"; and {more} more" if more > 0 else "")
