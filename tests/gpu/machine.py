"""The machine that is checked: what it has, and how recipes are started on it and end, each within its time."""

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
# Errors in what a process wrote; a launcher that reports its processes' end, or a process that lost another, is no cause.
_CAUSE = re.compile(
    r"^(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception|Refused)\b|\w+\.py: |Fatal Python error).*)$", re.M
)
_NO_CAUSE = ("ChildFailedError", "CalledProcessError", "lost another process", "DistNetworkError")


class Failed(Exception):
    """What is wrong, in a line; `evidence` is what the process wrote last."""

    def __init__(self, cause: str, evidence: str = ""):
        super().__init__(cause)
        self.evidence = evidence


class NotRun(Exception):
    """Why a check can't be made on this machine."""


@dataclass(frozen=True)
class Trained(Outcome):
    """A run that ended well, and what tests/gpu/observed.py saw of its main process."""

    seen: dict = field(default_factory=dict)

    def result(self, key: str) -> float:
        """The last evaluation's `key`."""
        return self.column(f"eval/{key}")[-1]


@dataclass
class Launched:
    """A recipe on its way."""

    started: Started
    folder: Path
    until: float  # time.monotonic()

    def end(self) -> Trained:
        """Wait for a good end. Raises `Failed` for another one, or for none in time."""
        output = finish(self.started, self.until)
        seen = self.folder.with_suffix(".json")
        return Trained("ok", "", output, 0.0, self.folder, json.loads(seen.read_text()) if seen.exists() else {})


def finish(started: Started, until: float) -> str:
    """What the process printed, once it has ended well. Raises `Failed` for another end, or for none by `until`."""
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
    """Where the recipe itself was, not its data workers: file and line of the project."""
    for stack in stacks.split("\n\n"):
        frames = re.findall(r'File ".*?((?:recipes|common)/[\w/]+\.py)", line (\d+)', stack)
        if "_worker_loop" not in stack and any(file.startswith("recipes/") for file, _ in frames):
            return ":".join(frames[0])
    return ""


def cause_of(errors: str, code: int) -> str:
    """The line of a process's standard error that says why it ended with `code`."""
    told = [line for line in _CAUSE.findall(errors) if not any(part in line for part in _NO_CAUSE)]
    if told:
        return told[-1]
    last = errors.strip().rpartition("\n")[2]
    return f"{signal.Signals(-code).name if code < 0 else f'exit code {code}'}{last and ': '}{last}"


@dataclass
class Machine:
    """GPUs, and how long everything may take.

    `through` is a script, with its words, that runs each script: for devices that need one. `quick`: only see that it works.
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
        self.kept: dict[str, Trained] = {}  # runs that more than one check looks at
        self._count, self._started = 0, []

    @property
    def gpus(self) -> int:
        return len(self.facts["gpus"])

    def python(self, script: str, *words: object) -> str:
        """What `python script words` prints."""
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
        """`recipes/<recipe>.py` on that many GPUs (0: the CPU), in a run folder of its own, a row a step and no tracker.

        The same `name` is the same run.
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
        """`start` a run and wait for its good end."""
        return self.start(*words, **options).end()

    def _start(
        self, start: Callable[..., Started], *words: object, env: Mapping = MappingProxyType({}), **options
    ) -> Started:
        """In a group of its own: what Ctrl-C ends is for `end_all` to say."""
        cache = self.scratch / "compiled"  # what an earlier time compiled would hide how long it takes
        own = {"TORCHINDUCTOR_CACHE_DIR": cache / "inductor", "TRITON_CACHE_DIR": cache / "triton"}
        own |= {"VISION_RECIPES_CACHE": os.devnull}
        self._started.append(
            start(*words, env={**{k: str(v) for k, v in own.items()}, **env}, process_group=0, **options)
        )
        return self._started[-1]

    def end_all(self) -> None:
        """Kill what still runs of all that was started, launchers first: they must not start others."""
        for started in self._started:
            if started.process.poll() is None:
                process = psutil.Process(started.process.pid)
                for each in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
        self._started.clear()


def private(text: str) -> str:
    """`text` without what is nobody's business: folders, the user's and the machine's name."""
    text = re.sub(r"(?<![\w.-])(?:/[\w.@+-]+)+/(?=[\w.@+-])", "", text)
    for name in {os.environ.get("USER", ""), Path.home().name, os.uname().nodename}:
        text = re.sub(rf"\b{re.escape(name)}\b", "...", text) if len(name) > 2 else text
    return text.replace(sys.prefix, "...")
