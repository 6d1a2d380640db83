"""Meeting: the launch, and how the processes of a run find each other, with the reason in words if they can't."""

import json
import os
import socket
import time
from collections.abc import Collection, MutableMapping
from datetime import timedelta

import psutil
import torch
from torch.distributed import PrefixStore, Store, rendezvous

from common.distributed.launch import (
    _keeps_store,
    _listen,
    _parent_command,
    check_launch,
    choose_interface,
    processes_asked,
)
from common.distributed.network import trouble
from common.errors import Refused
from tools.doctor.finding import Finding
from tools.doctor.world import World


def launch(world: World) -> list[Finding]:
    """Whether the recipes accept this launch."""
    world.is_cut = True
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    processes = check_launch(os.environ, accelerators, processes_asked(_parent_command()))
    world.is_cut = False
    return [Finding("launch", "ok", f"{processes} process{'es' * (processes > 1)}, {world.device.type}")]


def meet(world: World, environ: MutableMapping[str, str], patience: float) -> list[Finding]:
    """Reach the store of rank 0, and wait until all processes have. Sets `world.store`, `hosts` and `is_met`."""
    if world.world_size == 1:
        world.is_met = True
        return []
    try:
        choose_interface(environ)
        store = _reach(world, environ, patience)
    except Refused as refusal:
        return [
            Finding("network: meeting", "failed", "refused", str(refusal), place=f"rank {world.rank} ({world.host})")
        ]
    world.store = PrefixStore("doctor", store)
    return _gather(world, patience)


def _reach(world: World, environ: MutableMapping[str, str], patience: float) -> Store:
    main, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = None
    if world.is_main and _keeps_store(environ):
        try:
            store = _listen(main, port)
        except OSError as error:
            raise Refused(f"port {port} of {main}: {error.strerror}; {_who_listens(port)}") from None
    else:
        _await(world, main, port, patience)
    return store or next(rendezvous("env://", timeout=timedelta(seconds=patience)))[0]


def _await(world: World, main: str, port: int, patience: float) -> None:
    until = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((main, port), timeout=3).close()
        except OSError as error:
            what = trouble(main, port, error)
        if time.monotonic() > until:
            raise Refused(f"{world.host} waited {patience:.0f} s for {main}:{port}: {what}")
        time.sleep(0.1)


def _gather(world: World, patience: float) -> list[Finding]:
    """Wait for all ranks; a row on rank 0 names those that are missing."""
    store, until = world.store, time.monotonic() + patience
    store.set(f"host/{world.rank}", json.dumps([world.host, world.node]))
    if world.is_main:
        missing = [*range(world.world_size)]
        while missing and time.monotonic() < until:
            missing = [rank for rank in missing if not store.check([f"host/{rank}"])]
            time.sleep(0.02)
        came = {rank: json.loads(store.get(f"host/{rank}")) for rank in range(world.world_size) if rank not in missing}
        world.hosts = [_host(*came[rank], came.values()) if rank in came else "" for rank in range(world.world_size)]
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


def _host(name: str, node: int, others: Collection) -> str:
    """The name of a machine; with its number if another one has the same name, as clones do."""
    return f"{name} (node {node})" if any(name == other and node != number for other, number in others) else name


def _who_listens(port: int) -> str:
    """The process that has the port, in words."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            process = psutil.Process(connection.pid)
            return f"process {process.pid} ({process.name()}) listens there: end it, or take another port"
    return "another process listens there: end it, or take another port"
