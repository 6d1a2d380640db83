"""Rehearsal: the recipe itself, started for some seconds as the doctor was.

What it measures is read from its run folder. Each process starts one, with the variables of its own
launcher. Once there are enough rows in metrics.jsonl the run is asked to stop (SIGTERM), which
saves a checkpoint. The run folder is removed.
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from common.config import parse
from common.distributed import devices
from common.errors import make_printable
from common.launching.exit_codes import RESUMABLE
from common.run.folder import read_rows
from tools.doctor.table import Finding, judge
from tools.doctor.world import World
from tools.trained import RECIPES, load_recipe

GIB = 2**30
TRAIN_S = 60.0  # after which the run is asked to stop, with its start
SAVE_S = 15.0
MEASURED_S = 1.5  # of training, at least
MIN_ROWS = 4  # the first half is warm-up
MAX_LAG = 0.15  # share of the time that the slowest rank is behind the average one
MAX_WAIT = 0.2  # share of the time that a process waits for data
MAX_MEMORY = 0.9  # share of the memory that one should not exceed
NUM_CHECKPOINTS = 3  # two that are kept (--keep_checkpoints) and the one that is being written
# Without a recipe.
DIGITS = [str(RECIPES / "cls.py"), "--config", str(RECIPES / "presets/digits.yaml")]
_FLAGS = (
    "--resume never --tracker none --patience 0 --max_hours 0 --profile= --max_steps 1000000 "
    "--log_every 1 --eval_every 1000000 --checkpoint_every 1000000"
).split()
# Of a launcher that watches the doctor, and is no parent of the run.
_WATCHED = (
    "TORCHELASTIC_",
    "RECIPES_EXIT_FOLDER",
    "RECIPES_AT_LEAST",
    "SLURM_",
    "OMPI_",
    "PMI",
    "PET_",
)


def rehearse(world: World) -> list[Finding]:
    """Rehearse some steps of the recipe: rows about speed, memory and a checkpoint.

    Raises `Refused` for wrong flags.
    """
    options = world.options
    command = [str(options.recipe), *options.flags] if options.recipe else DIGITS
    recipe = Path(command[0])
    config = parse(load_recipe(recipe).Config, command[1:], recipe.name)
    with socket.create_server(("", 0)) as listener:
        port = world.exchange(listener.getsockname()[1])[0]
    run = Path(config.output_dir) / f"doctor-{port}"
    flags = [*_FLAGS, "--output_dir", config.output_dir, "--name", run.name]
    results = world.exchange(_train(world, [sys.executable, *command, *flags], run, port))
    failures = [result for result in results if "cause" in result]
    if failures:
        # Who has refused or was killed knows the cause; the others have lost a peer, or wait for
        # it.
        failure = min(failures, key=lambda failure: failure["code"] not in (2, -signal.SIGKILL))
        status = "not run" if failure["code"] in (None, 0, RESUMABLE) else "failed"
        measured = f"the recipe did not make {MIN_ROWS} steps within {TRAIN_S:.0f} s"
        return [Finding("rehearsal", status, measured, failure["cause"])]
    return judge_rehearsal({"memory": max(result["rss"] for result in results)} | results[0], world)


def judge_rehearsal(figures: dict, world: World) -> list[Finding]:
    """Rows for what a run measured, see `_measure`."""
    samples = figures["samples"]
    speed = figures["images_per_second"]
    waiting = figures["data_wait"]
    steps = f"{samples / speed:.3g} s per step of {samples} samples, {speed:,.0f} images/s"
    measured = (
        f"{steps}, {waiting:.0%} of the time waiting for data, {figures['start_s']:.2g} s to the "
        "first step"
    )
    way_out = (
        "raise --workers, store smaller images, decode fewer times (--cache), or take a machine "
        "with more cores"
    )
    findings = [judge("rehearsal: steps", measured, waiting > MAX_WAIT, way_out, figures=figures)]
    lag = figures["lag"]
    if lag >= MAX_LAG:
        measured = (
            f"is the slowest rank: it takes {lag:.0%} of the time longer than the others on average"
        )
        way_out = (
            "every step waits for it: look there for other processes (top, nvidia-smi), "
            "throttling, and a CPU quota"
        )
        place = f"rank {figures['slowest']} ({world.hosts[figures['slowest']]})"
        findings.append(Finding("rehearsal: slowest", "warning", measured, way_out, place))
    memory = figures["memory"] / GIB
    room = figures["room"] / GIB
    measured = f"{memory:.2f} GiB of {room:.3g} GiB per process at the peak"
    way_out = (
        "take a smaller --max_micro_batch_size, which does not change the result, or fewer "
        "processes per machine"
    )
    findings.append(judge("rehearsal: memory", measured, memory > MAX_MEMORY * room, way_out))
    size = figures["checkpoint_bytes"] / GIB
    free = figures["free"] / GIB
    measured = f"{1024 * size:,.1f} MiB; {free:,.1f} GiB are free"
    needed = NUM_CHECKPOINTS * size
    way_out = (
        f"a run keeps up to {NUM_CHECKPOINTS} of them: free {needed:.1f} GiB, or take another "
        "--output_dir"
    )
    if not size:
        way_out = "none was written: the recipe must call run.save"
    findings.append(
        judge("rehearsal: checkpoint", measured, not size or free < needed, way_out, "failed")
    )
    return findings


def build_environ(world: World, port: int) -> dict[str, str]:
    """Build the environment of this process's part of the run: its launcher's, with another port."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_WATCHED)}
    variables["PYTHONPATH"] = str(RECIPES.parent)
    if world.launch.world_size > 1:
        numbers = {
            name: str(number)
            for name, number in world.launch.variables.items()
            if number is not None
        }
        variables |= numbers | {
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
    return variables


def find_cause(code: int | None, output: str) -> str:
    """Why a process ended with `code`, or None if it did not end, in one line, from what it has printed."""
    if code is None:
        return f"no end within {TRAIN_S + SAVE_S:.0f} s"
    if code < 0:
        out_of_memory = ": was it killed for want of memory?" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{out_of_memory}"
    lines = re.findall(r"\S.*", output) or [f"exit code {code}"]
    named = [line for line in lines if re.match(r"[\w.]+: ", line)]
    return make_printable((named or lines)[-1])[:400]


def _train(world: World, command: list[str], run: Path, port: int) -> dict:
    """The figures of this process's part of the run, or the exit code and the cause of its failure."""
    is_main = world.rank == 0
    start = time.monotonic()
    first_row = start
    environ = build_environ(world, port)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            while process.poll() is None and time.monotonic() < start + TRAIN_S:
                time.sleep(0.1)
                num_rows = len(read_rows(run / "metrics.jsonl"))
                if num_rows == 0:
                    first_row = time.monotonic()
                elif is_main and num_rows >= MIN_ROWS and time.monotonic() > first_row + MEASURED_S:
                    break
            if is_main:
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SAVE_S)
            code = process.poll()
            rows = read_rows(run / "metrics.jsonl")
            if code not in (0, RESUMABLE) or (is_main and len(rows) < MIN_ROWS):
                output.seek(0)
                return {
                    "code": code,
                    "cause": find_cause(code, output.read().decode(errors="replace")),
                }
            unit = 1 if sys.platform == "darwin" else 1024
            figures = {"rss": unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}
            if is_main:
                figures |= _measure(world, run, rows) | {"start_s": first_row - start}
            return figures
        finally:
            process.kill()
            process.wait()
            if is_main:
                shutil.rmtree(run, ignore_errors=True)


def _measure(world: World, run: Path, rows: list[dict]) -> dict:
    """Figures from the second half of a run's rows, from its checkpoint, and the room for them."""
    last = rows[len(rows) // 2 :]
    figures = {
        "images_per_second": statistics.harmonic_mean(
            [row["perf/images_per_second"] for row in last]
        ),
        "data_wait": statistics.fmean(row["perf/data_wait"] for row in last),
        "samples": rows[0]["samples"] // rows[0]["step"],
        "slowest": statistics.mode(row.get("perf/slowest_rank", 0) for row in last),
        "lag": statistics.fmean(row.get("perf/slowest_rank_lag", 0) for row in last),
        "checkpoint_bytes": sum(file.stat().st_size for file in run.glob("checkpoints/*/*")),
        "free": shutil.disk_usage(run).free,
        "room": psutil.virtual_memory().total / world.launch.local_world_size,
    }
    if world.device.type == "cuda":
        figures["memory"] = int(max(row["perf/gpu_memory_gb"] for row in rows) * GIB)
        figures["room"] = devices.get_memory_info(world.device)[1]
    return figures
