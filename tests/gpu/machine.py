"""The machine under test: its facts, and how recipes are started on it and waited for, each within its time limit."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired
from types import MappingProxyType

import psutil

from tests.harness.launching import Launcher, Started
from tests.harness.outcomes import Outcome
from tests.harness.waiting import end_with_stacks

SUFFIX = {"fp32": "", "bf16": "_bf16", "fp16": "_fp16"}  # of the files in accelerate_configs/
# Lines with errors. A launcher that reports the end of its processes, or a process that lost another, is not the cause.
_CAUSE = re.compile(
    r"^(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception|Refused)\b|\w+\.py: |Fatal Python error).*)$", re.M
)
_NO_CAUSE = ("ChildFailedError", "CalledProcessError", "lost another process", "DistNetworkError")


class Failed(Exception):
    """A check failed. The message is one line; `evidence` is the last output of the process."""

    def __init__(self, cause: str, evidence: str = ""):
        super().__init__(cause)
        self.evidence = evidence


class NotRun(Exception):
    """A check can't run on this machine; the message says why."""


@dataclass(frozen=True)
class Trained(Outcome):
    """A run that succeeded, and what tests/gpu/observed.py measured in its main process."""

    seen: dict = field(default_factory=dict)

    def result(self, key: str) -> float:
        """The value of `key` in the last evaluation."""
        return self.column(f"eval/{key}")[-1]


@dataclass
class Launched:
    """A recipe that was started."""

    started: Started
    folder: Path
    until: float  # time.monotonic()

    def end(self) -> Trained:
        """Waits for success. Raises `Failed` for an error, or if the run does not end in time."""
        output = finish(self.started, self.until)
        seen = self.folder.with_suffix(".json")
        return Trained("ok", "", output, 0.0, self.folder, json.loads(seen.read_text()) if seen.exists() else {})


def finish(started: Started, until: float) -> str:
    """Waits for success and returns the output. Raises `Failed` for an error, or if it does not end by `until`."""
    left, process = max(0.0, until - time.monotonic()), started.process
    try:
        process.wait(left)
    except TimeoutExpired:
        end_with_stacks([psutil.Process(process.pid)])
        text = started.stderr.read_text()
        where = f", in {place}" if (place := place_of(text)) else ""
        raise Failed(f"no end within {left:.0f} s{where}", text) from None
    output, errors = started.stdout.read_text(), started.stderr.read_text()
    if process.returncode:
        raise Failed(cause_of(errors, process.returncode), errors or output)
    return output


def place_of(stacks: str) -> str:
    """File and line of the project where the recipe itself (not a data worker) is, from the stacks of its threads."""
    for stack in stacks.split("\n\n"):
        frames = re.findall(r'File ".*?((?:recipes|common)/[\w/]+\.py)", line (\d+)', stack)
        if "_worker_loop" not in stack and any(file.startswith("recipes/") for file, _ in frames):
            return ":".join(frames[0])
    return ""


def cause_of(errors: str, code: int) -> str:
    """The line of standard error that tells why a process ended with `code`."""
    told = [line for line in _CAUSE.findall(errors) if not any(part in line for part in _NO_CAUSE)]
    if told:
        return told[-1]
    last = errors.strip().rpartition("\n")[2]
    return f"{signal.Signals(-code).name if code < 0 else f'exit code {code}'}{last and ': '}{last}"


@dataclass
class Machine:
    """The GPUs, and the time limit for everything.

    `through`: a script (and its arguments) that runs each script, for pretended GPUs. `quick`: only check that it works.
    """

    scratch: Path
    until: float  # time.monotonic()
    through: tuple[str, ...] = ()
    quick: bool = False
    facts: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("home", "runs"):
            (self.scratch / name).mkdir(parents=True)
        self.launcher = Launcher(self.scratch / "home")
        self.check_until = self.until
        self.kept: dict[str, Trained] = {}  # runs that several checks use
        self._count, self._started = 0, []

    @property
    def gpus(self) -> int:
        return len(self.facts["gpus"])

    def python(self, script: str, *words: object) -> str:
        """Runs `python script words` and returns its output."""
        return finish(self._start(self.launcher.start_python, *self.through, script, *words), self.check_until)

    def start(
        self,
        *words: object,
        recipe: str = "cls",
        precision: str = "fp32",
        gpus: int = 1,
        name: str = "",
        env: dict | None = None,
    ) -> Launched:
        """Starts `recipes/<recipe>.py` on that many GPUs (0: the CPU), logging every step, without a tracker.

        The run gets its own folder; the same `name` continues the same run.
        """
        self._count += 1
        folder = self.scratch / "runs" / (name or f"run{self._count}")
        config = ("multi_gpu" if gpus > 1 else "single_gpu") + SUFFIX[precision] if gpus else "cpu"
        own = ["--output_dir", folder.parent, "--name", folder.name, "--log_every", 1, "--tracker", "none"]
        if self.quick and recipe == "cls" and "--global_batch_size" not in words:
            own += ["--global_batch_size", 16]
        flags = ("--num_processes", gpus) if gpus > 1 else ()
        env = {"OBSERVED": str(folder.with_suffix(".json"))} | (env or {})
        script = (*self.through, "tests/gpu/observed.py", f"recipes/{recipe}.py")
        return Launched(
            self._start(self.launcher.start, config, *script, *words, *own, flags=flags, env=env),
            folder,
            self.check_until,
        )

    def train(self, *words: object, **options) -> Trained:
        """Starts a run and waits for success."""
        return self.start(*words, **options).end()

    def _start(
        self, start: Callable[..., Started], *words: object, env: Mapping = MappingProxyType({}), **options
    ) -> Started:
        """Starts a process in its own process group, so that Ctrl-C leaves ending it to `end_all`."""
        cache = self.scratch / "compiled"  # earlier compiled code would hide the time of compiling
        own = {"TORCHINDUCTOR_CACHE_DIR": cache / "inductor", "TRITON_CACHE_DIR": cache / "triton"}
        own |= {"VISION_RECIPES_CACHE": os.devnull}
        self._started.append(
            start(*words, env={**{k: str(v) for k, v in own.items()}, **env}, process_group=0, **options)
        )
        return self._started[-1]

    def end_all(self) -> None:
        """Kills all started processes that still run, launchers first, so that they start no others."""
        for started in self._started:
            if started.process.poll() is None:
                process = psutil.Process(started.process.pid)
                for each in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
        self._started.clear()


def private(text: str) -> str:
    """`text` without private parts: folders, user name and host name."""
    text = re.sub(r"(?<![\w.-])(?:/[\w.@+-]+)+/(?=[\w.@+-])", "", text)
    for name in {os.environ.get("USER", ""), Path.home().name, os.uname().nodename}:
        text = re.sub(rf"\b{re.escape(name)}\b", "...", text) if len(name) > 2 else text
    return text.replace(sys.prefix, "...")
