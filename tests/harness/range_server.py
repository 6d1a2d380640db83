"""A web server of byte ranges on loopback, which does wrong whatever a test asks it to do."""

import socket
import ssl
import struct
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "RangeServer"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server, path = self.server, self.path.partition("?")[0]
        with server.changed:
            server.asked.append((self.path, dict(self.headers), self.client_address[1]))
            fault = server.faults[path].pop(0) if server.faults[path] else ""
            server.changed.notify_all()
        server.before(path)
        getattr(self, f"_{fault.partition(' ')[0] or 'part'}")(path, *fault.split()[1:])

    def _part(self, path: str, moved: int = 0, body: Callable[[bytes], None] | None = None, more: dict = {}) -> None:  # noqa: B006
        data = self.server.files.get(path)
        if data is None:
            return self._status(path, "404")
        first, last = (int(text) + moved for text in self.headers["Range"].removeprefix("bytes=").split("-"))
        last = min(last, len(data) - 1)
        if first > last:
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}", "ETag": self.server.tags[path], **more}
        self._answer(206, data[first : last + 1], headers, body)

    def _answer(self, status: int, data: bytes, headers: dict[str, str], body: Callable | None = None) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        (body or self.wfile.write)(data)

    def _status(self, _path: str, status: str, wait: str = "") -> None:
        self._answer(int(status), b"no", {"Retry-After": wait} if wait else {})

    def _other(self, path: str) -> None:
        self._part(path, moved=1)

    def _whole(self, path: str) -> None:
        self._answer(200, self.server.files[path], {"ETag": self.server.tags[path]})

    def _encoded(self, path: str) -> None:
        self._part(path, more={"Content-Encoding": "gzip"})

    def _short(self, path: str) -> None:
        self.close_connection = True
        self._part(path, body=lambda data: self.wfile.write(data[: len(data) // 2]))

    def _drip(self, path: str) -> None:
        def drip(data: bytes) -> None:
            for place in range(len(data)):
                self.wfile.write(data[place : place + 1])
                if self.server.ended.wait(0.02):
                    break

        self.close_connection = True
        self._part(path, body=drip)

    def _silent(self, _path: str) -> None:
        self.close_connection = True
        self.server.ended.wait(20)

    def _reset(self, _path: str) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _redirect(self, _path: str, target: str) -> None:
        self._answer(302, b"", {"Location": target})


class RangeServer(ThreadingHTTPServer):
    """Answers requests for parts of `files`, first with the `faults` of a path, one each."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # connections that wait: data workers come many at once

    def __init__(self, certificate: Path | None = None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}  # by path
        self.tags: defaultdict[str, str] = defaultdict(lambda: '"first"')
        self.faults: defaultdict[str, list[str]] = defaultdict(list)
        self.asked: list[tuple[str, dict[str, str], int]] = []  # path and query, headers, the client's port
        self.before: Callable[[str], None] = lambda path: None  # called before each answer
        self.changed, self.ended = threading.Condition(), threading.Event()
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.server_port}"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)

    def __enter__(self) -> "RangeServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Clients may leave."""
