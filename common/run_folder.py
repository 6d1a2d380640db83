"""What is in the folder of a run, and who may write there?

    config.yaml       the complete configuration; feed it back with --config
    environment.json  versions, commit, command, layout, devices of the newest start
    metrics.jsonl     one JSON object a line, each step at most once
    summary.json      last and best results, totals
    status.json       running, finished, resumable or failed, with the step and the cause
    log.txt           what was said
    tracker.json      the id under which the dashboard knows the run
    checkpoints/, best/, pictures/

Only the main process writes, and only one run at a time: a lock that the kernel frees with the process guards the folder.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import Refused


class RunFolder:
    """The files of one run. Raises `Refused` where the folder can't be written or another run is in it."""

    def __init__(self, path: Path):
        self.path = path
        self.fresh = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            # lockf, not flock: data workers inherit a flock and hold it for seconds after a kill.
            self._lock = (path / ".lock").open("a+")
        except OSError as error:
            raise Refused(
                f"--output_dir {path.parent}: {path} can't be written ({error.strerror}); name another folder"
            ) from None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            raise Refused(
                f"{path} is in use by {holder}: wait for it, stop it, or give this run another --name"
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        self._lock.flush()
        _mend_swap(path / "best")
        self._log = (path / "log.txt").open("a", buffering=1)
        self._rows = None

    def log(self, text: str) -> None:
        """Append to log.txt, with the time."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.write("".join(f"{stamp}  {line}\n" for line in text.splitlines()))

    def write(self, name: str, content: Any) -> None:
        """Replace a JSON file in one move: a reader sees the old or the new one, whole."""
        draft = self.path / f".{name}.tmp"
        draft.write_text(json.dumps(content, indent=2) + "\n")
        draft.replace(self.path / name)

    def read(self, name: str) -> dict:
        """A JSON file's content; {} where there is none or it is not whole."""
        try:
            return json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return {}

    def status(self, status: str, step: int, cause: str = "") -> None:
        """`status` is running, finished, resumable or failed. running with no process at work means killed, so resumable."""
        self.write(
            "status.json",
            {"status": status, "step": step, "cause": cause, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")},
        )

    def rewind(self, step: int) -> int:
        """Drop the rows of metrics.jsonl beyond `step`, and a torn last line; the last step that stood there."""
        path = self.path / "metrics.jsonl"
        rows = _read_rows(path)
        draft = self.path / ".metrics.jsonl.tmp"
        draft.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
        draft.replace(path)
        self._rows = path.open("a")
        return max((row["step"] for row in rows), default=0)

    def row(self, row: dict) -> None:
        """Append to metrics.jsonl, on disk for the kernel when this returns; not-a-number becomes null."""
        clean = {key: None if isinstance(value, float) and value - value != 0 else value for key, value in row.items()}
        self._rows.write(json.dumps(clean) + "\n")
        self._rows.flush()

    def replace(self, name: str, write: Callable[[Path], None]) -> None:
        """Let `write` fill a new folder and put it in the place of `name`; a kill in between is mended at the next start."""
        final, draft, old = (self.path / part for part in (name, f".{name}.tmp", f".{name}.old"))
        shutil.rmtree(draft, ignore_errors=True)
        write(draft)
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        draft.rename(final)
        shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        for file in (self._rows, self._log, self._lock):
            if file is not None:
                file.close()


def _read_rows(path: Path) -> list[dict]:
    """The whole rows of a metrics.jsonl: reading ends at a torn line, which only the last can be."""
    rows = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def _mend_swap(final: Path) -> None:
    """Undo a `replace` that was killed half-way."""
    old = final.with_name(f".{final.name}.old")
    if old.exists() and not final.exists():
        old.rename(final)
    shutil.rmtree(final.with_name(f".{final.name}.tmp"), ignore_errors=True)
