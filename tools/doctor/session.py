"""Session: one call of the doctor. All checks run in one order on all ranks, and end in one table and the exit code.

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
from pathlib import Path
from typing import NoReturn

from torch.distributed import Store

from common.distributed.collectives import is_lost_peer
from common.durable import replace_file
from common.errors import Refused, printable
from common.launching.exit_codes import announce_exit
from common.launching.launch import share_cores
from common.launching.launchers import meeting_file
from common.launching.meeting import choose_interface
from tools.doctor import bandwidth, data, gpus, interfaces, limits, meeting, plan, versions
from tools.doctor.finding import Finding
from tools.doctor.table import HERE, ON_MACHINE, fold, show
from tools.doctor.trial import end_trials
from tools.doctor.world import LostPeer, World, this_process

LAST_ROWS_S = 10.0  # how long rank 0 waits for the rows of a rank that is late
PRINTED_S = 15.0  # how long the other ranks wait until rank 0 has printed the table
_WAITING = ("torch/distributed/", "tools/doctor/world.py", "torch/cuda/")  # files in which a rank waits for others
_STOPPED = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Check:
    """A check. `name` is unique; --only selects by its `word`, with which its rows begin.

    It runs on every rank, after all have met if it `exchanges` anything with others, and else before that. Without exchanging,
    the first process of a machine may do it alone (`once_per_machine`).
    """

    name: str
    function: Callable[[World], list[Finding]]
    exchanges: bool = True
    limit: float = 15.0  # seconds
    once_per_machine: bool = False

    @property
    def word(self) -> str:
        """network for "network: ports"."""
        return self.name.partition(":")[0]


CHECKS = [
    Check("launch", meeting.launch, exchanges=False),
    Check("limits", limits.limits, exchanges=False, once_per_machine=True),
    Check("gpu", gpus.gpus, exchanges=False, limit=25.0),
    Check("network: interfaces", interfaces.interfaces, exchanges=False, once_per_machine=True),
    Check("network: host name", interfaces.host_name, exchanges=False, once_per_machine=True),
    Check("limits: other work", limits.other_work),
    Check("versions", versions.versions),
    Check("gpu: kinds", gpus.same_gpus),
    Check("network: MTU", interfaces.same_mtu),
    Check("network: clock", meeting.clock, limit=30.0),
    Check("network: ports", interfaces.ports),
    Check("data", data.folders, limit=data.LIMIT_S),
    Check("rehearsal", plan.rehearse, limit=plan.REHEARSAL_S),
    Check("network: bandwidth", bandwidth.bandwidth, limit=40.0),
]
PLAN = [CHECKS[0], Check("plan", plan.plan, limit=plan.PLAN_S)]


def examine(options: argparse.Namespace, environ: MutableMapping[str, str]) -> int:
    """Run the checks that `options` asks for; returns the exit code. Raises `Refused` for options that can't be met."""
    words = [*dict.fromkeys(check.word for check in CHECKS)]
    only = {word.strip() for word in (options.only or "").split(",")} - {""}
    if unknown := only - {*words}:
        raise Refused(f"--only {', '.join(sorted(unknown))}: take {', '.join(words)}")
    if options.recipe and not options.recipe.is_file():
        raise Refused(f"{options.recipe} is not there: give a recipe such as recipes/cls.py, then its flags")
    checks = PLAN if options.plan else [check for check in CHECKS if not only or check.word in only]
    world = this_process(environ, options.recipe, options.flags)
    session = Session(world, options, words)
    if world.device.type == "cpu":
        share_cores(environ, world.launch)  # as the recipes do
    if world.world_size > 1 and not meeting_file(environ):
        with contextlib.suppress(Refused):  # `meet` reports it
            choose_interface(environ)
    for check in checks:
        if not check.exchanges:
            session.run(check)
    world.enter("network: meeting")
    session.add(meeting.meet(world, environ, options.wait))
    for check in checks:
        if check.exchanges:
            session.run(check)
    return session.end()


class Session:
    """The rows of this rank so far, which end in one table, whether all checks have run or one is stuck."""

    def __init__(self, world: World, options: argparse.Namespace, words: list[str]) -> None:
        self.world, self.options, self.words, self.began = world, options, words, time.monotonic()
        self.rows: list[Finding] = []
        self.seconds: dict[str, float] = {}  # of each check
        self.answered: set[int] = set()  # ranks that have finished; rank 0 knows
        self._ending = threading.Lock()
        threading.Thread(target=self._await_signal, args=(_signalled(),), daemon=True).start()

    def add(self, findings: list[Finding]) -> None:
        """Add rows of this rank, and put all into the store, where rank 0 finds them even if this process dies."""
        self.rows += findings
        self._post(self.world.check)

    def run(self, check: Check) -> None:
        """Run a check. One that exchanges with processes that are not there becomes a row "not run"."""
        world = self.world
        if check.once_per_machine and not world.is_local_main:
            return None
        if check.exchanges and not world.is_met:
            return self.add([Finding(check.name, "not run", "needs processes that meet")])
        world.enter(check.name)
        self._post(check.name)
        began = time.monotonic()
        timer = threading.Timer(check.limit, self._overrun, (check, threading.get_ident()))
        timer.daemon = True
        timer.start()
        try:
            findings = check.function(world)
        except Exception as error:
            findings = self._failure(check, error)
        finally:
            timer.cancel()
        if not check.exchanges:
            here = ON_MACHINE if check.once_per_machine else HERE
            findings = [replace(each, place=here) if each.place == "all" else each for each in findings]
        self.seconds[check.name] = round(time.monotonic() - began, 3)
        self.add(findings)

    def end(self, stopped: str = "") -> int:
        """Print the table, and return the exit code. Whoever calls it second waits for ever: the process ends."""
        self._ending.acquire()
        world, store, code = self.world, self.world.store, 0
        alone = store is None and world.world_size > 1  # it speaks for its machine
        if stopped:
            self.rows.append(Finding(world.check, "not run", stopped, place=HERE))
        rows = self._of_all_ranks()
        if world.is_main or (alone and world.is_local_main):
            code = self._print(rows)
        if store is not None:
            if world.is_main:
                store.set("printed", str(code))
                _await_readers(store, len(self.answered - {0}))
            else:
                code = _printed(store)
        if code := code or int(alone or bool(stopped)):
            announce_exit(code)
        return code

    def _of_all_ranks(self) -> list[tuple[int, Finding]]:
        """The rows of all ranks with their ranks, on rank 0; empty on the others."""
        world = self.world
        if world.store is None:
            return [(world.rank, finding) for finding in self.rows]
        self._post("")
        if not world.is_main:
            return []
        rows, until = [], time.monotonic() + LAST_ROWS_S
        for rank in range(world.world_size):
            post: dict = {"check": "start", "rows": []}
            while post["check"] and world.hosts[rank] and time.monotonic() < until:
                if world.store.check([f"rows/{rank}"]):
                    post = json.loads(world.store.get(f"rows/{rank}"))
                time.sleep(0.02)
            rows += [(rank, Finding(**row)) for row in post["rows"]]
            if not world.hosts[rank]:  # `meeting` names those that have not come
                continue
            if check := post["check"]:
                cause = "it has died or is stuck: see its own message"
                rows.append((rank, Finding(check, "failed", "no answer", cause, world.name(rank))))
            else:
                self.answered.add(rank)
        return rows

    def _post(self, check: str) -> None:
        """Put this rank's rows into the store; `check` is the one that it is in, "" at the end."""
        if self.world.store is not None:
            rows = [asdict(finding) for finding in self.rows]
            self.world.store.set(f"rows/{self.world.rank}", json.dumps({"check": check, "rows": rows}))

    def _failure(self, check: Check, error: Exception) -> list[Finding]:
        """The row of a check that raised; none if it did so because another rank has raised, which has the cause."""
        world, text = self.world, printable(" ".join(str(error).split())) or type(error).__name__
        lost = isinstance(error, LostPeer) or is_lost_peer(error)
        if lost and world.store is not None and world.store.check([f"raised/{check.name}"]):
            return []
        world.raised()
        if lost:
            return [Finding(check.name, "failed", "no answer", text, HERE)]
        if isinstance(error, Refused):
            return [Finding(check.name, "failed", "refused", text, HERE)]
        place = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {text:.300} ({place.filename}:{place.lineno})"
        return [Finding(check.name, "failed", "raised", cause, HERE)]

    def _overrun(self, check: Check, thread: int) -> None:
        """Called by a thread when the check takes too long: add a row that says where, and end."""
        stack = traceback.extract_stack(sys._current_frames()[thread])
        is_waiting = any(part in frame.filename for frame in stack[-3:] for part in _WAITING)
        place = next((frame for frame in reversed(stack) if "/torch/" not in frame.filename), stack[-1])
        where = f"in {place.name} ({place.filename}:{place.lineno})"
        if is_waiting:
            finding = Finding(check.name, "not run", f"waited {check.limit:.0f} s for other ranks", f"waits {where}")
        else:
            finding = Finding(check.name, "failed", f"no end within {check.limit:.0f} s", f"stuck {where}")
        self.rows.append(finding)
        self._leave()

    def _print(self, rows: list[tuple[int, Finding]]) -> int:
        world, options = self.world, self.options
        hosts = world.hosts or [world.host] * world.world_size
        findings = fold(rows, hosts, self.words)
        seconds = round(time.monotonic() - self.began, 1)
        if options.json:
            about = {"processes": world.world_size, "hosts": hosts, "seconds": seconds}
            about |= {"seconds_of_checks": self.seconds, "findings": [asdict(finding) for finding in findings]}
            text = json.dumps(about, indent=2)
            if options.json == "-":
                print(text, flush=True)
            else:
                replace_file(Path(options.json), f"{text}\n".encode())
        if options.json != "-":
            print(show(findings, sys.stdout.isatty(), bool(options.only)), f"({seconds:.0f} s)", flush=True)
            for command in [finding.figures["command"] for finding in findings if "command" in finding.figures]:
                print(f"\n{command}", flush=True)
        return int(any(finding.status == "failed" for finding in findings))

    def _await_signal(self, pipe: int) -> None:
        """A person (Ctrl-C), or the launcher after the death of a process, ends the doctor: show what was found so far."""
        while (number := os.read(pipe, 1)[0]) not in _STOPPED:
            pass
        self._leave(f"stopped by {signal.Signals(number).name}")

    def _leave(self, stopped: str = "") -> NoReturn:
        """End the process from another thread than the one that is stuck, and the processes that it has started."""
        code = 1
        try:
            code = self.end(stopped)
        finally:
            sys.stdout.flush()
            end_trials()
            os._exit(code or 1)


def _signalled() -> int:
    """A pipe from which each signal can be read as a byte, also while the main thread waits in a collective."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in _STOPPED:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing)
    return reading


def _printed(store: Store) -> int:
    """The exit code of rank 0, once it has printed."""
    until = time.monotonic() + PRINTED_S
    with contextlib.suppress(RuntimeError):  # rank 0 has ended, and its store
        while time.monotonic() < until:
            if store.check(["printed"]):
                code = int(store.get("printed"))
                store.add("read", 1)
                return code
            time.sleep(0.05)
    return 1


def _await_readers(store: Store, others: int) -> None:
    """Keep the store open until the others have read the exit code."""
    until = time.monotonic() + PRINTED_S
    while store.add("read", 0) < others and time.monotonic() < until:
        time.sleep(0.02)
