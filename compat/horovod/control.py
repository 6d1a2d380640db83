"""Control channel: every rank's TCP connection to the negotiation, which runs in a thread of rank 0.

Messages are JSON, one per line. A connection that ends tells at once that its rank has died, which a collective in progress
would not. The channel carries no tensors.
"""

import contextlib
import hmac
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from compat.horovod.negotiation import Decision, Negotiator, Request, fused
from compat.horovod.timeline import Timeline

LOG = logging.getLogger("compat.horovod")
SILENCE_S = 20  # a machine that does not answer for so long is taken for dead
_HELLO_BYTES = 4096
_FUSED_ELEMENTS = int(os.environ.get("HOROVOD_FUSION_THRESHOLD", 64 << 20)) // 4


def _watched(connection: socket.socket) -> socket.socket:
    """A connection that is quick, and ends soon after the machine at its other end is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": SILENCE_S * 1000}
    for name, value in options.items():
        if number := getattr(socket, name, None):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, number, value)
    # A data worker must not hold the connection of a rank that was killed: the others would not see it end.
    _close_in_forks(connection)
    return connection


def _close_in_forks(connection: socket.socket) -> None:
    """Also where a file object of the connection is open, which `close` would wait for."""
    os.register_at_fork(after_in_child=lambda: os.close(connection.detach()) if connection.fileno() >= 0 else None)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")


class Server(threading.Thread):
    """Rank 0's thread: takes what the ranks ask for, and sends them what is decided."""

    def __init__(self, host: str, size: int, token: str, timeline: Timeline) -> None:
        super().__init__(name="horovod negotiation", daemon=True)
        self.size, self.token, self.timeline = size, token, timeline
        self.negotiator = Negotiator(size)
        self.listener = socket.create_server((host, 0), backlog=min(size, 4096))
        _close_in_forks(self.listener)
        self.address = (host, self.listener.getsockname()[1])
        self.connections: dict[int, socket.socket] = {}  # by rank
        self.homes: dict[int, list[Any]] = {}  # by rank: where it runs
        self.selector = selectors.DefaultSelector()
        self.warn_s = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", 60))
        if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            self.warn_s = 0.0
        self.fail_s = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0))
        self.closing = False  # rank 0 gives up waiting for the others' end

    def run(self) -> None:
        with self.selector, self.listener:
            try:
                self.selector.register(self.listener, selectors.EVENT_READ, (None, bytearray()))
                while not self.closing and len(self.negotiator.gone) < self.size:
                    self._turn()
            finally:  # also after an error: the ranks see the end, and don't wait
                for connection in self.connections.values():
                    connection.close()

    def _turn(self) -> None:
        """Answer what has arrived, or look for what stalls."""
        decisions: list[Decision] = []
        for ready, _ in self.selector.select(timeout=0.5):
            decisions += self._read(ready)
        warnings, failures = self.negotiator.stalled(time.monotonic(), self.warn_s, self.fail_s)
        for text in warnings:
            LOG.warning("%s", text)
        for decision in fused([*decisions, *failures], _FUSED_ELEMENTS):
            self._tell(decision)

    def _read(self, ready: selectors.SelectorKey) -> list[Decision]:
        """The decisions that follow from what has arrived at a connection."""
        rank, buffer = ready.data
        connection: Any = ready.fileobj
        if connection is self.listener:
            accepted = _watched(self.listener.accept()[0])
            self.selector.register(accepted, selectors.EVENT_READ, (None, bytearray()))
            return []
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data or (rank is None and len(buffer) > _HELLO_BYTES):
            self.selector.unregister(connection)
            connection.close()
            return self._lost(rank, "died") if rank is not None and rank not in self.negotiator.gone else []
        buffer += data
        decisions: list[Decision] = []
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if rank is None:
                if (rank := self._greet(connection, line)) is None:
                    self.selector.unregister(connection)
                    connection.close()
                    return decisions
                self.selector.modify(connection, selectors.EVENT_READ, (rank, buffer))
            else:
                decisions += self._act(rank, json.loads(line))
        return decisions

    def _greet(self, connection: socket.socket, line: bytes) -> int | None:
        """The rank that a new connection belongs to; None if it does not know the token. The last one starts the world."""
        try:
            token, rank, home = json.loads(line)
            known = hmac.compare_digest(str(token), self.token) and rank not in self.connections
        except (ValueError, TypeError):
            return None
        if not known:
            return None
        self.connections[rank], self.homes[rank] = connection, home
        if len(self.connections) == self.size:
            homes = [self.homes[rank] for rank in range(self.size)]
            self._tell(Decision([*range(self.size)], {"do": "begin", "homes": homes}))
        return rank

    def _act(self, rank: int, message: dict[str, Any]) -> list[Decision]:
        do, negotiator = message.pop("do"), self.negotiator
        if do == "submit":
            request = Request(**message)
            self.timeline.asked(request, rank)
            return negotiator.submit(rank, request, time.monotonic())
        if do == "announce":
            return negotiator.announce(rank, message["set_id"], message["what"])
        if do == "wait":
            return negotiator.wait(rank, [(set_id, name) for set_id, name in message["keys"]])
        if do == "break":
            return [Decision([*range(self.size)], message | {"do": "break"})]
        return self._lost(rank, "has shut down")

    def _lost(self, rank: int, why: str) -> list[Decision]:
        decisions = self.negotiator.leave(rank, why)
        if why == "died":  # its peers may be in the middle of a collective with it
            decisions.append(Decision([*range(self.size)], {"do": "break", "error": f"rank {rank} {why}"}))
        return decisions

    def _tell(self, decision: Decision) -> None:
        for item in decision.message.get("items", ()):
            self.timeline.agreed(item["request"])
        if "key" in decision.message:
            self.timeline.failed(decision.message["key"][1])
        for rank in decision.ranks:
            if rank in self.connections and rank not in self.negotiator.gone:
                with contextlib.suppress(OSError):  # its end is read, too
                    _send(self.connections[rank], decision.message)


class Channel:
    """A rank's own end: `send` asks, `receive` is called with each message, and with None at the connection's end."""

    def __init__(self, address: tuple[str, int], hello: list[Any], receive: Callable[[dict | None], None]) -> None:
        self.connection = _watched(socket.create_connection(address, timeout=SILENCE_S))
        self.connection.settimeout(None)
        self.receive, self.lock = receive, threading.Lock()
        self.connection.sendall(json.dumps(hello).encode() + b"\n")
        self.reader = threading.Thread(target=self._read, name="horovod control", daemon=True)
        self.reader.start()

    def send(self, do: str, **fields: Any) -> None:
        """Send one message. Raises OSError if the connection has ended."""
        with self.lock:
            _send(self.connection, {"do": do, **fields})

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self.connection.makefile("rb") as lines:
            for line in lines:
                self.receive(json.loads(line))
        self.receive(None)

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
