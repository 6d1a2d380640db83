"""What do tests that launch the real scripts share?"""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests.harness import Limit, end_with_stacks
from tests.processes import Processes

ROOT = Path(__file__).parent.parent
# The same examples in every run, and no time limit on a busy machine.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# A test's launch inherits no world, no precision and no account from the shell it was started in.
NOT_INHERITED = (
    "ACCELERATE_",
    "HF_",
    "WANDB_",
    "XDG_",
    "VISION_RECIPES_",
    "TORCHELASTIC_",
    "MASTER_",
    "SLURM_",
    "OMPI_",
    "PMI_",
)
NOT_INHERITED_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


LAUNCHING = ("tests/recipes/", "tests/faults/", "tests/pretended_gpu/", "tests/test_")  # folders of slow tests


def pytest_configure() -> None:
    """What tests read in this process leaves no index behind; those of the index name a place."""
    os.environ["VISION_RECIPES_CACHE"] = os.devnull


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first: of two processes that run tests, the last to end is then not much later than the other."""
    items.sort(key=lambda item: not item.nodeid.startswith(LAUNCHING))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Of tests that run two at a time, those marked `alone` wait for the other one's end and keep its next one waiting."""
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    # Two locks, on files that are there anyway: who waits for the second keeps others from going on before.
    with (ROOT / "pyproject.toml").open("rb") as turn, (ROOT / "Makefile").open("rb") as floor:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(floor, kind)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(floor, fcntl.LOCK_UN)  # also for processes that a test has forked and left behind


@dataclass
class Started:
    """A command that runs. Its output goes to files: a pipe would stay open as long as an orphaned rank lives."""

    process: subprocess.Popen
    stdout: Path
    stderr: Path

    def finish(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait for the end, at most `timeout` seconds of an idle machine; past that all its processes end with their stacks."""
        limit = Limit(timeout)
        while self.process.poll() is None and (left := limit.left()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(min(left, 1.0))
        if self.process.poll() is None:
            end_with_stacks([psutil.Process(self.process.pid)])
            pytest.fail(f"no end within {limit}\n{self.stdout.read_text()}\n{self.stderr.read_text()}")
        return subprocess.CompletedProcess(
            self.process.args, self.process.returncode, self.stdout.read_text(), self.stderr.read_text()
        )


class Launcher:
    """Starts scripts as a person would: in the root of the checkout, with an empty home, and one thread a process.

    `before` stands before each command, such as words that run it on another machine.
    """

    def __init__(self, home: Path, before: Sequence[str] = ()) -> None:
        self.home, self.before = home, before

    def start(
        self,
        config: str,
        script: str | Path,
        *arguments: object,
        flags: Sequence[object] = (),
        env: Mapping[str, str] | None = None,
        process_group: int | None = None,
        cwd: Path = ROOT,
    ) -> Started:
        """`accelerate launch --config_file accelerate_configs/<config>.yaml <flags> <script> <arguments>`."""
        file = ROOT / "accelerate_configs" / f"{config}.yaml"
        launcher = ["-m", "accelerate.commands.launch", "--config_file", file, *flags]
        return self.start_python(*launcher, script, *arguments, env=env, process_group=process_group, cwd=cwd)

    def start_python(
        self,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        process_group: int | None = None,
        cwd: Path = ROOT,
    ) -> Started:
        """`python <arguments>`; with `process_group` 0 in a group of its own, as a shell starts it."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(NOT_INHERITED) and name not in NOT_INHERITED_NAMES
        }
        outputs = [Path(tempfile.mkstemp(dir=self.home, suffix=suffix)[1]) for suffix in (".out", ".err")]
        with outputs[0].open("w") as stdout, outputs[1].open("w") as stderr:
            process = subprocess.Popen(
                [*self.before, sys.executable, *map(str, arguments)],
                cwd=cwd,
                env={
                    **inherited,
                    "HOME": str(self.home),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONFAULTHANDLER": "1",
                    **(env or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=process_group,
            )
        return Started(process, *outputs)

    def __call__(
        self, config: str, script: str | Path, *arguments: object, timeout: float = 120, **options
    ) -> subprocess.CompletedProcess[str]:
        """`start` and wait for the end."""
        return self.start(config, script, *arguments, **options).finish(timeout)


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """`launch("multi_cpu", script, "--seed", 1, flags=["--num_processes", 3])`; `launch.start` doesn't wait for it."""
    return Launcher(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Gives a TCP port that nothing listens on."""

    def find() -> int:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return listener.getsockname()[1]

    return find


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """`processes.run(case, *arguments, ranks=2)` runs a function on 1 to 3 gloo processes, started once."""
    started = Processes(3)
    yield started
    started.close()
