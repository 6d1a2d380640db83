"""Meeting: before they form a group, processes find rank 0's store, and agree."""

import errno
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import torch
from torch.distributed import Store, rendezvous

from common.distributed.agreement import check_agreement, collect_facts
from common.errors import Refused
from common.launching import network
from common.launching.launch_checks import is_cpu_requested
from common.launching.launchers import Launch

MEETING = timedelta(minutes=5)  # how much later than the first process the last one may arrive


def meet(environ: MutableMapping[str, str], launch: Launch, config) -> Store | None:
    """Wait until all processes have arrived and agree, and return their store.

    None for one process, or if a group exists. Raises `Refused` if they differ, or if one does not come.
    """
    if launch.world_size == 1 or torch.distributed.is_initialized():
        return None
    facts = collect_facts(config)
    facts["device"] = "accelerator"
    if is_cpu_requested(environ) or not torch.accelerator.is_available():
        facts["device"] = "cpu"
    facts["precision"] = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    store = connect_to_store(environ, launch, MEETING)
    check_agreement(store, launch.rank, launch.world_size, facts, MEETING)
    return store


def connect_to_store(
    environ: MutableMapping[str, str], launch: Launch, timeout: timedelta
) -> Store:
    """Connect to rank 0's store, or keep it as rank 0.

    Returns when this process has it, whether others have come or not. Raises `Refused` if it can't
    be reached within `timeout`, with the reason and what to do.
    """
    choose_interface(environ)
    address = environ["MASTER_ADDR"]
    port = int(environ["MASTER_PORT"])
    store = None
    if launch.rank == 0 and _keeps_store(environ):
        store = _listen(address, port, timeout)
    else:
        network.await_listener(address, port, timeout.total_seconds())
    if store:
        return store
    # Torch finds rank 0's store by its port when it forms the process group.
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return store


def choose_interface(environ: MutableMapping[str, str]) -> None:
    """Make gloo, NCCL and rank 0's store use one network interface.

    It is the loopback of a single machine, else the one that leads to the main machine. Interfaces
    that `environ` names are kept. By default, gloo announces the address to which this machine's
    name resolves, often a loopback that others can't reach; NCCL picks any interface; and the store
    listens on all. Raises `Refused` if there is no route to the main machine.
    """
    address = environ["MASTER_ADDR"]
    is_one_machine = environ["LOCAL_WORLD_SIZE"] == environ["WORLD_SIZE"]
    if is_one_machine or network.is_loopback(address):
        local_address = network.LOOPBACK
        if is_one_machine and _keeps_store(environ) and not address.startswith("127."):
            environ["MASTER_ADDR"] = network.LOOPBACK
    else:
        local_address = _find_local_address(environ, address)
    interface = network.find_interface(local_address)
    if interface:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # = means the exact name, not a prefix.
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _find_local_address(environ: Mapping[str, str], main: str) -> str:
    """This machine's address on the route to the main machine at `main`. Raises `Refused`."""
    try:
        address = network.find_address_towards(main)
    except OSError as error:
        port = int(environ["MASTER_PORT"])
        raise Refused(network.describe_connection_error(main, port, error)) from None
    if network.is_loopback(address) and "GLOO_SOCKET_IFNAME" not in environ:
        raise Refused(
            f"this machine knows the main machine {main} as {address}, where the others can't "
            "reach it: give its address as a number, or export GLOO_SOCKET_IFNAME with the "
            "name of its network interface"
        )
    return address


def _keeps_store(environ: Mapping[str, str]) -> bool:
    """True if rank 0 keeps the store, not the launcher."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _listen(address: str, port: int, timeout: timedelta = MEETING) -> Store | None:
    """The store of rank 0, listening at `address`; None if that may not be an address of this machine."""
    try:
        is_loopback = network.is_loopback(address)
        if is_loopback or not network.is_loopback(network.find_address_towards(address)):
            return network.host_store(address, port, timeout)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Refused(
                f"port {port} of {address} is taken: export MASTER_PORT with another one"
            ) from None
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    print(
        f"{address} is no address of this machine's own: what listens on port {port} does so on "
        "all interfaces",
        flush=True,
    )
    return None
