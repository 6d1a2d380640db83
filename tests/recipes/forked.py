"""How do tests run a recipe dozens of times, also killed at any of its file operations, without starting Python for each?

A fork server imports the recipe once; each run is a fresh fork of it, one process on the CPU as with `python recipes/cls.py`.
"""

import atexit
import faulthandler
import functools
import multiprocessing
import os
import re
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.harness import Limit, as_digits, end_with_stacks

IMPORTED_ONCE = ["recipes.cls", "recipes.det", "matplotlib.pyplot", "sklearn.datasets"]
# Audit events of Python, and one of ours.
FILE_OPERATIONS = {"open", "os.chmod", "os.fsync", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
_REPORTS = ("out", "err", "died before")


@dataclass(frozen=True)
class Ended:
    """How a forked run ended."""

    code: int  # exit code, or -9 for SIGKILL
    stdout: str
    stderr: str
    died_before: str  # the file operation, where one ended it


@dataclass(frozen=True)
class Fork:
    """A forked run that is on its way."""

    process: multiprocessing.Process
    folder: Path

    def end(self, seconds: float = 120) -> Ended:
        """Wait for its end, at most `seconds` of an idle machine."""
        limit = Limit(seconds)
        while self.process.exitcode is None and (left := limit.left()) > 0:
            self.process.join(min(left, 1.0))
        if self.process.exitcode is None:
            end_with_stacks([psutil.Process(self.process.pid)])
            raise AssertionError(f"no end within {limit}: {(self.folder / 'err').read_text()}")
        return Ended(self.process.exitcode, *((self.folder / name).read_text() for name in _REPORTS))


class Forks:
    """Runs of recipes in forks; `scratch` takes what they print."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.count = scratch, 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(IMPORTED_ONCE)

    def __call__(
        self,
        *words: object,
        recipe: str = "cls",
        before: Callable[[], None] | None = None,
        watch: Path | None = None,
        spared: Collection[str] = (),
    ) -> Ended:
        """Run recipes/<recipe>.py with `words` on its command line, to its end: see `start`."""
        return self.start(*words, recipe=recipe, before=before, watch=watch, spared=spared).end()

    def start(
        self,
        *words: object,
        recipe: str = "cls",
        before: Callable[[], None] | None = None,
        watch: Path | None = None,
        spared: Collection[str] = (),
    ) -> Fork:
        """Start the recipe with `words` on its command line; own data have the defaults of digits, see `as_digits`.

        `before` is called first in the fork, to change something there: a function at the top of a test module, or a
        `functools.partial` of one. With `watch`, SIGKILL ends the process before its first file operation below that folder
        that is not `spared`: operation, path with 0 for every number, and how often it has come before.
        """
        self.count += 1
        folder = self.scratch / str(self.count)
        folder.mkdir()
        for name in _REPORTS:
            (folder / name).touch()  # also where the fork does not live to write
        command = [f"{recipe}.py", *map(str, as_digits(words, recipe))]
        process = self.context.Process(target=_run, args=(command, folder, before, watch, spared))
        process.start()
        return Fork(process, folder)

    def start_ranks(
        self,
        processes: int,
        *words: object,
        recipe: str = "cls",
        before: Callable[[int], None] | None = None,
        watch: Path | None = None,
        spared: Collection[str] = (),
    ) -> list[Fork]:
        """As many forks, which are the ranks of one world; `before` is called with the rank, `watch` is for rank 0."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        return [
            self.start(
                *words,
                recipe=recipe,
                before=functools.partial(_be_rank, rank, processes, port, before),
                watch=None if rank else watch,
                spared=spared,
            )
            for rank in range(processes)
        ]


def _be_rank(rank: int, processes: int, port: int, before: Callable[[int], None] | None) -> None:
    """The environment of a rank as `accelerate launch` makes it; the fork server stands for the launcher."""
    from common.distributed import launch

    launch._PARENT = os.getppid()
    if processes > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
        os.environ.update({name: str(value) for name, value in world.items()})
    if before:
        before(rank)


def _run(
    command: list[str], folder: Path, before: Callable[[], None] | None, watch: Path | None, spared: Collection[str]
) -> None:
    out, err, report = (os.open(folder / name, os.O_WRONLY) for name in _REPORTS)
    os.dup2(out, 1)
    os.dup2(err, 2)
    faulthandler.enable()  # for `end_with_stacks`
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

    import torch
    from tqdm.std import TqdmDefaultWriteLock

    from common.distributed import launch
    from recipes import cls, det

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of data workers
    TqdmDefaultWriteLock.mp_lock = None  # a semaphore, which a killed fork would leave behind
    if before:
        before()
    if watch:
        os.fsync = audited_fsync
        sys.addaudithook(_assassin(str(watch), spared, report))
    sys.argv = command
    try:
        launch.run({"cls.py": cls, "det.py": det}[command[0]].main)
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # which a fork of multiprocessing ends without


def audited_fsync(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
    """`os.fsync`, which Python does not audit."""
    sys.audit("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
    fsync(descriptor)


def without_numbers(operation: str, path: str) -> str:
    """A file operation, with 0 for every number in the path."""
    return f"{operation} {re.sub('[0-9]+', '0', path)}"


def _assassin(watch: str, spared: Collection[str], report: int) -> Callable[[str, tuple], None]:
    """An audit hook that ends the process before a file operation below `watch` that is not `spared`."""
    times: Counter[str] = Counter()

    def hook(event: str, arguments: tuple) -> None:
        if event not in FILE_OPERATIONS:
            return
        path, *rest = arguments
        if event in ("os.remove", "os.rmdir") and rest[0] >= 0:  # a name relative to an open folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{rest[0]}"), path)
        if not str(path).startswith(watch):
            return
        operation = without_numbers(event, str(path).removeprefix(watch))
        times[operation] += 1
        if f"{operation} {times[operation]}" not in spared:
            os.write(report, f"{operation} {times[operation]}".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    return hook
