"""The folder of a run, and the lock that lets only one start write it. See docs/run_folder.md.

Only the main process writes. Its lock keeps other starts out; the kernel releases it when the process ends.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from common.durable import make_folder, remove, replace_file
from common.errors import Refused, get_os_reason
from common.files import SMALL, open_regular, read_bytes, to_json


class RunFolder:
    """The files of one run. Raises `Refused` if the folder can't be written or another process uses it."""

    def __init__(self, path: Path):
        self.path = path
        self.fresh = not path.exists()
        try:
            make_folder(path)
            # lockf, not flock: data workers inherit a flock and would hold it for seconds after a
            # kill.
            self._lock = open(path / ".lock", "ab+", buffering=0, opener=_open_file)
            self._claim()
            self._claimed = os.fstat(self._lock.fileno())
            self._log = open(path / "log.txt", "ab", buffering=0, opener=_open_file)
        except OSError as error:
            if self.fresh:
                remove(path)
            raise Refused(
                f"--output_dir {path.parent}: {path} can't be written ({error.strerror}); name "
                "another folder"
            ) from None
        self._rows: io.FileIO | None = None

    def _claim(self) -> None:
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._lock.seek(0)
            holder = self._lock.read().decode().strip()
            if not holder:
                holder = "another process"
            raise Refused(
                f"{self.path} is in use by {holder}: wait for it, stop it, or give this run "
                "another --name"
            ) from None
        self._lock.truncate(0)
        _append(self._lock, f"process {os.getpid()} on {os.uname().nodename}")

    @property
    def lost(self) -> bool:
        """True if the locked file is gone, so that the folder may belong to another run. Quick."""
        try:
            found = os.stat(f"{self.path}/.lock", follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return True
        return not os.path.samestat(found, self._claimed)

    def check(self) -> None:
        """Raise `Refused` if the folder is lost."""
        if self.lost:
            raise Refused(
                f"{self.path} was removed, renamed or replaced while this run was at work in it: "
                "nothing more is written; put it back, and the same command resumes from the "
                "last checkpoint"
            )

    def log(self, text: str) -> None:
        """Append to log.txt, with the time. If the disk is full, the text was at least printed."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):
            _append(self._log, "".join(f"{stamp}  {line}\n" for line in text.splitlines()))

    def write(self, name: str, content: Any) -> None:
        """Replace a JSON file durably, see `replace_file`. Raises `Refused` if the folder is lost."""
        self.check()
        write_json(self.path / name, content)

    def status(self, status: str, step: int, cause: str = "") -> None:
        """Write status.json.

        `status` is running, finished, resumable or failed; running without a process means killed.
        """
        self.check()
        write_status(self.path, status, step, cause)

    def rewind(self, step: int) -> list[dict]:
        """Remove rows of metrics.jsonl after `step`, and an incomplete last line; returns the others."""
        path = self.path / "metrics.jsonl"
        rows = [row for row in read_rows(path) if row["step"] <= step]
        replace_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self._rows = open(path, "ab", buffering=0, opener=_open_file)
        return rows

    def row(self, row: dict) -> None:
        """Append to metrics.jsonl; once this returns, the row outlives a kill.

        Values that are not finite become null.
        """
        assert self._rows, "rewind comes first"
        _append(self._rows, json.dumps(to_json(row), allow_nan=False) + "\n")

    def sync(self) -> None:
        """Sync rows and log to disk before a checkpoint, so that they outlive a power loss with it."""
        for file in filter(None, (self._rows, self._log)):
            os.fsync(file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sync()
        for file in filter(None, (self._rows, self._log, self._lock)):
            file.close()


def write_status(run: Path, status: str, step: int, cause: str) -> None:
    """Write status.json like `RunFolder.status`, for a rank without a `RunFolder` that fails alone."""
    content = {
        "status": status,
        "step": step,
        "cause": cause,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_json(run / "status.json", content)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file durably, see `replace_file`."""
    replace_file(path, (json.dumps(to_json(content), indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path, limit: int = SMALL) -> dict:
    """A JSON object that `write_json` wrote; {} if it is missing, damaged, or larger than `limit` bytes."""
    try:
        content = json.loads(read_bytes(path, limit))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write below `path` into `Refused`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise Refused(
            f"{path} can't be written ({get_os_reason(error)}): make room, "
            "and the same command resumes from the last checkpoint, or name another --output_dir"
        ) from error


def _open_file(path: str, flags: int) -> int:
    """Opener for `open` that neither follows links, which others may have made, nor waits for a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _append(file: io.FileIO, text: str) -> None:
    """Write all of the text or nothing.

    Unbuffered: buffered text is lost in a kill, and on a full disk raises again at close.
    """
    data = text.encode()
    before = os.fstat(file.fileno()).st_size
    if file.write(data) != len(data):
        file.truncate(before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl before the first incomplete line, as a power loss may leave one."""
    rows: list[dict] = []
    if not path.exists():
        return rows
    with open_regular(path) as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                break
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                break
            rows.append(row)
    return rows
