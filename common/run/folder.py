"""What is in the folder of a run, and who may write there?

    config.yaml       the complete configuration; feed it back with --config
    environment.json  versions, commit, command, layout, devices of the newest start
    metrics.jsonl     one JSON object a line, each step at most once
    summary.json      last and best results, totals
    status.json       running, finished, resumable or failed, with the step and the cause
    log.txt           what was said
    tracker.json      the id under which the dashboard knows the run
    micro_batch.json  the most samples at once, by kind of device, where memory was once too small for more
    checkpoints/, best/, pictures/

Only the main process writes, and only one run at a time: a lock that the kernel frees with the process guards the folder.
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
from common.errors import Refused
from common.files import SMALL, open_regular, read_bytes


class RunFolder:
    """The files of one run. Raises `Refused` where the folder can't be written or another run is in it."""

    def __init__(self, path: Path):
        self.path = path
        self.fresh = not path.exists()
        try:
            make_folder(path)
            # lockf, not flock: data workers inherit a flock and hold it for seconds after a kill.
            self._lock = open(path / ".lock", "ab+", buffering=0, opener=_open_file)
            self._claim()
            self._log = open(path / "log.txt", "ab", buffering=0, opener=_open_file)
        except OSError as error:
            if self.fresh:
                remove(path)
            raise Refused(
                f"--output_dir {path.parent}: {path} can't be written ({error.strerror}); name another folder"
            ) from None
        self._rows = None

    def _claim(self) -> None:
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._lock.seek(0)
            holder = self._lock.read().decode().strip() or "another process"
            raise Refused(
                f"{self.path} is in use by {holder}: wait for it, stop it, or give this run another --name"
            ) from None
        self._lock.truncate(0)
        _append(self._lock, f"process {os.getpid()} on {os.uname().nodename}")

    @property
    def lost(self) -> bool:
        """Whether the locked file is no longer in the folder of that name: another run may be there now. Some microseconds."""
        try:
            found = os.stat(self.path / ".lock", follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return True
        return not os.path.samestat(found, os.fstat(self._lock.fileno()))

    def check(self) -> None:
        """Raise `Refused` where the folder is lost."""
        if self.lost:
            raise Refused(
                f"{self.path} was removed, renamed or replaced while this run was at work in it: nothing more is written; "
                "put it back, and the same command goes on from the last checkpoint"
            )

    def log(self, text: str) -> None:
        """Append to log.txt, with the time; what doesn't fit on the disk was at least said."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):
            _append(self._log, "".join(f"{stamp}  {line}\n" for line in text.splitlines()))

    def write(self, name: str, content: Any) -> None:
        """Replace a JSON file durably, see `replace_file`. Raises `Refused` where the folder is lost."""
        self.check()
        write_json(self.path / name, content)

    def read(self, name: str) -> dict:
        """A JSON object that `write` wrote; {} where there is none or it is not whole."""
        return read_json(self.path / name)

    def status(self, status: str, step: int, cause: str = "") -> None:
        """`status` is running, finished, resumable or failed. running with no process at work means killed, so resumable."""
        self.check()
        write_status(self.path, status, step, cause)

    def rewind(self, step: int) -> int:
        """Drop the rows of metrics.jsonl beyond `step`, and a torn last line; the last step that stood there."""
        path = self.path / "metrics.jsonl"
        rows = _read_rows(path)
        replace_file(path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step).encode())
        self._rows = open(path, "ab", buffering=0, opener=_open_file)
        return max((row["step"] for row in rows), default=0)

    def row(self, row: dict) -> None:
        """Append to metrics.jsonl, on disk for the kernel when this returns; not-a-number becomes null."""
        clean = {key: None if isinstance(value, float) and value - value != 0 else value for key, value in row.items()}
        _append(self._rows, json.dumps(clean) + "\n")

    def sync(self) -> None:
        """Make the rows and the log so far outlive a power loss: a checkpoint builds on them."""
        for file in filter(None, (self._rows, self._log)):
            os.fsync(file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sync()
        for file in filter(None, (self._rows, self._log, self._lock)):
            file.close()


def write_status(run: Path, status: str, step: int, cause: str) -> None:
    """What `RunFolder.status` does; for a rank without one that fails alone."""
    content = {"status": status, "step": step, "cause": cause, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_json(run / "status.json", content)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file durably, see `replace_file`."""
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict:
    """A JSON object that `write_json` wrote; {} where there is none or it is not whole."""
    try:
        content = json.loads(read_bytes(path, SMALL))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What can't be written below `path` is refused in one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise Refused(
            f"{path} can't be written ({getattr(error, 'strerror', None) or error}): make room, and the same command goes "
            "on from the last checkpoint, or name another --output_dir"
        ) from error


def _open_file(path: str, flags: int) -> int:
    """For `open`: no link that somebody else has put there is followed, and no FIFO waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _append(file: io.FileIO, text: str) -> None:
    """Write all or nothing, at once: what a buffer holds back is lost in a kill, and raises again when a full disk closes."""
    data, before = text.encode(), os.fstat(file.fileno()).st_size
    if file.write(data) != len(data):
        file.truncate(before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read_rows(path: Path) -> list[dict]:
    """The whole rows of a metrics.jsonl: reading ends at what is none, as a machine's end may leave behind the last."""
    rows = []
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
