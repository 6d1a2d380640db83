"""Layouts that can be tried on these machines, and the start of one: the processes of a trial, and what they found."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.distributed.environment import cores
from common.errors import printable

ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 3.0  # how long the processes of a layout may live after one of them has failed
# A launcher's variables, which describe another world than that of a trial.
_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
_LAUNCHERS = ("MASTER_", "TORCHELASTIC_", "RECIPES_EXIT_FOLDER", "RECIPES_AT_LEAST", "SLURM_", "OMPI_", "PMI", "PET_")


@dataclass(frozen=True)
class Layout:
    """`processes` on `machines`, as equally many on each; `node` is this machine."""

    processes: int
    machines: int = 1
    node: int = 0
    address: str = "127.0.0.1"
    port: int = 0

    @property
    def here(self) -> int:
        """Processes of each machine."""
        return self.processes // self.machines

    def __str__(self) -> str:
        text = f"{self.processes} process{'es' * (self.processes > 1)}"
        return text + (f" on {self.machines} machines" if self.machines > 1 else "")


def counts(most: int) -> list[int]:
    """Numbers of processes of one machine to try: 1 to 4, then powers of two, and all."""
    return sorted({1, 2, 3, 4, *(2**power for power in range(3, 12)), most} & {*range(1, most + 1)})


def threads_of(layout: Layout, environ: Mapping[str, str]) -> int:
    """The threads that a process of the layout will compute with, as `launch.share_cores` decides.

    A number that a person has set stands in the launcher's own environment, or in that of this process if it was not launched.
    """
    said = environ
    if "LOCAL_RANK" in environ or "ACCELERATE_MIXED_PRECISION" in environ:
        with contextlib.suppress(psutil.Error):
            said = psutil.Process(os.getppid()).environ()
    if number := said.get("OMP_NUM_THREADS", ""):
        return int(number)
    return max(1, min(psutil.cpu_count(logical=False) or 1, cores()) // layout.here)


def variables(layout: Layout, local_rank: int, on_cpu: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process of the layout, as a launcher would make it."""
    found = {name: value for name, value in environ.items() if name not in _WORLD and not name.startswith(_LAUNCHERS)}
    found |= {"OMP_NUM_THREADS": str(threads_of(layout, environ)), "ACCELERATE_MIXED_PRECISION": precision(environ)}
    found |= {"CUDA_VISIBLE_DEVICES": "-1"} if on_cpu else {}
    if layout.processes == 1:
        return found
    world = {
        "RANK": layout.node * layout.here + local_rank,
        "WORLD_SIZE": layout.processes,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": layout.here,
        "GROUP_RANK": layout.node,
        "GROUP_WORLD_SIZE": layout.machines,
        "MASTER_PORT": layout.port,
    }
    return found | {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": layout.address}


def precision(environ: Mapping[str, str]) -> str:
    """no, bf16 or fp16, as launched."""
    return environ.get("ACCELERATE_MIXED_PRECISION", "no")


def folder_for(output_dir: str) -> Path:
    """A new folder for the runs of trials, on the disk where runs are kept if one can write there."""
    for place in (Path(output_dir), None):
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=".doctor-", dir=place))
    raise OSError(f"no folder can be made in {output_dir} or {tempfile.gettempdir()}")


def try_layout(
    layout: Layout, recipe: Path, words: Sequence[str], runs: Path, on_cpu: bool, limit: float, **job
) -> list[dict]:
    """Start this machine's processes of a trial, wait for them, and return what each found, or `failed` and its cause.

    `runs` is a folder that all machines see, `limit` is in seconds.
    """
    scratch = Path(tempfile.mkdtemp(prefix="doctor-"))
    quiet = ["--output_dir", runs, "--name", f"trial-{layout.processes}", "--resume", "never", "--tracker", "none"]
    quiet += ["--patience", 0, "--max_hours", 0, "--profile", ""]
    told = {"recipe": str(recipe.resolve()), "words": [*map(str, [*words, *quiet])], "result": str(scratch / "result")}
    told |= {"threads": threads_of(layout, os.environ)} | job
    (scratch / "job.json").write_text(json.dumps(told))
    started: list[subprocess.Popen] = []
    try:
        for local_rank in range(layout.here):
            with (
                (scratch / f"{local_rank}.out").open("wb") as output,
                (scratch / f"{local_rank}.err").open("wb") as errors,
            ):
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tools.doctor.plan_trial", str(scratch / "job.json")],
                        env=variables(layout, local_rank, on_cpu, os.environ) | {"PYTHONPATH": str(ROOT)},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=errors,
                    )
                )
        first = await_end(started, limit)
        if first is None:
            files = [scratch / f"result.{layout.node * layout.here + number}.json" for number in range(layout.here)]
            return [json.loads(file.read_text()) for file in files]
        code = started[first].returncode
        cause = (
            f"no end within {limit:.0f} s" if code is None else cause_of(code, (scratch / f"{first}.err").read_text())
        )
        return [{"rank": layout.node * layout.here + first, "failed": cause}]
    finally:
        for process in started:
            process.kill()
            process.wait()
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(runs / f"trial-{layout.processes}", ignore_errors=True)


def await_end(started: Sequence[subprocess.Popen], limit: float) -> int | None:
    """Wait until all have ended well: None; or one has failed, or none of the rest ends within `limit`: its number."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        codes = [process.poll() for process in started]
        failed = {number: code for number, code in enumerate(codes) if code}
        if failed:  # who has refused prints it, the others have only lost a peer
            return next((number for number, code in failed.items() if code == 2 or code < 0), min(failed))
        if None not in codes:
            return None
        time.sleep(0.02)
    return next(number for number, process in enumerate(started) if process.poll() is None)


def cause_of(code: int, errors: str) -> str:
    """Why a process ended with `code`, in one line, from what it has printed on stderr."""
    if code < 0:
        out_of_memory = ": was it killed for want of memory?" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{out_of_memory}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or [f"exit code {code}"]
    named = [line for line in lines if re.match(r"[\w.]+: ", line)]
    return printable((lines if code == 2 else named or lines)[-1])[:400]
