"""Meeting: the launch, and how the processes of a run find each other."""

import json
import os
import time
from collections.abc import MutableMapping
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store

from common.distributed.environment import parent_command
from common.errors import Refused
from common.launching.launch_checks import check_launch, processes_asked
from common.launching.meeting import reach
from tools.doctor.finding import Finding
from tools.doctor.interfaces import addresses, said
from tools.doctor.world import World


def launch(world: World) -> list[Finding]:
    """A row on whether the recipes accept this launch."""
    world.is_cut = True
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    check_launch(os.environ, world.launch, accelerators, processes_asked(parent_command()))
    world.is_cut = False
    processes = f"{world.world_size} process{'es' * (world.world_size > 1)}"
    return [Finding("launch", "ok", f"{processes}, {world.device.type}, started by {world.launch.launcher}")]


def meet(world: World, environ: MutableMapping[str, str], patience: float) -> list[Finding]:
    """Wait until all processes have reached rank 0's store. Sets `world.store`, `hosts` and `is_met`."""
    world.is_met = world.world_size == 1
    if world.is_met:
        return []
    try:
        store = reach(environ, world.launch, timedelta(seconds=patience))
    except (Refused, OSError, RuntimeError) as error:
        target, way_out = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}", str(error)
        what = f"can't {'listen' if world.is_main else 'reach rank 0'} at {target}"
        measured = f"rank {world.rank} on {world.host} ({said(addresses())}) {what}"
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
        names = {rank: name for rank, (name, _) in came.items()}
        for rank, (name, node) in came.items():  # clones have the same name
            if any(name == other and node != number for other, number in came.values()):
                names[rank] = f"{name} (node {node})"
        store.set("hosts", json.dumps([names.get(rank, "") for rank in range(world.world_size)]))
    store.set_timeout(timedelta(seconds=patience + 10))
    world.hosts = json.loads(store.get("hosts"))
    missing = [rank for rank, host in enumerate(world.hosts) if not host]
    world.is_met = not missing
    if world.is_met or not world.is_main:
        return []
    here, absent = ", ".join(dict.fromkeys(filter(None, world.hosts))), ", ".join(map(str, missing))
    measured = f"rank {absent} of {world.world_size} did not come within {patience:.0f} s; the ranks of {here} are here"
    return [Finding("network: meeting", "failed", measured, "see what the doctor says on the other machines")]
