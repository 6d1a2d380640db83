"""Meeting: the launch, how the processes of a run find each other, and how far the clocks of their machines are apart."""

import json
import os
import time
from collections.abc import Collection, MutableMapping
from datetime import timedelta

import psutil
import torch
from torch.distributed import PrefixStore, Store

from common.errors import Refused
from common.launching.launch_checks import check_launch, parent_command, processes_asked
from common.launching.launchers import meeting_file
from common.launching.meeting import reach
from tools.doctor.finding import Finding
from tools.doctor.interfaces import addresses
from tools.doctor.world import ANSWER_S, World

PINGS = 7
APART_MS = 1000.0  # logs of machines then can't be compared


def launch(world: World) -> list[Finding]:
    """Whether the recipes accept this launch."""
    world.is_cut = True
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    check_launch(os.environ, world.launch, accelerators, processes_asked(parent_command()))
    world.is_cut = False
    processes = f"{world.world_size} process{'es' * (world.world_size > 1)}"
    return [Finding("launch", "ok", f"{processes}, {world.device.type}, started by {world.launch.launcher}")]


def meet(world: World, environ: MutableMapping[str, str], patience: float) -> list[Finding]:
    """Reach the store of rank 0, and wait until all processes have. Sets `world.store`, `hosts` and `is_met`."""
    if world.world_size == 1:
        world.is_met = True
        return []
    file = meeting_file(environ)
    target = f"{file}" if file else f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    try:
        store = reach(environ, world.launch, timedelta(seconds=patience))
    except (Refused, OSError, RuntimeError) as error:
        what = "can't listen at" if world.is_main else "can't reach rank 0 at"
        taken = "" if file else _who_listens(int(environ["MASTER_PORT"]))
        way_out = f"{error}{f' ({taken})' if world.is_main and taken else ''}"
        present = ", ".join(f"{name} {' '.join(of) or 'without address'}" for name, of in addresses().items())
        measured = f"rank {world.rank} on {world.host} ({present}) {what} {target}"
        return [Finding("network: meeting", "failed", measured, way_out)]
    world.store = PrefixStore("doctor", store)
    return _gather(world, world.store, patience)


def _gather(world: World, store: Store, patience: float) -> list[Finding]:
    """Wait for all ranks; a row on rank 0 names those that are missing."""
    until = time.monotonic() + patience
    store.set(f"host/{world.rank}", json.dumps([world.host, world.node]))
    if world.is_main:
        missing = [*range(world.world_size)]
        while missing and time.monotonic() < until:
            missing = [rank for rank in missing if not store.check([f"host/{rank}"])]
            time.sleep(0.02)
        came = {rank: json.loads(store.get(f"host/{rank}")) for rank in range(world.world_size) if rank not in missing}
        world.hosts = [_host(came[rank], came.values()) if rank in came else "" for rank in range(world.world_size)]
        store.set("hosts", "\n".join(world.hosts))
    store.set_timeout(timedelta(seconds=patience + 10))
    world.hosts = store.get("hosts").decode().split("\n")
    missing = [rank for rank, host in enumerate(world.hosts) if not host]
    world.is_met = not missing
    if missing and world.is_main:
        here = ", ".join(dict.fromkeys(filter(None, world.hosts)))
        named = ", ".join(map(str, missing))
        return [
            Finding(
                "network: meeting",
                "failed",
                f"rank {named} of {world.world_size} did not come within {patience:.0f} s; here are those of {here}",
                "see what the doctor says on the other machines",
            )
        ]
    return []


def _host(place: tuple[str, int], others: Collection[tuple[str, int]]) -> str:
    """The name of a machine; with its number if another one has the same name, as clones do."""
    name, node = place
    return f"{name} (node {node})" if any(name == other and node != number for other, number in others) else name


def _who_listens(port: int) -> str:
    """The process of this machine that listens on a port, in words; "" if none is seen."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            process = psutil.Process(connection.pid)
            return f"by process {process.pid}, {process.name()}"
    return ""


def clock(world: World) -> list[Finding]:
    """Rank 0 answers one machine after the other with its time; the ping with the shortest way there and back counts."""
    store = PrefixStore("clock", world.store) if world.store is not None else None
    measured = None
    for ranks in world.machines[1:]:
        first = ranks[0]
        for number in range(PINGS):
            if store is not None and world.is_main:
                store.wait([f"ping/{first}/{number}"], timedelta(seconds=ANSWER_S))
                store.set(f"pong/{first}/{number}", repr(time.time()))
            elif store is not None and world.rank == first:
                sent = time.time()
                store.set(f"ping/{first}/{number}", "")
                store.wait([f"pong/{first}/{number}"], timedelta(seconds=ANSWER_S))
                there, came = float(store.get(f"pong/{first}/{number}")), time.time()
                sample = (came - sent, (sent + came) / 2 - there)
                measured = min(measured or sample, sample)
    of_ranks = world.exchange(measured)
    if not world.is_main or len(world.machines) == 1:
        return []
    offsets = {world.hosts[rank]: round(1000 * pair[1], 1) for rank, pair in enumerate(of_ranks) if pair}
    rows = [
        Finding(
            "network: clock",
            "warning",
            f"{abs(offset):.0f} ms {'ahead of' if offset > 0 else 'behind'} {world.hosts[0]}",
            "start a time service there (chrony, systemd-timesyncd): logs and file times of the machines don't fit",
            host,
            {"offset_ms": offset},
        )
        for host, offset in offsets.items()
        if abs(offset) > APART_MS
    ]
    most = max(map(abs, offsets.values()))
    return rows or [
        Finding("network: clock", "ok", f"machines differ by at most {most:.0f} ms", figures={"offset_ms": offsets})
    ]
