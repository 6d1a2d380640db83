"""Examination: runs the checks in one order on all ranks, each within its time limit, and gathers what they find.

A check that raises becomes a row with its cause; the other ranks learn it from the store and go on to the next check. A check
that exceeds its limit on a rank ends the examination: a thread of that rank reports the line where it is stuck.
"""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from common.distributed.collectives import is_lost_peer
from common.errors import Refused, printable
from tools.doctor.finding import Finding
from tools.doctor.table import HERE, ON_MACHINE
from tools.doctor.world import LostPeer, World

LAST_ROWS_S = 10.0  # how long rank 0 waits for the rows of a rank that is late
PRINTED_S = 15.0  # how long the other ranks wait until rank 0 has printed the table
_WAITING = ("torch/distributed/", "tools/doctor/world.py", "torch/cuda/")  # files in which a rank waits for others


@dataclass(frozen=True)
class Check:
    """A check and what it needs.

    `name` is unique; --only selects by its `word`, with which its rows begin.
    `needs` is "machine": nothing but this process; "store": all processes have met; "group": torch's process group is
    formed. Those of a kind run one after the other, in this order.
    `once_per_machine`: only the first process of each machine runs it, so it must not exchange anything with others.
    """

    name: str
    function: Callable[[World], list[Finding]]
    needs: Literal["machine", "store", "group"] = "machine"
    limit: float = 15.0  # seconds
    once_per_machine: bool = False

    @property
    def word(self) -> str:
        """network for "network: ports"."""
        return self.name.partition(":")[0]


class Examination:
    """The rows of this rank so far; `run` adds those of a check. `finish` returns the rows of all ranks on rank 0."""

    def __init__(self, world: World, on_overrun: Callable[[], None]) -> None:
        self.world = world
        self.rows: list[Finding] = []
        self.seconds: dict[str, float] = {}  # of each check
        self.answered: set[int] = set()  # ranks that have finished; rank 0 knows
        self._on_overrun = on_overrun

    def add(self, findings: Sequence[Finding]) -> None:
        """Add rows of this rank, and put all into the store, where rank 0 finds them even if this process dies."""
        self.rows += findings
        self._post(self.world.check)

    def run(self, check: Check) -> None:
        """Run a check. A check that needs what this rank does not have becomes a row "not run"."""
        world = self.world
        if check.once_per_machine and not world.is_local_main:
            return
        if world.world_size > 1 and not {"machine": True, "store": world.is_met, "group": world.has_group}[check.needs]:
            what = "processes that meet" if check.needs == "store" or not world.is_met else "a process group"
            self.add([Finding(check.name, "not run", f"needs {what}")])
            return
        world.enter(check.name)
        self._post(check.name)
        began = time.monotonic()
        timer = threading.Timer(check.limit, self._overrun, (check, threading.get_ident()))
        timer.daemon = True
        timer.start()
        findings, failed = [], False
        try:
            findings = check.function(world)
        except Exception as error:
            failed = True
            findings = self._failure(check, error)
        finally:
            timer.cancel()
        if check.needs == "machine":
            here = ON_MACHINE if check.once_per_machine else HERE
            findings = [replace(each, place=here) if each.place == "all" else each for each in findings]
        self.seconds[check.name] = round(time.monotonic() - began, 3)
        self.add(findings)
        if check.needs == "group" and world.store is not None:
            self._repair(failed)

    def finish(self) -> list[tuple[int, Finding]]:
        """The rows of all ranks with their ranks, on rank 0; empty on the others. They then wait until rank 0 has printed."""
        world = self.world
        if world.store is None:
            return [(world.rank, finding) for finding in self.rows]
        self._post("")
        if not world.is_main:
            return []
        rows = []
        until = time.monotonic() + LAST_ROWS_S
        for rank in range(world.world_size):
            post: dict = {"check": "start", "rows": []}
            while True:
                if world.store.check([f"rows/{rank}"]):
                    post = json.loads(world.store.get(f"rows/{rank}"))
                if not post["check"] or not world.hosts[rank] or time.monotonic() > until:
                    break
                time.sleep(0.05)
            rows += [(rank, Finding(**row)) for row in post["rows"]]
            if (check := post["check"]) and world.hosts[rank]:  # `meeting` names those that have not come
                cause = "it has died or is stuck: see its own message"
                rows.append((rank, Finding(check, "failed", "no answer", cause, world.name(rank))))
            elif world.hosts[rank]:
                self.answered.add(rank)
        return rows

    def _post(self, check: str) -> None:
        """Put this rank's rows into the store; `check` is the one that it is in, "" at the end."""
        if self.world.store is None:
            return
        rows = [asdict(finding) for finding in self.rows]
        self.world.store.set(f"rows/{self.world.rank}", json.dumps({"check": check, "rows": rows}))

    def _failure(self, check: Check, error: Exception) -> list[Finding]:
        """The row of a check that raised; none if it did so because another rank has raised, which has the cause."""
        world, text = self.world, printable(" ".join(str(error).split())) or type(error).__name__
        lost = isinstance(error, LostPeer) or is_lost_peer(error)
        if lost and world.store is not None and world.store.check([f"raised/{check.name}"]):
            return []
        world.raised()
        if isinstance(error, LostPeer):
            return [Finding(check.name, "failed", "no answer", text, HERE)]
        if lost:
            return [Finding(check.name, "not run", "lost another process", "see its row, or what it said itself", HERE)]
        if isinstance(error, Refused):
            return [Finding(check.name, "failed", "refused", text, HERE)]
        place = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {text:.300} ({place.filename}:{place.lineno})"
        return [Finding(check.name, "failed", "raised", cause, HERE)]

    def _repair(self, failed: bool) -> None:
        """Form the process group again if the last check failed on some rank: its connections may be in any state."""
        world = self.world
        if failed:
            world.leave_group()
        world.check += " (end)"
        try:
            if any(world.exchange(failed)):
                world.leave_group()
                world.form_group()
        except Exception as error:
            world.has_group = False
            self.add([Finding(world.check, "failed", "no process group", printable(str(error)))])

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
        self._on_overrun()
