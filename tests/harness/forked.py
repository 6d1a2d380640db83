"""Runs of a recipe that start as forks: dozens of them, also killed at any file operation, without
starting Python for each.

A fork server imports the recipes once; each run is a fresh fork of it, one process on the CPU as
with `python recipes/cls.py`.
"""

import atexit
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.files import CACHE
from common.run import Observer
from tests.harness import several
from tests.harness.launching import add_small_defaults, find_free_port, inherit_environment
from tests.harness.waiting import Limit, end_with_stacks

IMPORTED_ONCE = [
    "recipes.cls",
    "recipes.det",
    "recipes.seg",
    "matplotlib.pyplot",
    "sklearn.datasets",
]
# Audit events of Python, and one of ours.
FILE_OPERATIONS = {
    "open",
    "os.chmod",
    "os.fsync",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "shutil.rmtree",
}
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
        while self.process.exitcode is None and limit.left() > 0:
            self.process.join(1.0)
        if self.process.exitcode is None:
            end_with_stacks([psutil.Process(self.process.pid)])
            raise AssertionError(f"no end within {limit}: {(self.folder / 'err').read_text()}")
        stdout, stderr, died_before = ((self.folder / name).read_text() for name in _REPORTS)
        return Ended(self.process.exitcode, stdout, stderr, died_before)


class Forks:
    """Runs of recipes in forks; `scratch` takes what they print. `environment`: more for their server."""

    def __init__(self, scratch: Path, environment: Mapping[str, str] | None = None) -> None:
        self.scratch = scratch
        self.count = 0
        self.context = multiprocessing.get_context("forkserver")
        self.server = multiprocessing.forkserver.ForkServer()
        self.server.set_forkserver_preload(IMPORTED_ONCE)
        with pytest.MonkeyPatch.context() as patch:  # its forks inherit the server's environment
            for name in os.environ.keys() - inherit_environment().keys() - {CACHE}:
                patch.delenv(name)
            for name, value in {"HOME": str(scratch), **(environment or {})}.items():
                patch.setenv(name, value)
            self.server.ensure_running()

    def __call__(self, argv: Sequence[object], **options: Any) -> Ended:
        """Run recipes/<recipe>.py with `argv` on its command line, to its end: see `start`."""
        return self.start(argv, **options).end()

    def start(
        self,
        argv: Sequence[object],
        *,
        recipe: str | Path = "cls",
        observer: Observer | None = None,
        before: Callable[[], None] | None = None,
        **options: Any,
    ) -> Fork:
        """Start the recipe, or a copy of it in a file, with `argv` on its command line; the run is small.

        `observer` sees the run. `before` is called first in the fork, to change its environment: a
        function at the top of a test module, or a `functools.partial` of one. With `watch`, SIGKILL
        ends the process before its first file operation below that folder that is not `spared`:
        operation ("read" for a file that is opened for that), path with 0 for every number, and how
        often it has come before. Nothing is drawn but with `pictures`.
        """
        main = self._build_main(recipe, argv, observer)
        return self._fork(main, {}, before, **options)

    def start_ranks(
        self,
        processes: int,
        argv: Sequence[object],
        *,
        recipe: str | Path = "cls",
        observers: Mapping[int, Observer] | None = None,
        before: Callable[[], None] | None = None,
        watch: Path | None = None,
        **options: Any,
    ) -> list[Fork]:
        """As many forks, which are the ranks of one world; `observers` are by rank, `watch` is for rank 0."""
        forks = []
        for rank, world in enumerate(_build_worlds(processes)):
            main = self._build_main(recipe, argv, (observers or {}).get(rank))
            forks.append(self._fork(main, world, before, None if rank else watch, **options))
        return forks

    def start_main(
        self,
        processes: int,
        main: Callable[[], None],
        environment: Mapping[str, str | None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> list[Fork]:
        """`main` in as many forks, which are the ranks of one world; None in their `environment`
        takes a variable out.
        """
        worlds = [world | (environment or {}) for world in _build_worlds(processes)]
        return [self._fork(main, world, before, pictures=True) for world in worlds]

    def run_main(
        self,
        processes: int,
        main: Callable[[], None],
        environment: Mapping[str, str | None] | None = None,
        before: Callable[[], None] | None = None,
        *,
        timeout: float,
    ) -> subprocess.CompletedProcess[str]:
        """`start_main` to the end of all ranks; if one fails, the others end with their stacks."""
        ranks = self.start_main(processes, main, environment, before)
        limit = Limit(timeout)
        while alive := [rank.process.sentinel for rank in ranks if rank.process.exitcode is None]:
            if limit.left() <= 0 or any(rank.process.exitcode for rank in ranks):
                end_with_stacks(
                    psutil.Process(rank.process.pid)
                    for rank in ranks
                    if rank.process.exitcode is None
                )
            connection.wait(alive, 1.0)
        ends = [rank.end() for rank in ranks]
        code = max(abs(end.code) for end in ends)
        stdout = "\n".join(end.stdout for end in ends)
        stderr = "\n".join(end.stderr for end in ends)
        return subprocess.CompletedProcess(["forks"], code, stdout, stderr)

    def _build_main(
        self, recipe: str | Path, argv: Sequence[object], observer: Observer | None
    ) -> Callable[[], None]:
        command = [str(Path(recipe).with_suffix(".py"))] + list(
            map(str, add_small_defaults(argv, recipe))
        )
        if "--eval_only" in command and "--output_dir" not in command:
            command += ["--output_dir", str(self.scratch)]  # for reports
        return functools.partial(_run_recipe, command, observer)

    def _fork(
        self,
        main: Callable[[], None],
        environment: Mapping[str, str | None],
        before: Callable[[], None] | None,
        watch: Path | None = None,
        spared: Collection[str] = (),
        pictures: bool = False,
    ) -> Fork:
        self.count += 1
        folder = self.scratch / str(self.count)
        folder.mkdir()
        for name in _REPORTS:
            (folder / name).touch()  # also where the fork does not live to write
        args = (main, folder, environment, before, watch, spared, pictures)
        process = self.context.Process(target=_run, args=args)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                multiprocessing.forkserver,
                "connect_to_new_process",
                self.server.connect_to_new_process,
            )
            process.start()
        return Fork(process, folder)


def _build_worlds(processes: int) -> list[dict[str, str | None]]:
    """The environment of each rank as `accelerate launch` makes it; the fork server stands for the
    launcher.
    """
    if processes == 1:
        return [{}]
    world = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "ACCELERATE_USE_CPU": "true",
    }
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _run_recipe(command: list[str], observer: Observer | None) -> None:
    from recipes import cls, det, seg

    imported = {"cls.py": cls, "det.py": det, "seg.py": seg}
    sys.argv = command
    several.run_observed(
        imported.get(command[0]) or several.load_recipe(Path(command[0])), observer
    )


def _run(
    main: Callable[[], None],
    folder: Path,
    environment: Mapping[str, str | None],
    before: Callable[[], None] | None,
    watch: Path | None,
    spared: Collection[str],
    pictures: bool,
) -> None:
    gc.freeze()  # a collection would copy every page that the fork shares with the server
    out, err, report = (os.open(folder / name, os.O_WRONLY) for name in _REPORTS)
    os.dup2(out, 1)
    os.dup2(err, 2)
    faulthandler.enable()  # for `end_with_stacks`
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    for name, value in environment.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})

    import torch
    from tqdm.std import TqdmDefaultWriteLock

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of data workers
    TqdmDefaultWriteLock.mp_lock = None  # a semaphore, which a killed fork would leave behind
    if not pictures:
        several.draw_nothing()
    if before:
        before()
    if watch:
        os.fsync = audit_fsync
        sys.addaudithook(_build_assassin(str(watch), spared, report))
    try:
        main()
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # which a fork of multiprocessing ends without


def audit_fsync(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
    """`os.fsync`, which Python does not audit."""
    sys.audit("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
    fsync(descriptor)


def strip_numbers(operation: str, path: str) -> str:
    """A file operation, with 0 for every number in the path."""
    return f"{operation} {re.sub('[0-9]+', '0', path)}"


def _build_assassin(
    watch: str, spared: Collection[str], report: int
) -> Callable[[str, tuple], None]:
    """An audit hook that ends the process before a file operation below `watch` that is not `spared`."""
    times: Counter[str] = Counter()

    def hook(event: str, arguments: tuple) -> None:
        if event not in FILE_OPERATIONS:
            return
        path = arguments[0]
        if event in ("os.remove", "os.rmdir"):
            descriptor = arguments[1]
            if descriptor >= 0:  # a name relative to an open folder
                path = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), path)
        if not str(path).startswith(watch):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            event = "read"
        operation = strip_numbers(event, str(path).removeprefix(watch))
        times[operation] += 1
        if f"{operation} {times[operation]}" not in spared:
            os.write(report, f"{operation} {times[operation]}".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    return hook
