"""Network: addresses and interfaces that lead to other machines, and waiting for them to listen."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
from torch.distributed import TCPStore

from common.errors import Refused, get_os_reason

QUIET_S = 10.0  # a wait that lasts longer is reported
LOOPBACK = "127.0.0.1"


def find_address_towards(host: str) -> str:
    """This machine's own address on the route to `host`, a name or an address. Sends nothing.

    Towards an address of the machine itself, it is that address: on 10.0.0.1,
    find_address_towards("10.0.0.1") -> "10.0.0.1". Raises OSError if `host` is unknown or there is no
    route to it.
    """
    # 9: any port.
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def find_interface(address: str) -> str | None:
    """The name of the network interface that has `address`, such as eth0; None if none has."""
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address.partition("%")[0] for entry in entries]
        if address in addresses:
            return name
    return None


def is_own_address(host: str) -> bool:
    """True if `host`, a name or an address, is this machine; False if it is unknown."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)  # works only for an address of this machine
            return True
    except OSError:
        return False


def is_loopback(address: str) -> bool:
    """True if `address` is a loopback address."""
    if address in ("", "localhost", "::1"):
        return True
    return address.startswith("127.")


def list_outward_addresses() -> list[str]:
    """This machine's own IPv4 addresses by which others may reach it."""
    states = psutil.net_if_stats()
    addresses = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            is_ipv4 = entry.family == socket.AF_INET
            if is_ipv4 and not is_loopback(entry.address) and states[name].isup:
                addresses.append(entry.address)
    return addresses


def host_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """A new store that listens only at this machine's address `host`.

    torch's own store listens on all interfaces. Port 0 means any free port. Within this process,
    torch finds the store by its port and makes no other. Raises OSError if the address is not this
    machine's, or the port is taken.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(target, family=family)
    address, port = listener.getsockname()[:2]
    file_descriptor = listener.detach()
    return TCPStore(
        address,
        port,
        is_master=True,
        multi_tenant=True,
        timeout=timeout,
        master_listen_fd=file_descriptor,
    )


def await_listener(
    host: str, port: int, timeout: float, log: Callable[[str], None] = lambda text: None
) -> None:
    """Return when something listens at `host`:`port`.

    If that takes long, `log` is called once, with the reason. torch's own store would wait up to
    three times its timeout, without a message. Raises `Refused` after `timeout` seconds, with the
    reason and what to do.
    """
    start = time.monotonic()
    is_logged = False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            reason = describe_connection_error(host, port, error)
            waited = time.monotonic() - start
        if waited > timeout:
            raise Refused(f"{reason}; waited {timeout:.0f} s")
        if waited > QUIET_S and not is_logged:
            log(f"{reason}; waiting up to {timeout:.0f} s")
            is_logged = True
        time.sleep(0.1)


def set_user_timeout(port: int, timeout: timedelta) -> None:
    """End this process's connections to a remote `port` when sent data is not acknowledged for `timeout`.

    For connections that a library made without a timeout. If a cable is unplugged, Linux itself
    retries for 15 minutes.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    milliseconds = int(timeout.total_seconds() * 1000)
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.fromfd(connection.fd, connection.family, connection.type) as shared:
                shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def describe_connection_error(host: str, port: int, error: OSError) -> str:
    """The reason of a failure to connect and what to do, as part of a message."""
    if isinstance(error, socket.gaierror):
        return (
            f"the name {host} is not known on this machine: give the main machine's address as a "
            "number"
        )
    if isinstance(error, ConnectionRefusedError):
        return (
            f"{host} is there, but nothing listens on port {port}: start the command there, with "
            "the same port"
        )
    return (
        f"{host}:{port} can't be reached ({get_os_reason(error)}): is that the main machine's "
        "address, and does a firewall let the port through?"
    )
