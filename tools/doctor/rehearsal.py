"""Rehearsal: the recipe itself, started for some seconds as the doctor was; what it measures is read from its run folder.

Each process starts one, with the variables of its own launcher. Once there are enough rows in metrics.jsonl the run is asked to
stop (SIGTERM), which saves a checkpoint. The run folder is temporary.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch

from common.checkpoints import Checkpoints
from common.config import parse
from common.distributed import devices
from common.errors import printable
from common.launching.exit_codes import RESUMABLE
from common.run.folder import read_rows
from tools.doctor.finding import GIB, Finding, judged
from tools.doctor.world import World
from tools.trained import RECIPES, load_recipe

LIMIT_S = 150.0  # of the check
_ENDS_S = 75.0  # of the run, with its start
_MEASURED_S = 1.5
_FEWEST_ROWS = 4  # the first half is warm-up
_LAGS = 0.15  # share of the time that the slowest rank is behind the average one
_WAITS = 0.2  # share of the time that a process waits for data
_MOST_MEMORY = 0.9  # share of the memory that one should not exceed
_CHECKPOINTS = 3  # two that are kept (--keep_checkpoints) and the one that is being written
_QUIET = (
    "--name trial --resume never --tracker none --patience 0 --max_hours 0 --profile= --max_steps 1000000 --log_every 1 "
    "--eval_every 1000000 --checkpoint_every 1000000"
).split()
# Of a launcher that watches the doctor, and is no parent of the run.
_WATCHED = ("TORCHELASTIC_", "RECIPES_EXIT_FOLDER", "RECIPES_AT_LEAST", "SLURM_", "OMPI_", "PMI", "PET_")


def config_of(world: World):
    """The recipe's configuration, with its flags. Raises `Refused` for flags that it does not take."""
    recipe, *words = command_of(world)
    return parse(load_recipe(Path(recipe)).Config, words, Path(recipe).name)


def command_of(world: World) -> list[str]:
    """The recipe's file and its flags; without a recipe, the classifier on digits."""
    if world.recipe:
        return [str(world.recipe.resolve()), *world.words]
    return [str(RECIPES / "cls.py"), "--config", str(RECIPES / "presets/digits.yaml"), *world.words]


def rehearse(world: World) -> list[Finding]:
    """Rows for some steps of the recipe, with their memory and a checkpoint. A collective."""
    place = Path(config_of(world).output_dir).resolve()
    with contextlib.ExitStack() as stack:
        folder, port = "", 0
        if world.is_main:  # the disk of runs, if it can be written
            writable = str(place) if os.access(place, os.W_OK) else None
            draft = tempfile.TemporaryDirectory(prefix=".doctor-", dir=writable, ignore_cleanup_errors=True)
            folder = stack.enter_context(draft)
            with socket.create_server(("", 0)) as listener:
                port = listener.getsockname()[1]
        folder, port = world.exchange([folder, port])[0]
        of_ranks = world.exchange(_run(world, Path(folder), port), _ENDS_S + 60)
    failed = sorted((one for one in of_ranks if "failed" in one), key=lambda one: one["lost"])
    if failed and failed[0]["late"]:  # which a busy machine may be
        return [Finding("rehearsal", "not run", "the recipe did not come to its fourth step", failed[0]["failed"])]
    if failed:
        return [Finding("rehearsal", "failed", "the recipe made no step", failed[0]["failed"])]
    found = of_ranks[0] | {"memory": max(one["memory"] for one in of_ranks)}
    free = shutil.disk_usage(next(path for path in [place, *place.parents] if path.exists())).free
    on_gpu = world.device.type == "cuda"
    room = devices.memory(world.device)[1] if on_gpu else psutil.virtual_memory().total / world.local_world_size
    return rehearsed(found, world, room, free)


def rehearsed(found: dict, world: World, room: float, free: float) -> list[Finding]:
    """Rows for what a run found, with `room` bytes of memory per process and a disk with `free` bytes."""
    fewer = "raise --workers, store smaller images, decode fewer times (--cache), or take a machine with more cores"
    smaller = "take a smaller --max_micro_batch_size, which does not change the result, or fewer processes per machine"
    look = "every step waits for it: look there for other processes (top, nvidia-smi), throttling, and a CPU quota"
    text = (
        f"{found['samples'] / found['images_per_second']:.3g} s per step of {found['samples']} samples, "
        f"{found['images_per_second']:,.0f} images/s, {found['data_wait']:.0%} of the time waiting for data, "
        f"{found['start_s']:.2g} s to the first step"
    )
    rows = [judged("rehearsal: steps", text, (found["data_wait"] > _WAITS, "warning", fewer), figures=found)]
    if found["lag"] >= _LAGS:
        text = f"is the slowest rank: it takes {found['lag']:.0%} of the time longer than the others on average"
        rows.append(Finding("rehearsal: slowest", "warning", text, look, world.name(found["slowest"])))
    text = f"{found['memory'] / GIB:.2f} GiB of {room / GIB:.3g} GiB per process at the peak"
    rows.append(judged("rehearsal: memory", text, (found["memory"] > _MOST_MEMORY * room, "warning", smaller)))
    check, size = "rehearsal: checkpoint", found["checkpoint_bytes"]
    if not size:
        return [*rows, Finding(check, "failed", "none was written", "see the recipe: it must call run.save")]
    needed = _CHECKPOINTS * size
    way_out = f"a run keeps up to {_CHECKPOINTS} of them: free {needed / GIB:.1f} GiB, or take another --output_dir"
    text = f"{size / 2**20:,.1f} MiB; {free / GIB:,.1f} GiB are free"
    return [*rows, judged(check, text, (free < needed, "failed", way_out))]


def _run(world: World, runs: Path, port: int) -> dict:
    """The measurements of this process's part of the run, or why it failed."""
    rows: dict[int, dict] = {}  # of metrics.jsonl, by step
    command = [sys.executable, *command_of(world), *_QUIET, "--output_dir", str(runs)]
    began, memory, asked = time.monotonic(), 0, False
    until = began + _ENDS_S
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile())
        variables = variables_of(world, port, os.environ)
        process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        stack.enter_context(process)  # at the end it is waited for,
        stack.callback(process.kill)  # once it is killed
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(psutil.Error):
                memory = max(memory, psutil.Process(process.pid).memory_info().rss)
            times = _read(runs / "trial", rows) if world.is_main else []
            if not asked and len(times) >= _FEWEST_ROWS and times[-1] - times[0] >= _MEASURED_S:
                asked = True
                process.terminate()
            if world.store is not None and world.store.check(["rehearsal/failed"]):
                until = min(until, time.monotonic() + 3.0)  # this one has lost a peer
            time.sleep(0.1)
        code = process.poll()
        if code not in (0, RESUMABLE) and world.store is not None:
            world.store.set("rehearsal/failed", "")
        said.seek(0)
        text = said.read().decode(errors="replace")
    if code not in (0, RESUMABLE):
        cause = f"no end within {_ENDS_S:.0f} s" if code is None else cause_of(code, text)
        # Who has refused or was killed knows the cause, the others have only lost a peer.
        return {"failed": cause, "lost": code not in (2, -signal.SIGKILL), "late": code is None}
    if not world.is_main:
        return {"memory": memory}
    _read(runs / "trial", rows)
    return {"memory": memory} | measured([*rows.values()], runs / "trial", began)


def measured(rows: Sequence[dict], run: Path, began: float) -> dict:
    """Figures from the second half of a run's rows, and from its checkpoint."""
    if not rows:
        return {"failed": "it ended before it made a step", "lost": False, "late": False}
    last = rows[len(rows) // 2 :]
    newest = Checkpoints(run / "checkpoints").paths()[:1]
    found = {
        "images_per_second": statistics.harmonic_mean([row["perf/images_per_second"] for row in last]),
        "data_wait": statistics.fmean(row["perf/data_wait"] for row in last),
        "samples": rows[-1]["samples"] // rows[-1]["step"],
        "start_s": rows[0]["read_at"] - began,
        "slowest": statistics.mode(row.get("perf/slowest_rank", 0) for row in last),
        "lag": statistics.fmean(row.get("perf/slowest_rank_lag", 0) for row in last),
        "checkpoint_bytes": sum(file.stat().st_size for path in newest for file in path.iterdir()),
    }
    if gpu := max(row.get("perf/gpu_memory_gb", 0) for row in rows):
        found["memory"] = int(gpu * 2**30)
    return found


def variables_of(world: World, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process's part of the run: its launcher's, with another port on which they meet."""
    found = {name: value for name, value in environ.items() if not name.startswith(_WATCHED)}
    found |= {"PYTHONPATH": str(RECIPES.parent), "PYTHONUNBUFFERED": "1"}
    if world.device.type == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = "-1"
    if world.world_size > 1:
        found |= {name: str(number) for name, number in world.launch.numbers.items() if number is not None}
        found |= {"MASTER_ADDR": environ.get("MASTER_ADDR", "127.0.0.1"), "MASTER_PORT": str(port)}
        found["OMP_NUM_THREADS"] = str(torch.get_num_threads())
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
