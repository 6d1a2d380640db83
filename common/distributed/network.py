"""Which address and interface of this machine lead to another machine, and what is wrong if none does?"""

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
from torch.distributed import TCPStore

from common.errors import Refused

QUIET_S = 10.0  # how long a wait may last before it is said
LOOPBACK = "127.0.0.1"


def address_towards(host: str) -> str:
    """This machine's own address on the way to `host`, a name or an address; nothing is sent.

    The way to one's own address leads there: on the machine 10.0.0.1, address_towards("10.0.0.1") -> "10.0.0.1".
    Raises OSError where `host` is not known or no way leads to it.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]  # 9: any port will do
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`, such as eth0; None if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def is_own(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine. False where it is not known."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)  # only a machine's own addresses can be
            return True
    except OSError:
        return False


def is_loopback(address: str) -> bool:
    """Whether `address` leads a machine to itself and nowhere else."""
    return address in ("", "localhost", "::1") or address.startswith("127.")


def outward_addresses() -> list[str]:
    """This machine's own IPv4 addresses that may lead others to it."""
    states = psutil.net_if_stats()
    return [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not is_loopback(entry.address) and states[name].isup
    ]


def keep_store(host: str, port: int, patience: timedelta) -> TCPStore:
    """A new store that listens at this machine's address `host` alone; one that torch makes listens on all interfaces.

    Port 0 is any free one. In this process torch finds the store by its port and makes no other.
    Raises OSError where the address is not this machine's, or the port is taken.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(target, family=family)
    address, port = listener.getsockname()[:2]
    options = {"is_master": True, "multi_tenant": True, "timeout": patience}
    return TCPStore(address, port, master_listen_fd=listener.detach(), **options)


def await_listener(host: str, port: int, patience: float, remind: Callable[[str], None] = lambda what: None) -> None:
    """Return when something listens at `host`:`port`. `remind` is called once, with what is wrong, when that takes long.

    torch's own store waits up to three times its timeout for it, and in silence.
    Raises Refused after `patience` seconds; says what was wrong and what to do.
    """
    start, reminded = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            what, waited = trouble(host, port, error), time.monotonic() - start
        if waited > patience:
            raise Refused(f"{what}; waited {patience:.0f} s")
        if waited > QUIET_S and not reminded:
            remind(f"{what}; waiting up to {patience:.0f} s")
            reminded = True
        time.sleep(0.1)


def bound_silence(port: int, patience: timedelta) -> None:
    """End this process's connections to `port` of others when what is sent over them is not confirmed for so long.

    For those that a library made without such a bound: where a cable is out, Linux itself tries for a quarter of an hour.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        for connection in psutil.Process().net_connections("tcp"):
            if connection.raddr and connection.raddr.port == port:
                with socket.fromfd(connection.fd, connection.family, connection.type) as shared:
                    milliseconds = int(patience.total_seconds() * 1000)
                    shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def trouble(host: str, port: int, error: OSError) -> str:
    """What a failure to connect means, and what to do, in half a sentence."""
    if isinstance(error, socket.gaierror):
        return f"the name {host} is not known on this machine: give the main machine's address as a number"
    if isinstance(error, ConnectionRefusedError):
        return f"{host} is there, but nothing listens on port {port}: start the command there, with the same port"
    return (
        f"{host}:{port} can't be reached ({error.strerror or error}): is that the main machine's address, and does a "
        "firewall let the port through?"
    )
