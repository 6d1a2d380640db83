"""GPUs: whether torch sees them, and how much of their memory is free."""

import csv
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence

import torch

from common.distributed import devices
from tools.doctor.finding import GIB, Finding, judged
from tools.doctor.world import World

PATIENCE_S = 8.0  # a healthy nvidia-smi takes 0.1 to 2 s; one that hangs is a sign of a lost GPU
FREE = 0.9  # of a GPU's memory: if other processes hold more, the micro-batch that fits gets smaller


def gpus(world: World) -> list[Finding]:
    """A row about the GPU of this process, or about a launch for the CPU."""
    if world.device.type != "cuda":
        return [_unseen()]
    free, total = devices.memory(world.device)
    measured = f"{devices.properties(world.device).name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    leave = "other processes hold the rest (nvidia-smi): end them, or leave this GPU out with CUDA_VISIBLE_DEVICES"
    return [judged("gpu", measured, (free < FREE * total, "warning", leave))]


def _unseen() -> Finding:
    """The row of a launch for the CPU, which may show GPUs that torch does not see."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None or os.environ.get("ACCELERATE_USE_CPU")
    if is_hidden or devices.kind() == "cuda" or not (shown := query(["name", "driver_version"])):
        return Finding("gpu", "ok", "not used: the launch is for the CPU")
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU only"
    measured = f"nvidia-smi shows {len(shown)} x {shown[0]['name']}, torch none"
    driver = f"driver {shown[0]['driver_version']}: install torch for this driver's CUDA, or a newer driver"
    return Finding("gpu", "failed", measured, f"torch {torch.__version__} {built}, {driver}")


def query(fields: Sequence[str]) -> list[dict[str, str]]:
    """`nvidia-smi --query-gpu=<fields>`: a dict per GPU. Empty if there is no nvidia-smi, or it refuses the fields.

    Raises TimeoutError if it does not answer.
    """
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"nvidia-smi is silent for {PATIENCE_S:.0f} s: a GPU may be lost, see dmesg") from None
    rows: Iterable[list[str]] = [] if done.returncode else csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
