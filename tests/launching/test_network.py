"""The route to another machine is found, or the message says why there is none."""

import errno
import os
import socket
import threading
from datetime import timedelta
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from common.errors import Refused
from common.launching import network, rendezvous
from common.launching.network import (
    LOOPBACK,
    await_listener,
    find_address_towards,
    find_interface,
    host_store,
    is_loopback,
    is_own_address,
)

pytestmark = pytest.mark.smoke


def test_the_address_and_interface_of_a_route_are_found() -> None:
    for name, entries in psutil.net_if_addrs().items():
        for entry in (entry for entry in entries if entry.family == socket.AF_INET):
            assert find_address_towards(entry.address) == entry.address
            assert find_interface(entry.address) == name
            assert is_own_address(entry.address)
            assert is_loopback(entry.address) == (name == "lo")
    assert find_interface("192.0.2.1") is None  # an address of documentation, RFC 5737
    assert all(
        is_own_address(address) and not is_loopback(address)
        for address in network.list_outward_addresses()
    )
    assert not is_own_address("192.0.2.1") and not is_own_address("no.such.name.invalid")


def test_a_store_listens_at_one_address_where_torch_finds_it() -> None:
    """Once more where its port was used a moment ago, as where a run is started again."""
    port = 0
    for _ in range(2):
        store = host_store(LOOPBACK, port, timedelta(seconds=20))
        port = store.port
        listening = [
            row for row in psutil.Process().net_connections("inet") if row.status == "LISTEN"
        ]
        assert [row.laddr.ip for row in listening if row.laddr.port == port] == [LOOPBACK]
        with mock.patch.dict(os.environ, {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}):
            torch_store, _, _ = next(dist.rendezvous("env://", 0, 1))
        torch_store.set("key", "value")
        assert store.get("key") == b"value"
        with pytest.raises(OSError) as raised:
            host_store(LOOPBACK, port, timedelta(seconds=20))
        assert raised.value.errno == errno.EADDRINUSE
        del store, torch_store
    with pytest.raises(OSError) as raised:
        host_store("192.0.2.1", 0, timedelta(seconds=20))
    assert raised.value.errno == errno.EADDRNOTAVAIL


def test_a_launcher_listens_where_the_others_reach_it(monkeypatch) -> None:
    monkeypatch.setattr(
        network, "find_address_towards", {"first": "127.0.1.1", "second": "10.0.0.2"}.get
    )
    monkeypatch.setattr(network, "list_outward_addresses", lambda: ["10.0.0.1"])
    assert rendezvous._find_own_address("second", max_machines=1) == LOOPBACK, "a machine alone"
    assert rendezvous._find_own_address("127.0.0.1", max_machines=2) == "127.0.0.1", (
        "a rehearsal on one machine"
    )
    assert rendezvous._find_own_address("second", max_machines=2) == "second"
    assert rendezvous._find_own_address("first", max_machines=2) == "10.0.0.1", (
        "a name that is a loopback on its own machine alone"
    )
    monkeypatch.setattr(network, "list_outward_addresses", lambda: ["10.0.0.1", "192.168.0.1"])
    with pytest.raises(
        SystemExit,
        match=r"own name first as 127.0.1.1.*: give .* a number .*10.0.0.1 or 192.168.0.1",
    ):
        rendezvous._find_own_address("first", max_machines=2)


def test_a_late_listener_is_waited_for_or_the_reason_is_given() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with pytest.raises(
            Refused, match=f"127.0.0.1 is there, but nothing listens on port {port}: .*; waited 0 s"
        ):
            await_listener("127.0.0.1", port, timeout=0)
        timer = threading.Timer(0.2, listener.listen)
        timer.start()
        await_listener("127.0.0.1", port, timeout=30)
        timer.join()
    with pytest.raises(
        Refused, match=r"the name no.such.name.invalid is not known on this machine"
    ):
        await_listener("no.such.name.invalid", 1, timeout=0)
    assert "host:1 can't be reached (timed out)" in network.describe_connection_error(
        "host", 1, TimeoutError("timed out")
    )
