"""GPUs: memory and who uses it, clocks under load, and errors of their memory."""

import csv
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from common.distributed import devices
from tools.doctor.finding import GIB, Finding, judged
from tools.doctor.world import World

PATIENCE_S = 8.0  # a healthy nvidia-smi takes 0.1 to 2 s; one that hangs is a sign of a lost GPU
TAKEN = 0.1  # of a GPU's memory by other processes: the micro-batch that fits gets smaller
SLOW_CLOCK = 0.7  # of the highest clock, under load; a power limit alone costs up to 30 %
# Bits of clocks_throttle_reasons.active that mean trouble (NVML, nvmlClocksEventReasons); a power cap (4) is usual under load.
THROTTLED = {
    0x8: "hardware slowdown (power or temperature)",
    0x20: "too hot (driver's limit)",
    0x40: "too hot (hardware's limit)",
    0x80: "power brake (power supply)",
}
POWER_CAP = 0x4
_FIELDS = (
    "index uuid clocks.sm clocks.max.sm clocks_throttle_reasons.active temperature.gpu power.draw power.limit "
    "ecc.errors.uncorrected.volatile.total"
).split()


def gpus(world: World) -> list[Finding]:
    """Rows about the GPU of this process; on a launch for CPU one row."""
    if world.device.type != "cuda":
        return [_unseen()]
    here = devices.properties(world.device)
    taken = query(["gpu_uuid", "pid", "process_name", "used_memory"], "compute-apps")
    free, total = devices.memory(world.device)
    state = _state_under_load(world, str(getattr(here, "uuid", "")))
    rows = [Finding("gpu", "ok", f"{here.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")]
    if state:
        others = [row for row in taken if row["gpu_uuid"] == state["uuid"] and row["pid"] != str(os.getpid())]
        rows += _state(state, others, total)
    return rows


def _unseen() -> Finding:
    """The row of a launch for the CPU, which may show GPUs that torch does not see."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None or os.environ.get("ACCELERATE_USE_CPU")
    if is_hidden or devices.kind() == "cuda" or not (shown := query(["name", "driver_version"])):
        return Finding("gpu", "ok", "not used: the launch is for the CPU")
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU only"
    measured = f"nvidia-smi shows {len(shown)} x {shown[0]['name']}, torch none"
    driver = f"driver {shown[0]['driver_version']}: install torch for this driver's CUDA, or a newer driver"
    return Finding("gpu", "failed", measured, f"torch {torch.__version__} {built}, {driver}")


def _state_under_load(world: World, uuid: str) -> dict[str, str]:
    """What nvidia-smi says about this GPU while it computes, as an idle one clocks down; empty without it."""
    matrix = torch.ones(1024, 1024, device=world.device)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(query, _FIELDS)
        while not asked.done():
            for _ in range(20):
                torch.mm(matrix, matrix)
            torch.accelerator.synchronize(world.device)
        rows = asked.result()
    index = world.device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    place = visible[index] if len(visible) > index else ""
    names = {f"GPU-{uuid}", uuid, place or str(index)} - {""}
    return next((row for row in rows if names & {row["uuid"], row["index"]}), {})


def _state(state: dict[str, str], others: list[dict[str, str]], total: int) -> list[Finding]:
    """Rows for clocks, and where they are a trouble for neighbours and errors."""
    held = sum(_figure(row["used_memory"]) for row in others) * 2**20
    named = ", ".join(f"process {row['pid']} ({row['process_name']})" for row in others[:3])
    taken = f"{named} holds {held / GIB:.1f} of {total / GIB:.1f} GiB"
    leave = "end it, or leave this GPU out with CUDA_VISIBLE_DEVICES"
    errors = _figure(state["ecc.errors.uncorrected.volatile.total"])
    drain = "its memory returns wrong values: drain this machine, reset the GPU, replace it if they come back"
    rows = [
        judged("gpu: memory", taken, (held >= TAKEN * total, "warning", leave)),
        judged("gpu: ECC", f"{errors:.0f} uncorrected errors", (errors > 0, "failed", drain)),
    ]
    clock, highest = _figure(state["clocks.sm"]), _figure(state["clocks.max.sm"])
    reasons = int(_figure(state["clocks_throttle_reasons.active"]))
    throttled = ", ".join(text for bit, text in THROTTLED.items() if reasons & bit)
    cause = "a power cap" if reasons & POWER_CAP else "locked clocks (nvidia-smi -rgc undoes them)"
    hot = f"{state['temperature.gpu']} C, {state['power.draw']} of {state['power.limit']} W"
    clocks = judged(
        "gpu: clocks",
        f"{state['clocks.sm']} of {state['clocks.max.sm']} MHz under load, {hot}",
        (throttled != "", "warning", f"{throttled}: check cooling and power supply; this GPU slows down all others"),
        (0 < clock < SLOW_CLOCK * highest, "warning", f"{cause} holds it below {SLOW_CLOCK:.0%}"),
    )
    return [*(row for row in rows if row.status != "ok"), clocks]


def query(fields: Sequence[str], what: str = "gpu") -> list[dict[str, str]]:
    """`nvidia-smi --query-<what>=<fields>`: a dict per row. Empty if there is no nvidia-smi, or it refuses the fields.

    Raises TimeoutError if it does not answer.
    """
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"nvidia-smi is silent for {PATIENCE_S:.0f} s: a GPU may be lost, see dmesg") from None
    rows: Iterable[list[str]] = [] if done.returncode else csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _figure(text: str) -> float:
    """A figure of nvidia-smi; 0 for "[N/A]" and its like."""
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return 0.0
