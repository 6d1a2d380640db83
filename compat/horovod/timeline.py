"""Timeline: when each tensor was waited for and reduced, as a Chrome trace that chrome://tracing and Perfetto open.

Rank 0 records it. Each tensor is a row: NEGOTIATE_ALLREDUCE lasts from rank 0's request until all ranks have asked, then
ALLREDUCE is the collective. The file is complete after `stop_timeline()` or `shutdown()`.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from compat.horovod.requests import Request


class Timeline:
    """Events of one process; nothing is recorded until `start`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file: TextIO | None = None
        self.began, self.mark_cycles = 0.0, False
        self.rows: dict[str, int] = {}  # number of each tensor's row

    def start(self, path: str | Path, mark_cycles: bool = False) -> None:
        """Begin a new file. Raises OSError if it can't be written."""
        self.stop()
        file = Path(path).open("w")
        with self.lock:
            self.began, self.mark_cycles, self.rows, self.file = time.monotonic(), mark_cycles, {}, file
            origin = {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}
            file.write("[\n" + json.dumps({"name": "process_name", "ph": "M", "pid": 0, "args": origin}))

    def stop(self) -> None:
        """Complete the file, if one is being written."""
        with self.lock:
            if self.file:
                self.file.write("\n]\n")
                self.file.close()
            self.file = None

    def ran(self, request: Request, asked: float, began: float) -> None:
        """A collective was asked for at `asked`, agreed at `began`, both in `time.monotonic()`, and has ended now."""
        with self.lock:
            if self.file is None or not request.shapes or asked < self.began:
                return
            name = request.kind.upper()
            what = {"dtype": request.dtypes, "shape": request.shapes, "device": request.device}
            self._write(request.name, f"NEGOTIATE_{name}", asked, began, {})
            self._write(request.name, name, began, time.monotonic(), what)
            if self.mark_cycles:
                self._write("cycles", "CYCLE_START", began, began, {})
            self.file.flush()

    def _write(self, row: str, name: str, start: float, end: float, what: dict[str, Any]) -> None:
        assert self.file
        if row not in self.rows:
            self.rows[row] = len(self.rows) + 1
            label = {"name": "thread_name", "ph": "M", "pid": 0, "tid": self.rows[row], "args": {"name": row}}
            self.file.write(",\n" + json.dumps(label))
        at, length = round((start - self.began) * 1e6, 1), round((end - start) * 1e6, 1)
        event = {"name": name, "ph": "X", "ts": at, "dur": length, "pid": 0, "tid": self.rows[row], "args": what}
        self.file.write(",\n" + json.dumps(event))
