"""GPUs: name, memory and who uses it, peer access, clocks under load and what throttles them, ECC, MIG and the PCIe link."""

import csv
import io
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch

from tools.doctor.finding import Finding
from tools.doctor.world import World

GIB = 2**30
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
_SIDE = 1024  # of the matrices that it multiplies meanwhile
_FIELDS = [
    "index",
    "uuid",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
    "pcie.link.width.current",
    "pcie.link.width.max",
]


def gpus(world: World) -> list[Finding]:
    """Rows about the GPU of this process; on a launch for CPU one row."""
    if world.device.type != "cuda":
        return _unseen() or [Finding("gpu", "ok", "not used: the launch is for the CPU")]
    here = torch.cuda.get_device_properties(world.device)
    taken = query(["gpu_uuid", "pid", "process_name", "used_memory"], "compute-apps")
    free, total = torch.cuda.mem_get_info(world.device)
    state = _state_under_load(world, str(getattr(here, "uuid", "")))
    figures = {"name": here.name, "total": total, "free": free, "state": state}
    rows = [Finding("gpu", "ok", f"{here.name}, {_gib(free)} of {_gib(total)} GiB free", figures=figures)]
    rows += _neighbours(taken, state.get("uuid", ""), total)
    if state:
        rows.append(_clocks(state))
        rows += _health(state, world)
    if world.is_local_main and torch.cuda.device_count() > 1:
        rows.append(_peers(world))
    return rows


def same_gpus(world: World) -> list[Finding]:
    """One row if the ranks have different GPUs: the slowest decides."""
    if world.device.type != "cuda":
        return []
    here = torch.cuda.get_device_properties(world.device)
    of_ranks = world.exchange([here.name, round(here.total_memory / GIB)])
    kinds = Counter(f"{name} {gib} GiB" for name, gib in of_ranks)
    if len(kinds) == 1 or not world.is_main:
        return []
    usual = kinds.most_common(1)[0][0]
    odd = [rank for rank, (name, gib) in enumerate(of_ranks) if f"{name} {gib} GiB" != usual]
    measured = f"{', '.join(dict.fromkeys(' '.join([of_ranks[r][0], str(of_ranks[r][1]), 'GiB']) for r in odd))}"
    way_out = f"the others have {usual}: every step waits for the slowest, and the smallest memory sets the micro-batch"
    return [Finding("gpu: kinds", "warning", measured, way_out, world.places(odd), {"kinds": dict(kinds)})]


def _unseen() -> list[Finding]:
    """GPUs that the driver shows, but torch does not; unless the launch hides them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None or os.environ.get("ACCELERATE_USE_CPU"):
        return []
    if torch.cuda.is_available() or not (shown := query(["name", "driver_version"])):
        return []
    built = (
        f"torch {torch.__version__} for CUDA {torch.version.cuda}" if torch.version.cuda else "torch for the CPU only"
    )
    measured = f"nvidia-smi shows {len(shown)} x {shown[0]['name']}, torch none"
    way_out = f"{built}, driver {shown[0]['driver_version']}: install torch for this driver's CUDA, or a newer driver"
    return [Finding("gpu", "failed", measured, way_out)]


def _state_under_load(world: World, uuid: str) -> dict[str, str]:
    """What nvidia-smi says about this GPU while it computes: an idle GPU clocks down. Empty without nvidia-smi."""
    matrix = torch.ones(_SIDE, _SIDE, device=world.device)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(query, _FIELDS)
        while not asked.done():
            for _ in range(20):
                torch.mm(matrix, matrix)
            torch.cuda.synchronize(world.device)
        rows = asked.result()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    place = visible[world.device.index] if len(visible) > (world.device.index or 0) else ""
    names = {f"GPU-{uuid}", uuid, place if place else str(world.device.index)} - {""}
    return next((row for row in rows if names & {row["uuid"], row["index"]}), {})


def _neighbours(taken: list[dict[str, str]], uuid: str, total: int) -> list[Finding]:
    """A row if other processes hold memory of this GPU."""
    others = [row for row in taken if row["gpu_uuid"] == uuid and row["pid"] != str(os.getpid()) and uuid]
    held = sum(number(row["used_memory"]) or 0 for row in others) * 2**20
    if held < TAKEN * total:
        return []
    named = ", ".join(f"process {row['pid']} ({_process(row)})" for row in others[:3])
    way_out = "end it, or leave this GPU out with CUDA_VISIBLE_DEVICES"
    measured = f"{named} holds {_gib(held)} of {_gib(total)} GiB"
    return [Finding("gpu: memory", "warning", measured, way_out, figures={"held": held})]


def _clocks(state: dict[str, str]) -> Finding:
    reasons = int(number(state["clocks_throttle_reasons.active"]) or 0)
    clock, highest = number(state["clocks.sm"]), number(state["clocks.max.sm"])
    hot = f", {state['temperature.gpu']} C, {state['power.draw']} of {state['power.limit']} W"
    measured = f"{state['clocks.sm']} of {state['clocks.max.sm']} MHz under load{hot}"
    named = [text for bit, text in THROTTLED.items() if reasons & bit]
    figures = {"reasons": reasons, "clock": clock, "highest": highest}
    if named:
        way_out = f"{', '.join(named)}: check cooling and power supply; this GPU slows down all others"
        return Finding("gpu: clocks", "warning", measured, way_out, figures=figures)
    if clock and highest and clock < SLOW_CLOCK * highest:
        cause = "a power cap" if reasons & POWER_CAP else "locked clocks (nvidia-smi -rgc undoes them)"
        return Finding("gpu: clocks", "warning", measured, f"{cause} holds it below {SLOW_CLOCK:.0%}", figures=figures)
    return Finding("gpu: clocks", "ok", measured, figures=figures)


def _health(state: dict[str, str], world: World) -> list[Finding]:
    rows = []
    if errors := number(state["ecc.errors.uncorrected.volatile.total"]):
        way_out = "its memory returns wrong values: drain this machine, reset the GPU, replace it if they come back"
        rows.append(Finding("gpu: ECC", "failed", f"{errors:.0f} uncorrected errors", way_out))
    if state["mig.mode.current"] == "Enabled" and world.world_size > 1:
        way_out = "NCCL can't join slices of a GPU: train in one process, or turn it off with nvidia-smi -mig 0"
        rows.append(Finding("gpu: MIG", "failed", "enabled", way_out))
    width, widest = number(state["pcie.link.width.current"]), number(state["pcie.link.width.max"])
    if width and widest and width < widest:
        way_out = "images and, without NVLink, gradients travel over it: reseat the card or check the slot"
        rows.append(Finding("gpu: PCIe", "warning", f"{width:.0f} of {widest:.0f} lanes", way_out))
    return rows


def _peers(world: World) -> Finding:
    """Which GPUs of this machine reach each other's memory."""
    count = min(torch.cuda.device_count(), world.local_world_size)
    matrix = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    apart = [f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not (matrix[a][b] and matrix[b][a])]
    figures = {"matrix": matrix}
    if apart:
        shown = ", ".join(apart[:6]) + (" ..." if len(apart) > 6 else "")
        way_out = "gradients take the way over host memory: disable ACS and IOMMU in the BIOS, see nvidia-smi topo -m"
        return Finding("gpu: peer access", "warning", f"not between {shown} of {count}", way_out, figures=figures)
    return Finding("gpu: peer access", "ok", f"between all {count} GPUs", figures=figures)


def _process(row: dict[str, str]) -> str:
    try:
        process = psutil.Process(int(row["pid"]))
        return f"{process.name()} of {process.username()}"
    except (psutil.Error, ValueError):  # such as one of another container
        return row["process_name"]


def _gib(count: float) -> str:
    return f"{count / GIB:.1f}"


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
        raise TimeoutError(
            f"nvidia-smi does not answer within {PATIENCE_S:.0f} s: a GPU may be lost, see dmesg"
        ) from None
    if done.returncode:
        return []
    rows = csv.reader(io.StringIO(done.stdout), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def number(text: str) -> float | None:
    """A figure of nvidia-smi; None for "[N/A]" and its like."""
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None
