"""Session: one call of the doctor. All checks run in one order on all ranks, and end in one table.

A check that raises becomes a row with its cause; the other ranks learn it from the store and go on to the next check. A check
that exceeds its limit on a rank ends the doctor there: a row says in which line it is stuck.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import Store

from common.distributed.collectives import is_lost_peer
from common.durable import replace_file
from common.errors import Refused, printable
from common.launching.exit_codes import announce_exit
from common.launching.launch import share_cores
from common.launching.meeting import choose_interface
from tools.doctor import bandwidth, interfaces, meeting, rehearsal
from tools.doctor.finding import Finding, Status
from tools.doctor.table import HERE, ON_MACHINE, fold, show
from tools.doctor.world import LostPeer, World, this_process

LAST_ROWS_S = 10.0  # how long rank 0 waits for the rows of a rank that is late
PRINTED_S = 15.0  # how long the other ranks wait until rank 0 has printed the table
_WAITING = ("torch/distributed/", "tools/doctor/world.py", "torch/cuda/")  # files in which a rank waits for others
_STOPPING = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Check:
    """A check. `name` is unique; --only selects by its first word, with which its rows begin.

    It runs on every rank. If it `exchanges` anything with others, it does so after all have met, and rank 0's rows count.
    Else it runs before that, and may be run `once_per_machine`.
    """

    name: str
    function: Callable[[World], list[Finding]]
    exchanges: bool = True
    limit: float = 15.0  # seconds
    once_per_machine: bool = False


CHECKS = [
    Check("launch", meeting.launch, exchanges=False),
    Check("network: interfaces", interfaces.interfaces, exchanges=False, once_per_machine=True),
    Check("network: MTU", interfaces.same_mtu),
    Check("network: ports", interfaces.ports),
    Check("rehearsal", rehearsal.rehearse, limit=rehearsal.LIMIT_S),
    Check("network: bandwidth", bandwidth.bandwidth, limit=40.0),
]


class Stopped(BaseException):
    """A person, or the launcher after a death, ends the doctor."""


def _stop(number: int, _frame: Any) -> None:
    raise Stopped(f"stopped by {signal.Signals(number).name}")


def examine(options: argparse.Namespace, environ: MutableMapping[str, str]) -> int:
    """Run the checks that `options` asks for; returns the exit code. Raises `Refused`."""
    words = {check: check.name.partition(":")[0] for check in CHECKS}
    only = {word.strip() for word in (options.only or "").split(",")} - {""}
    if unknown := only - {*words.values()}:
        raise Refused(f"--only {', '.join(sorted(unknown))}: take {', '.join(dict.fromkeys(words.values()))}")
    if options.recipe and not options.recipe.is_file():
        raise Refused(f"{options.recipe} is not there: give a recipe such as recipes/cls.py, then its flags")
    checks = [check for check in CHECKS if not only or words[check] in only]
    world = this_process(environ, options.recipe, options.flags)
    session = Session(world, options, [*words.values()])
    if world.device.type == "cpu":
        share_cores(environ, world.launch)  # as the recipes do
    if world.world_size > 1:
        with contextlib.suppress(Refused):  # `meet` reports it
            choose_interface(environ)
    for number in _STOPPING:
        signal.signal(number, _stop)
    try:
        for check in checks:
            if not check.exchanges:
                session.run(check)
        world.enter("network: meeting")
        session.add(meeting.meet(world, environ, options.wait))
        for check in checks:
            if check.exchanges:
                session.run(check)
    except Stopped as stopped:
        session.rows.append(Finding(world.check, "not run", str(stopped), place=HERE))
        return session.end(stopped=True)
    return session.end()


class Session:
    """The rows of this rank so far, which end in one table."""

    def __init__(self, world: World, options: argparse.Namespace, words: list[str]) -> None:
        self.world, self.options, self.words, self.began = world, options, words, time.monotonic()
        self.rows: list[Finding] = []
        self._ending = threading.Lock()

    def add(self, findings: list[Finding]) -> None:
        """Add rows, and put all into the store, where rank 0 finds them even if this process dies."""
        self.rows += findings
        if self.world.store is not None:
            post = {"check": self.world.check, "rows": [asdict(finding) for finding in self.rows]}
            self.world.store.set(f"rows/{self.world.rank}", json.dumps(post))

    def run(self, check: Check) -> None:
        """Run a check. One that exchanges with processes that are not there becomes a row "not run"."""
        world = self.world
        if check.once_per_machine and not world.is_local_main:
            return
        if check.exchanges and not world.is_met:
            self.add([Finding(check.name, "not run", "needs processes that meet")])
            return
        world.enter(check.name)
        self.add([])
        timer = threading.Timer(check.limit, self._overrun, (check, threading.get_ident()))
        timer.daemon = True
        timer.start()
        try:
            findings = check.function(world)
            if check.exchanges:
                findings = findings if world.is_main else []
            else:
                here = ON_MACHINE if check.once_per_machine else HERE
                findings = [replace(each, place=here) if each.place == "all" else each for each in findings]
        except Exception as error:
            findings = self._failure(check, error)
        finally:
            timer.cancel()
        self.add(findings)

    def end(self, stopped: bool = False) -> int:
        """Print the table, and return the exit code. A second call waits for ever: the process ends."""
        self._ending.acquire()
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                signal.signal(number, signal.SIG_IGN)
        world, store = self.world, self.world.store
        self.add([])
        if store is None:  # a rank that can't reach the others speaks for its machine
            code = self._print([(world.rank, finding) for finding in self.rows]) if world.is_local_main else 0
            code = code or int(world.world_size > 1)
        else:
            store.set(f"done/{world.rank}", "")
            code = self._collect(store) if world.is_main else _printed(store)
        if code := code or int(stopped):
            announce_exit(code)
        return code

    def _collect(self, store: Store) -> int:
        """Print the rows of all, and wait until the others have read the exit code."""
        rows: list[tuple[int, Finding]] = []
        until, answered = time.monotonic() + LAST_ROWS_S, -1  # but for rank 0 itself
        for rank in (rank for rank, host in enumerate(self.world.hosts) if host):  # `meet` has named the others
            with contextlib.suppress(RuntimeError):
                store.wait([f"done/{rank}"], timedelta(seconds=max(0.02, until - time.monotonic())))
            post: dict[str, Any] = {"check": "start", "rows": []}
            if store.check([f"rows/{rank}"]):
                post = json.loads(store.get(f"rows/{rank}"))
            rows += [(rank, Finding(**row)) for row in post["rows"]]
            is_done = store.check([f"done/{rank}"])
            answered += is_done
            if not is_done:
                cause = "it has died or is stuck: see its own message"
                rows.append((rank, Finding(post["check"], "failed", "no answer", cause, self.world.name(rank))))
        code = self._print(rows)
        store.set("printed", str(code))
        until = time.monotonic() + PRINTED_S
        while store.add("read", 0) < answered and time.monotonic() < until:
            time.sleep(0.02)
        return code

    def _failure(self, check: Check, error: Exception) -> list[Finding]:
        """The row of a check that raised; none if another rank has the cause."""
        world, text = self.world, printable(" ".join(str(error).split())) or type(error).__name__
        is_lost = isinstance(error, LostPeer) or is_lost_peer(error)
        if is_lost and world.store is not None and world.store.check([f"raised/{check.name}"]):
            return []
        world.raised()
        measured = "no answer" if is_lost else "refused" if isinstance(error, Refused) else "raised"
        if measured == "raised":
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {text:.300} ({place.filename}:{place.lineno})"
        return [Finding(check.name, "failed", measured, text, HERE)]

    def _overrun(self, check: Check, thread: int) -> None:
        """Called by a thread when a check takes too long: say where, and end the process."""
        stack = traceback.extract_stack(sys._current_frames()[thread])
        place = next((frame for frame in reversed(stack) if "/torch/" not in frame.filename), stack[-1])
        waits = any(part in frame.filename for frame in stack[-3:] for part in _WAITING)
        seconds = f"{check.limit:.0f} s"
        measured = f"waited {seconds} for other ranks" if waits else f"no end within {seconds}"
        where = f"{'waits' if waits else 'stuck'} in {place.name} ({place.filename}:{place.lineno})"
        status: Status = "not run" if waits else "failed"
        self.rows.append(Finding(check.name, status, measured, where, HERE))
        code = 1
        try:
            code = self.end()
        finally:
            sys.stdout.flush()
            for process in psutil.Process().children(recursive=True):
                process.kill()
            os._exit(code or 1)

    def _print(self, rows: list[tuple[int, Finding]]) -> int:
        world, file = self.world, self.options.json
        findings = fold(rows, world.hosts, self.words)
        seconds = round(time.monotonic() - self.began, 1)
        about = {"processes": world.world_size, "hosts": world.hosts, "seconds": seconds}
        text = json.dumps(about | {"findings": [asdict(finding) for finding in findings]}, indent=2)
        if file:
            replace_file(Path(file), f"{text}\n".encode())
        print(f"{show(findings, bool(self.options.only))} ({seconds:.0f} s)", flush=True)
        return int(any(finding.status == "failed" for finding in findings))


def _printed(store: Store) -> int:
    """The exit code, once rank 0 has printed the table."""
    with contextlib.suppress(RuntimeError, ValueError):
        store.wait(["printed"], timedelta(seconds=PRINTED_S))
        code = int(store.get("printed"))
        store.add("read", 1)
        return code
    return 1
