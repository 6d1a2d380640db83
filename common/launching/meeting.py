"""Meeting: the processes of a run find rank 0's store, use one network interface, and agree, before they form a group."""

import errno
import os
import socket
import threading
import time
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from torch.distributed import Store, rendezvous

from common.distributed.agreement import agree, facts
from common.errors import Refused
from common.launching.launch_checks import wants_cpu
from common.launching.launchers import EXPORTED, Launch, meeting_file
from common.launching.network import (
    LOOPBACK,
    QUIET_S,
    address_towards,
    await_listener,
    interface_of,
    is_loopback,
    keep_store,
    outward_addresses,
    trouble,
)

MEETING = timedelta(minutes=5)  # how much later than the first process the last one may arrive


def meet(environ: MutableMapping[str, str], launch: Launch, config) -> Store | None:
    """Wait until all processes have arrived and agree. Returns their store; None for one process, or if a group exists.

    Raises `Refused` if they differ, or if one does not come.
    """
    if launch.world_size == 1 or torch.distributed.is_initialized():
        return None
    device = "cpu" if wants_cpu(environ) or not torch.accelerator.is_available() else "accelerator"
    computing = {"device": device, "precision": environ.get("ACCELERATE_MIXED_PRECISION", "no")}
    file = meeting_file(environ)
    stale = f"WORLD_SIZE={launch.world_size} is exported: waiting for other processes; unset it to train with this one alone"
    reminder = threading.Timer(QUIET_S, print, [stale], {"flush": True})
    if launch.launcher == EXPORTED:
        reminder.start()
    try:
        store = reach(environ, launch, MEETING)
        agree(store, launch.rank, launch.world_size, facts(config) | computing, MEETING)
    finally:
        reminder.cancel()
    if file and launch.rank == 0:
        file.unlink(missing_ok=True)
    return store


def reach(environ: MutableMapping[str, str], launch: Launch, patience: timedelta) -> Store:
    """Connect to rank 0's store, or be its keeper. Returns when this process has it, whether others have come or not.

    Raises `Refused` if it can't be reached within `patience`, with the reason and what to do.
    """
    is_keeper = launch.rank == 0 and _keeps_store(environ)
    store: Store | None = None
    if file := meeting_file(environ):
        if is_keeper:
            store = kept = keep_store(_own_address(environ, launch), 0, patience)
            address, port = kept.host, kept.port
            _write(file, f"{address} {port}")
        else:
            address, port = _read(file, patience)
        environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), INIT_METHOD="env://")  # from here on, it is known
    choose_interface(environ)
    main, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    if not is_keeper:
        await_listener(main, port, patience.total_seconds())
    elif store is None:
        store = _listen(main, port, patience)
    # Torch finds rank 0's store by its port when it forms the process group.
    return store or next(rendezvous("env://", timeout=patience))[0]


def choose_interface(environ: MutableMapping[str, str]) -> None:
    """Make gloo, NCCL and rank 0's store use one network interface: the loopback of a single machine, else the one that leads
    to the main machine.

    Interfaces that `environ` names are kept. By default, gloo announces the address to which this machine's name resolves,
    often a loopback that others can't reach; NCCL picks any interface; and the store listens on all.
    Raises `Refused` if there is no route to the main machine.
    """
    main, is_one_machine = environ["MASTER_ADDR"], environ["LOCAL_WORLD_SIZE"] == environ["WORLD_SIZE"]
    if is_one_machine or is_loopback(main):
        address = LOOPBACK
        if is_one_machine and _keeps_store(environ) and not main.startswith("127."):
            environ["MASTER_ADDR"] = LOOPBACK
    else:
        try:
            address = address_towards(main)
        except OSError as error:
            raise Refused(trouble(main, int(environ["MASTER_PORT"]), error)) from None
        if is_loopback(address) and "GLOO_SOCKET_IFNAME" not in environ:
            raise Refused(
                f"this machine knows the main machine {main} as {address}, where the others can't reach it: give its address "
                "as a number, or export GLOO_SOCKET_IFNAME with the name of its network interface"
            )
    if interface := interface_of(address):
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # = means the exact name, not a prefix


def _keeps_store(environ: Mapping[str, str]) -> bool:
    """Whether rank 0 keeps the store, not the launcher."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _listen(main: str, port: int, patience: timedelta = MEETING) -> Store | None:
    """The store of rank 0, listening at the address `main`; None if that may not be an address of this machine."""
    try:
        if is_loopback(main) or not is_loopback(address_towards(main)):
            return keep_store(main, port, patience)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Refused(f"port {port} of {main} is taken: export MASTER_PORT with another one") from None
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    print(
        f"{main} is no address of this machine's own: what listens on port {port} does so on all interfaces", flush=True
    )
    return None


def _own_address(environ: Mapping[str, str], launch: Launch) -> str:
    """The address at which the other processes of the run can reach this one."""
    if launch.local_world_size == launch.world_size:
        return LOOPBACK
    interface = environ.get("GLOO_SOCKET_IFNAME")
    entries = psutil.net_if_addrs().get(interface or "", [])
    named = [entry.address for entry in entries if entry.family == socket.AF_INET]
    found = named if interface else outward_addresses()
    if len(found) != 1:
        raise Refused(
            f"this machine has {len(found)} addresses at which others could meet it ({', '.join(found)}): export "
            "GLOO_SOCKET_IFNAME with the name of the network interface to use"
        )
    return found[0]


def _write(file: Path, text: str) -> None:
    """Replace `file` at once, so that nobody reads half of it."""
    try:
        draft = file.with_name(f"{file.name}.{socket.gethostname()}.{os.getpid()}")
        draft.write_text(text)
        draft.replace(file)
    except OSError as error:
        raise Refused(
            f"INIT_METHOD: {file} can't be written ({error.strerror}): name a file in a shared folder"
        ) from None


def _read(file: Path, patience: timedelta) -> tuple[str, int]:
    """The address that rank 0 wrote, once it listens there. What an earlier run left behind is waited out."""
    until = time.monotonic() + patience.total_seconds()
    while time.monotonic() < until:
        try:
            host, port = file.read_text().split()
            socket.create_connection((host, int(port)), timeout=5).close()
            return host, int(port)
        except (OSError, ValueError):
            time.sleep(0.1)
    raise Refused(
        f"INIT_METHOD: rank 0 has not written its address into {file} within {patience.total_seconds():.0f} s, or can't be "
        "reached there: does it see the same folder?"
    )
