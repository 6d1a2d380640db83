"""Commits on disk: what the processes that a launcher starts after a failure continue from.

Horovod keeps a commit in the memory of the ranks that survive. Here the launcher
(`accelerate launch --max_restarts 3`, `torchrun --max-restarts 3`) replaces all
processes, so rank 0 also writes each commit to a file, atomically.

The folder is `HOROVOD_ELASTIC_COMMITS`, or else `<script>.commits/<hash of the script's
arguments>` beside the script, so that a script with other arguments begins by itself.
With several machines it must be on storage that all of them share.
`HOROVOD_ELASTIC_COMMITS=none` keeps commits in memory only. A process that ends without
an error removes its commit.
"""

import atexit
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from common.durable import make_folder, replace_file
from common.errors import Refused
from compat.horovod import serialization, world
from compat.horovod.functions import allgather_object, broadcast_object

VARIABLE = "HOROVOD_ELASTIC_COMMITS"
_states = 0  # of this process: the second state of a script has a file of its own


def folder() -> Path | None:
    """Where this script's commits are; None if they stay in memory."""
    named = os.environ.get(VARIABLE, "")
    if named:
        return None if named.lower() == "none" else Path(named)
    script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "horovod.py").resolve()
    key = hashlib.sha256(json.dumps(sys.argv[1:]).encode()).hexdigest()[:8]
    return script.parent / f"{script.stem}.commits" / key


class Commits:
    """The file that holds the last commit of one state."""

    def __init__(self) -> None:
        global _states
        place = folder()
        self.path = place / f"commit-{_states}.pt" if place else None
        self.number = 0  # of the last commit
        _states += 1

    def write(self, content: dict[str, Any]) -> None:
        """Count a commit, and replace the file on rank 0. No communication.

        Raises:
            TypeError: if the content has a class that `serialization` does not read back.
            Refused: if the file can't be written.
        """
        self.number += 1
        if self.path is None or world.rank() != 0:
            return
        data = serialization.dumps({"number": self.number, "content": content}, "the elastic state")
        try:
            make_folder(self.path.parent)
            replace_file(self.path, data)
        except OSError as error:
            raise Refused(
                f"can't write the commit {self.path} ({error.strerror}): set {VARIABLE} to a folder that can be written, "
                "or to none to keep commits in memory"
            ) from error

    def newest(self) -> dict[str, Any] | None:
        """The content of the last commit that any rank can read, on all ranks; None if there is none. A collective."""
        own = self._read()
        numbers = allgather_object(own["number"] if own else 0)
        self.number = max(numbers)
        if not self.number:
            return None
        holder = numbers.index(self.number)
        if world.rank() == holder:
            print(f"resuming from commit {self.number} in {self.path}; to begin again, remove it", file=sys.stderr)
        # Machines that share no storage read different files or none, so all take what one rank has read.
        newest = broadcast_object(own if world.rank() == holder else None, holder)
        return newest["content"]

    def remove_at_exit(self) -> None:
        """Remove the file when this process ends without an error. Rank 0 does; no communication."""
        if self.path is not None and world.rank() == 0:
            atexit.register(self._remove)

    def _read(self) -> dict[str, Any] | None:
        if self.path is None or not self.path.exists():
            return None
        return serialization.loads(self.path.read_bytes())

    def _remove(self) -> None:
        if self.path is None or getattr(sys, "last_value", None) is not None:  # an exception ends this process
            return
        self.path.unlink(missing_ok=True)
        for parent in (self.path.parent, self.path.parent.parent)[: 1 if os.environ.get(VARIABLE) else 2]:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
