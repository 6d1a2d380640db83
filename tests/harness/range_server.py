"""A web server of byte ranges on loopback, which does wrong whatever a test asks it to do."""

import socket
import struct
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class Handler(BaseHTTPRequestHandler):
    """Answers a request, and says nothing about it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """A web server on loopback, which runs while its block does."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # connections that wait: data workers come many at once

    def __init__(self, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Clients may leave, or be killed."""


class _Ranges(Handler):
    server: "RangeServer"

    def do_GET(self) -> None:
        server = self.server
        path = self.path.partition("?")[0]
        server.requests.append((self.path, dict(self.headers), self.client_address[1]))
        with server.lock:
            faults = server.faults[path]
            fault, _, value = (faults.pop(0) if faults else "").partition(" ")
        data = server.files.get(path)
        if fault in ("short", "silent", "reset", "torn"):
            self.close_connection = True
        if fault == "status":
            self._answer(int(value.split()[0]), b"no", {})
        elif fault == "redirect":
            self._answer(302, b"", {"Location": value})
        elif fault == "silent":
            server.ended.wait(20)
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif data is None:
            self._answer(404, b"no", {})
        elif fault == "whole":
            self._answer(200, data, {"ETag": server.tags[path]})
        else:
            self._part(data, server.tags[path], fault)

    def _part(self, data: bytes, tag: str, fault: str) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        if fault == "other":
            first += 1
            last += 1
        last = min(last, len(data) - 1)
        if first > last:
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        size = "9" * 6000 if fault == "digits" else len(data)
        headers = {"Content-Range": f"bytes {first}-{last}/{size}", "ETag": tag}
        if fault == "encoded":
            headers["Content-Encoding"] = "gzip"
        self._answer(206, data[first : last + 1], headers, fault)

    def _answer(self, status: int, data: bytes, headers: dict[str, str], fault: str = "") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if fault == "torn":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fault == "short":
            data = data[: len(data) // 2]
        if fault == "torn":  # in the middle of a chunk
            data = f"{len(data):x}\r\n".encode() + data[: len(data) // 2]
        self.wfile.write(data)


class RangeServer(Server):
    """Answers requests for parts of `files`, first with the `faults` of a path, one each."""

    def __init__(self):
        super().__init__(_Ranges)
        self.files: dict[str, bytes] = {}  # by path
        self.tags: defaultdict[str, str] = defaultdict(lambda: '"first"')
        self.faults: defaultdict[str, list[str]] = defaultdict(list)
        # Path and query, headers, the client's port.
        self.requests: list[tuple[str, dict[str, str], int]] = []
