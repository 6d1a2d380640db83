"""Is the way to another machine found, and is it said why there is none?"""

import socket
import threading

import psutil
import pytest

from common.errors import Refused
from common.network import address_towards, await_listener, interface_of, is_loopback, is_own, trouble

pytestmark = pytest.mark.smoke


def test_the_address_and_interface_on_the_way_are_found() -> None:
    for name, entries in psutil.net_if_addrs().items():
        for entry in (entry for entry in entries if entry.family == socket.AF_INET):
            assert address_towards(entry.address) == entry.address
            assert interface_of(entry.address) == name
            assert is_own(entry.address)
            assert is_loopback(entry.address) == (name == "lo")
    assert interface_of("192.0.2.1") is None  # an address of documentation, RFC 5737
    assert not is_own("192.0.2.1") and not is_own("no.such.name.invalid")


def test_a_listener_that_comes_late_is_waited_for() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        timer = threading.Timer(0.2, listener.listen)
        timer.start()
        await_listener("127.0.0.1", listener.getsockname()[1], patience=30)
        timer.join()


def test_it_is_said_why_nobody_is_reached() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with pytest.raises(Refused, match=f"127.0.0.1 is there, but nothing listens on port {port}: .*; waited 0 s"):
            await_listener("127.0.0.1", port, patience=0)
    with pytest.raises(Refused, match="the name no.such.name.invalid is not known on this machine"):
        await_listener("no.such.name.invalid", 1, patience=0)
    assert "host:1 can't be reached (timed out)" in trouble("host", 1, TimeoutError("timed out"))
