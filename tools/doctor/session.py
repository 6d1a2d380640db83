"""Session: one call of the doctor. All checks run in one order on all ranks, and end in one table.

A check that raises becomes a row with its cause; the other ranks learn it from the store and go on
to the next check. A check that exceeds its limit on a rank ends the doctor there: a row says in
which line it is stuck.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import psutil
import torch

from common.distributed import devices
from common.distributed.collectives import is_lost_peer
from common.distributed.environment import get_parent_command
from common.durable import replace_file
from common.errors import Refused, describe_error, make_printable
from common.launching.exit_codes import announce_exit, handle_stopping
from common.launching.launch import share_cores
from common.launching.launch_checks import check_launch, is_cpu_requested, parse_requested_processes
from common.launching.launchers import complete
from tools.command_line import refuse_unwritable
from tools.doctor.bandwidth import measure_bandwidth
from tools.doctor.interfaces import check_interface, compare_mtus, try_ports
from tools.doctor.rehearsal import rehearse
from tools.doctor.table import Finding, fold, show
from tools.doctor.world import World, meet


@dataclass(frozen=True)
class Check:
    """A check, which runs on every rank, and whose rows there are the same or about the rank itself.

    `name` is unique; --only selects by its first word, with which its rows begin. If it `exchanges`
    anything with others, it runs after all have met. `limit`: seconds.
    """

    name: str
    function: Callable[[World], list[Finding]]
    exchanges: bool = True
    limit: float = 15.0


class Stopped(Exception):
    """The doctor ends before its checks: a person or the launcher ends it, or a check does not end.

    Its arguments are status, measured value and way out of the row that says so.
    """


def accept_launch(world: World) -> list[Finding]:
    """A row on whether the recipes accept this launch."""
    world.is_cut = True
    check_launch(
        os.environ,
        world.launch,
        torch.accelerator.device_count(),
        parse_requested_processes(get_parent_command()),
    )
    world.is_cut = False
    measured = (
        f"processes: {world.launch.world_size}, {world.device.type}, started by "
        f"{world.launch.launcher}"
    )
    return [Finding("launch", "ok", measured)]


MEETING = Check("network: meeting", meet, exchanges=False, limit=1e6)  # it has limits of its own
CHECKS = [
    Check("launch", accept_launch, exchanges=False),
    Check("network: interfaces", check_interface, exchanges=False),
    Check("network: MTU", compare_mtus),
    Check("network: ports", try_ports),
    Check("rehearsal", rehearse, limit=150.0),
    Check("network: bandwidth", measure_bandwidth, limit=40.0),
]


def examine(options: argparse.Namespace) -> int:
    """Run the checks that `options` asks for; returns the exit code. Raises `Refused`."""
    groups = [check.name.partition(":")[0] for check in CHECKS]
    selected = options.only.split(",") if options.only else groups
    unknown = sorted(set(selected) - set(groups))
    if unknown:
        raise Refused(f"--only {', '.join(unknown)}: take {', '.join(dict.fromkeys(groups))}")
    if options.recipe and not options.recipe.is_file():
        raise Refused(
            f"{options.recipe} is not there: give a recipe such as recipes/cls.py, then its flags"
        )
    launch = complete(os.environ)
    device = torch.device("cpu")
    if devices.get_device_type() == "cuda" and not is_cpu_requested(os.environ):
        device = torch.device("cuda", launch.local_rank % torch.accelerator.device_count())
    else:
        share_cores(os.environ, launch)  # as the recipes do
    world = World(launch, options, device, ranks=[launch.rank])
    handle_stopping(_stop)
    try:
        run_check(MEETING, world)
        for check, group in zip(CHECKS, groups, strict=True):
            if group in selected:
                run_check(check, world)
    except Stopped as stopped:
        post(world, [Finding(world.check, *stopped.args)])
        finish(world, code=1)
        os._exit(1)  # the thread of the check may hang
    return finish(world, code=0)


def run_check(check: Check, world: World) -> None:
    """Run a check in a thread of its own, and post its rows. Raises `Stopped` if it does not end in time."""
    if check.exchanges and len(world.ranks) < world.launch.world_size:
        return
    world.check = check.name
    world.num_exchanges = 0
    post(world, [])
    findings: list[Finding] = []
    thread = threading.Thread(target=lambda: findings.extend(_attempt(check, world)), daemon=True)
    thread.start()
    try:
        thread.join(check.limit)
        if thread.is_alive():
            raise _describe_stuck(check, thread)
    except Stopped:
        for process in psutil.Process().children(recursive=True):
            process.kill()
        thread.join(5.0)  # in which it removes its files
        raise
    post(world, findings)


def post(world: World, findings: list[Finding]) -> None:
    """Add rows of this rank, and put all into the store.

    The other ranks find them there even if this process dies.
    """
    world.findings += findings
    rows = [asdict(finding) for finding in world.findings]
    world.store.set(f"rows/{world.rank}", json.dumps([world.check, rows]))


def finish(world: World, code: int) -> int:
    """Print the table of all ranks, and write it.

    Returns the exit code: `code`, or 1 if a row of any rank failed.
    """
    handle_stopping(lambda number, frame: None)
    store = world.store
    world.arrive("done")
    findings_by_rank = {}
    for rank in world.ranks:
        check, rows = json.loads(store.get(f"rows/{rank}"))
        findings_by_rank[rank] = [Finding(**row) for row in rows]
        if not store.check([f"done/{rank}"]):
            row = Finding(
                check, "failed", "no answer", "it has died or is stuck: see its own message"
            )
            findings_by_rank[rank].append(row)
    findings = fold(findings_by_rank, world.hosts)
    if any(finding.status == "failed" for finding in findings):
        code = 1
    # Of those that can't meet, one for each machine.
    if world.rank == world.ranks[0] and world.launch.local_rank == 0:
        seconds = round(time.monotonic() - world.start, 1)
        content = {"processes": world.launch.world_size, "hosts": world.hosts, "seconds": seconds}
        content["findings"] = [asdict(finding) for finding in findings]
        print(f"{show(findings)} ({seconds:.0f} s)", flush=True)
        if world.options.json:
            with refuse_unwritable(f"--json {world.options.json}"):
                replace_file(Path(world.options.json), json.dumps(content, indent=2).encode())
    world.arrive("left")  # the store may end with rank 0
    if code:
        announce_exit(code)
    return code


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Stopped("not run", f"stopped by {signal.Signals(number).name}")


def _attempt(check: Check, world: World) -> list[Finding]:
    """The rows of a check, or of its failure; none if another rank has the cause."""
    try:
        return check.function(world)
    except Exception as error:
        failure = f"failed/{check.name}"
        if is_lost_peer(error) and world.store.check([failure]):
            return []
        world.store.set(failure, "")
        if isinstance(error, Refused):
            return [Finding(check.name, "failed", "refused", str(error))]
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{describe_error(error):.300} ({frame.filename}:{frame.lineno})"
        return [Finding(check.name, "failed", "raised", make_printable(text))]


def _describe_stuck(check: Check, thread: threading.Thread) -> Stopped:
    """What a check does that has not ended: it is stuck itself, or waits for others."""
    stack = traceback.extract_stack(sys._current_frames()[thread.ident or 0])
    place = next(frame for frame in reversed(stack) if "/torch/" not in frame.filename)
    line = f"{place.name} ({place.filename}:{place.lineno})"
    if place != stack[-1] or place.name == "exchange":
        return Stopped("not run", f"waited {check.limit:.0f} s for other ranks", f"waits in {line}")
    return Stopped("failed", f"no end within {check.limit:.0f} s", f"stuck in {line}")
