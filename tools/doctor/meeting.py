"""Meeting: the launch, and how the processes of a run find each other, with the reason in words if they can't."""

import json
import os
import time
from collections.abc import Collection, MutableMapping
from datetime import timedelta

import psutil
import torch
from torch.distributed import PrefixStore, Store

from common.distributed.launch_checks import check_launch, parent_command, processes_asked
from common.distributed.launchers import meeting_file
from common.distributed.meeting import reach
from common.errors import Refused
from tools.doctor.finding import Finding
from tools.doctor.interfaces import addresses
from tools.doctor.world import World


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
