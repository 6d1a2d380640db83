"""Trial: the recipe itself, started for some seconds; what it measures is read from its run folder.

The processes get the variables that a launcher would set. Once there are enough rows in metrics.jsonl they are asked to stop
(SIGTERM), which saves a checkpoint. The run folder is temporary.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.checkpoints import Checkpoints, verify
from common.config import parse
from common.errors import printable
from common.launching.exit_codes import RESUMABLE
from common.launching.launchers import Launch
from common.run.folder import read_rows
from tools.doctor.limits import used_by_others
from tools.doctor.world import World
from tools.trained import RECIPES, load_recipe

ROOT = Path(__file__).resolve().parents[2]
QUIET = (
    "--name trial --resume never --tracker none --patience 0 --max_hours 0 --profile= --max_steps 1000000 "
    "--eval_every 1000000 --checkpoint_every 1000000"
).split()
FEWEST_ROWS = 4  # the first half is warm-up
# A launcher's variables, which describe another world than the trial's.
_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "MASTER_"),
    *("TORCHELASTIC_", "RECIPES_EXIT_FOLDER", "RECIPES_AT_LEAST", "SLURM_", "OMPI_", "PMI", "PET_"),
)


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


def config_of(world: World):
    """The recipe's configuration, with its flags. Raises `Refused` for flags that it does not take."""
    recipe, *words = command_of(world)
    return parse(load_recipe(Path(recipe)).Config, words, Path(recipe).name)


def command_of(world: World) -> list[str]:
    """The recipe's file and its flags; without a recipe, the classifier on digits."""
    if world.recipe:
        return [str(world.recipe.resolve()), *world.words]
    return [str(RECIPES / "cls.py"), "--config", str(RECIPES / "presets/digits.yaml"), *world.words]


def try_layout(world: World, layout: Layout, seconds: float, limit: float, log_every: int) -> dict:
    """Run the recipe in `layout` until it has trained for `seconds`; `limit` includes the start. A collective.

    Returns `failed` with the cause (`late`: it came to no end), or images_per_second, data_wait (a share of the time),
    start_s, samples (per step), the `slowest` rank and its `lag` (a share of the time), checkpoint_bytes, verify_s; `memory`
    (bytes, of the process that took the most), and `others`, the largest share of a machine's cores that other programs used
    at the start.
    """
    with contextlib.ExitStack() as stack:
        folder, port = "", 0
        if world.is_main:
            runs = config_of(world).output_dir
            place = runs if os.access(runs, os.W_OK) else None  # the disk of runs, if it can be written
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=".doctor-", dir=place, ignore_cleanup_errors=True)
            )
            with socket.create_server(("", 0)) as listener:
                port = listener.getsockname()[1]
        folder, port = world.exchange([folder, port])[0]
        address = os.environ.get("MASTER_ADDR", "127.0.0.1") if layout.machines > 1 else "127.0.0.1"
        layout = dataclasses.replace(layout, address=address, port=port)
        found: dict = {}
        if world.is_local_main and world.node < layout.machines:
            found = {"others": used_by_others()}
            found |= _run_here(world, layout, Path(folder), seconds, limit, log_every)
        of_ranks = [one for one in world.exchange(found, limit + 60) if one]
    failed = sorted((one for one in of_ranks if "failed" in one), key=lambda one: one["lost"])
    largest = {name: max(one.get(name, 0) for one in of_ranks) for name in ("memory", "others")}
    return failed[0] if failed else of_ranks[0] | largest


def _run_here(world: World, layout: Layout, runs: Path, seconds: float, limit: float, log_every: int) -> dict:
    """What this machine's processes of the layout have measured, or why they failed."""
    run, command = runs / "trial", [sys.executable, *command_of(world), *QUIET]
    command += ["--output_dir", str(runs), "--log_every", str(log_every)]
    rows: dict[int, dict] = {}  # of metrics.jsonl, by step
    began, memory, asked = time.monotonic(), 0, False
    until = began + limit
    with contextlib.ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(layout.here)]
        started = []
        for number, file in enumerate(said):
            variables = launch_variables(layout, number, world.device.type == "cpu", os.environ)
            process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            started.append(stack.enter_context(process))  # at the end it is waited for,
            stack.callback(process.kill)  # once it is killed
        while any(process.poll() is None for process in started) and time.monotonic() < until:
            if world.device.type == "cpu":  # rank 0's rows have a GPU's memory
                with contextlib.suppress(psutil.Error):
                    memory = max([memory, *(psutil.Process(one.pid).memory_info().rss for one in started)])
            times = _read(run, rows) if world.is_main else []
            if not asked and len(times) >= FEWEST_ROWS and times[-1] - times[0] >= seconds:
                asked = True
                for process in started:
                    process.terminate()
            if any(process.poll() not in (None, 0, RESUMABLE) for process in started):
                until = min(until, time.monotonic() + 3.0)  # the others have lost a peer
            time.sleep(0.05)
        codes, texts = [process.poll() for process in started], []
        for file in said:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if wrong := [number for number, code in enumerate(codes) if code not in (0, RESUMABLE)]:
        # Who has refused or was killed knows the cause, the others have only lost a peer.
        first = min(wrong, key=lambda number: (codes[number] not in (2, -signal.SIGKILL), codes[number] is None))
        code = codes[first]
        cause = f"no end within {limit:.0f} s" if code is None else cause_of(code, texts[first])
        return {"failed": cause, "lost": code != 2, "late": code is None}
    _read(run, rows)
    return {"memory": memory} | (measured([*rows.values()], run, began) if world.is_main else {})


def measured(rows: Sequence[dict], run: Path, began: float) -> dict:
    """What the second half of a run's rows say, and its checkpoint."""
    if not rows:
        return {"failed": "it ended before it made a step", "lost": False}
    last = rows[len(rows) // 2 :]
    found = {
        "images_per_second": statistics.harmonic_mean([row["perf/images_per_second"] for row in last]),
        "data_wait": statistics.fmean(row["perf/data_wait"] for row in last),
        "samples": rows[-1]["samples"] // rows[-1]["step"],
        "start_s": rows[0]["read_at"] - began,
        "slowest": statistics.mode(row.get("perf/slowest_rank", 0) for row in last),
        "lag": statistics.fmean(row.get("perf/slowest_rank_lag", 0) for row in last),
    }
    if gpu := max(row.get("perf/gpu_memory_gb", 0) for row in rows):
        found["memory"] = int(gpu * 2**30)
    for path in Checkpoints(run / "checkpoints").paths()[:1]:
        found["checkpoint_bytes"] = sum(file.stat().st_size for file in path.iterdir())
        since = time.monotonic()
        verify(path).tensors()
        found["verify_s"] = time.monotonic() - since
    return found


def launch_variables(layout: Layout, local_rank: int, on_cpu: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process of the layout, as a launcher would make it.

    OMP_NUM_THREADS is left out unless a person has set it: the run then divides the cores itself.
    """
    found = {name: value for name, value in environ.items() if not name.startswith(_LAUNCHERS)}
    found |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    found |= {"CUDA_VISIBLE_DEVICES": "-1"} if on_cpu else {}
    if "LOCAL_RANK" in environ or "ACCELERATE_MIXED_PRECISION" in environ:  # a launcher has set its layout's threads
        found.pop("OMP_NUM_THREADS", None)
        with contextlib.suppress(psutil.Error):  # what a person has set stands in the launcher's own environment
            said = psutil.Process(os.getppid()).environ()
            found |= {name: said[name] for name in ("OMP_NUM_THREADS",) if name in said}
    if layout.processes > 1:
        rank, address = layout.node * layout.here + local_rank, {"MASTER_ADDR": layout.address}
        sizes = (rank, local_rank, layout.processes, layout.here, layout.node, layout.machines)
        world = Launch("doctor", *sizes).numbers | address | {"MASTER_PORT": layout.port}
        found |= {name: str(value) for name, value in world.items()}
    return found


def cause_of(code: int, output: str) -> str:
    """Why a process ended with `code`, in one line, from what it has printed."""
    if code < 0:
        out_of_memory = ": was it killed for want of memory?" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{out_of_memory}"
    lines = [line.strip() for line in output.splitlines() if line.strip()] or [f"exit code {code}"]
    named = [line for line in lines if re.match(r"[\w.]+: ", line)]
    return printable((named or lines)[-1])[:400]


def _read(run: Path, rows: dict[int, dict]) -> list[float]:
    """Add new whole rows of the run's metrics.jsonl with the time of reading. Returns these times."""
    for row in read_rows(run / "metrics.jsonl"):
        if "perf/images_per_second" in row:
            rows.setdefault(row["step"], row | {"read_at": time.monotonic()})
    return [row["read_at"] for row in rows.values()]
