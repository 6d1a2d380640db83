"""How do tests run a recipe dozens of times, also killed at any of its file operations, without starting Python for each?

A fork server imports the recipe once; each run is a fresh fork of it, one process on the CPU as with `python recipes/cls.py`.
"""

import atexit
import multiprocessing
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

IMPORTED_ONCE = ["recipes.cls", "recipes.det", "matplotlib.pyplot", "sklearn.datasets"]
FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}  # audit events of Python


@dataclass(frozen=True)
class Ended:
    """How a forked run ended."""

    code: int  # exit code, or -9 for SIGKILL
    stdout: str
    stderr: str
    died_before: str  # the file operation, where one ended it


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
        """Run recipes/<recipe>.py with `words` on its command line, to its end.

        `before` is called first in the fork, to change something there: a function at the top of a test module, or a
        `functools.partial` of one. With `watch`, SIGKILL ends the process before its first file operation below that folder
        that is not `spared`: operation, path with 0 for every number, and how often it has come before.
        """
        self.count += 1
        folder = self.scratch / str(self.count)
        folder.mkdir()
        command = [f"{recipe}.py", *map(str, words)]
        process = self.context.Process(target=_run, args=(command, folder, before, watch, spared))
        process.start()
        process.join(120)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"no end within two minutes: {words}")
        return Ended(process.exitcode, *((folder / name).read_text() for name in ("out", "err", "died before")))


def _run(
    command: list[str], folder: Path, before: Callable[[], None] | None, watch: Path | None, spared: Collection[str]
) -> None:
    out, err, report = (os.open(folder / name, os.O_WRONLY | os.O_CREAT) for name in ("out", "err", "died before"))
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

    import torch
    from tqdm.std import TqdmDefaultWriteLock

    from common import launch
    from recipes import cls, det

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of data workers
    TqdmDefaultWriteLock.mp_lock = None  # a semaphore, which a killed fork would leave behind
    if before:
        before()
    if watch:
        sys.addaudithook(_assassin(str(watch), spared, report))
    sys.argv = command
    try:
        launch.run({"cls.py": cls, "det.py": det}[command[0]].main)
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # which a fork of multiprocessing ends without


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
        operation = f"{event} {re.sub('[0-9]+', '0', str(path).removeprefix(watch))}"
        times[operation] += 1
        if f"{operation} {times[operation]}" not in spared:
            os.write(report, f"{operation} {times[operation]}".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    return hook
