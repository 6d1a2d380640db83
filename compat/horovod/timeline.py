"""Timeline: when each tensor was negotiated and reduced, as a Chrome trace that chrome://tracing and Perfetto open.

Rank 0 records it. Each tensor is a row: NEGOTIATE_ALLREDUCE lasts from the first rank's request to the last one's, with an
instant for each rank, then ALLREDUCE is the collective. The file is a JSON array of events; it is complete after
`stop_timeline()` or `shutdown()`, and viewers also open one that a killed process has left.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from compat.horovod.negotiation import Request


class Timeline:
    """Events of one process; nothing is recorded until `start`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file: TextIO | None = None
        self.began, self.mark_cycles = 0.0, False
        self.rows: dict[str, int] = {}  # number of each tensor's row
        self.negotiating: set[str] = set()

    def start(self, path: str | Path, mark_cycles: bool = False) -> None:
        """Begin a new file. Raises OSError if it can't be written."""
        self.stop()
        file = Path(path).open("w")
        with self.lock:
            file.write("[\n")
            file.write(json.dumps({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "Horovod API"}}))
            self.began, self.mark_cycles = time.monotonic(), mark_cycles
            self.rows, self.negotiating, self.file = {}, set(), file

    def stop(self) -> None:
        """Complete the file, if one is being written."""
        with self.lock:
            if self.file:
                self.file.write("\n]\n")
                self.file.close()
            self.file = None

    def asked(self, request: Request, rank: int) -> None:
        """A rank has asked for a collective."""
        with self.lock:
            if self.file and request.shapes:
                if request.name not in self.negotiating:
                    self.negotiating.add(request.name)
                    self._write(request.name, "B", f"NEGOTIATE_{request.kind.upper()}")
                self._write(request.name, "i", str(rank), s="t")

    def agreed(self, request: dict[str, Any]) -> None:
        """All ranks have asked for it, and it runs."""
        with self.lock:
            if self.file and request["name"] in self.negotiating:
                self.negotiating.discard(request["name"])
                self._write(request["name"], "E", f"NEGOTIATE_{request['kind'].upper()}")
                if self.mark_cycles:
                    self._write("cycles", "i", "CYCLE_START", s="t")

    def failed(self, name: str) -> None:
        """It does not run."""
        with self.lock:
            if self.file and name in self.negotiating:
                self.negotiating.discard(name)
                self._write(name, "E", "FAILED")

    def ran(self, request: Request, began: float, backend: str) -> None:
        """It has run since `began`, in `time.monotonic()`."""
        with self.lock:
            if self.file and request.shapes and began >= self.began:
                ended, what = time.monotonic(), {"dtype": request.dtypes, "shape": request.shapes}
                for name, extra in ((request.kind.upper(), what), (backend, {})):
                    length = round((ended - began) * 1e6, 1)
                    self._write(request.name, "X", name, at=began, dur=length, args=extra)

    def _write(self, row: str, phase: str, name: str, at: float | None = None, **extra: Any) -> None:
        assert self.file
        events: list[dict[str, Any]] = []
        if row not in self.rows:
            self.rows[row] = len(self.rows) + 1
            events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": self.rows[row], "args": {"name": row}})
        moment = round(((at or time.monotonic()) - self.began) * 1e6, 1)
        events.append({"name": name, "ph": phase, "ts": moment, "pid": 0, "tid": self.rows[row], **extra})
        for event in events:
            self.file.write(",\n" + json.dumps(event))
        self.file.flush()
