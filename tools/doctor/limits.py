"""Limits: CPU cores and threads, memory, ulimits and /dev/shm of this machine or container."""

import os
import resource
import time
from pathlib import Path

import psutil
import torch

from common.distributed.environment import cores
from tools.doctor.finding import Finding, Status
from tools.doctor.world import World

GIB = 2**30
MEMORY_PER_PROCESS = 2 * GIB  # Python and torch take 0.5 to 1 GiB, its data workers as much again
FEW_FILES, NO_FILES = 1024, 256  # pipes of data workers, sockets to other ranks, files of the data set
SMALL_SHM, NO_SHM = GIB, 64 * 2**20  # Docker's default is 64 MiB, which a few batches of photographs fill
THREADS_PER_PROCESS = 300  # torch's, gloo's and W&B's threads, and data workers with theirs
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")


def limits(world: World) -> list[Finding]:
    """Rows about this machine."""
    return [_cores(world), _memory(world), *_ulimits(world), _shm(), *_end_of_job()]


def _cores(world: World) -> Finding:
    usable, present = cores(), os.cpu_count() or 1
    threads, processes = torch.get_num_threads(), world.local_world_size
    measured = (
        f"{usable} CPU cores, {processes} process{'es' * (processes > 1)} with {threads} thread{'s' * (threads > 1)}"
    )
    figures = {"cores": usable, "present": present, "processes": processes, "threads": threads}
    if usable < present:
        measured += f" (of {present} cores; a CPU quota or affinity withholds the others)"
    status: Status = "ok"
    way_out = ""
    if usable < processes:
        status, way_out = "warning", "processes share a core: start fewer, or allot more cores to the job or container"
    elif processes * threads > usable:
        status = "warning"
        way_out = f"more threads than cores slow each other down: export OMP_NUM_THREADS={max(1, usable // processes)}"
    return Finding("limits: cores", status, measured, way_out, figures=figures)


def _memory(world: World) -> Finding:
    machine = psutil.virtual_memory()
    total, free, holder = machine.total, machine.available, "this machine"
    allotted, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if allotted is not None and allotted < total:
        # Pages of files that were read count as used, but are given back.
        cached = _fields(_CGROUP / "memory.stat").get("inactive_file", 0)
        total, free, holder = allotted, min(free, allotted - (used or 0) + cached), "the container"
    measured = f"{free / GIB:.1f} of {total / GIB:.1f} GiB memory free ({holder})"
    needed = world.local_world_size * MEMORY_PER_PROCESS
    short = free < needed
    way_out = (
        f"{world.local_world_size} processes take about {needed / GIB:.0f} GiB: the kernel may kill them; free memory"
    )
    return Finding(
        "limits: memory",
        "warning" if short else "ok",
        measured,
        way_out if short else "",
        figures={"total": total, "free": free},
    )


def _ulimits(world: World) -> list[Finding]:
    rows = []
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(FEW_FILES, 8 * world.world_size)
    shown, figures = [f"{_amount(files)} open files"], {"open files": files}
    if _less(files, few):
        status: Status = "failed" if files < NO_FILES else "warning"
        way_out = f"data workers and connections need more: ulimit -n {max(4096, few)}"
        rows.append(Finding("limits: open files", status, f"{files}, less than {few}", way_out, figures=figures))
    processes = _free_processes()
    figures["processes"] = processes
    shown.append(f"{_amount(processes)} more processes")
    if _less(processes, THREADS_PER_PROCESS * world.local_world_size):
        needed = THREADS_PER_PROCESS * world.local_world_size
        way_out = "threads count too: raise ulimit -u, or pids.max of the container"
        measured = f"{processes} more threads or processes, less than {needed}"
        rows.append(Finding("limits: processes", "warning", measured, way_out, figures=figures))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    figures["locked memory"] = locked
    shown.append(f"{'unlimited' if locked < 0 else f'{locked / 2**20:.0f} MiB'} locked memory")
    if locked >= 0 and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        way_out = "InfiniBand locks the memory that it sends: ulimit -l unlimited (Docker: --ulimit memlock=-1)"
        rows.append(Finding("limits: locked memory", "failed", f"{locked / 2**20:.0f} MiB", way_out, figures=figures))
    for what, name, effect in (
        (resource.RLIMIT_CPU, "CPU seconds", "a process is killed after them: ulimit -t unlimited"),
        (resource.RLIMIT_FSIZE, "bytes in a file", "a larger checkpoint can't be written: ulimit -f unlimited"),
        (resource.RLIMIT_AS, "bytes of address space", "GPUs and data workers need much: ulimit -v unlimited"),
    ):
        if (limit := resource.getrlimit(what)[0]) >= 0:
            rows.append(Finding(f"limits: {name}", "warning", f"{limit}", effect, figures={name: limit}))
    return rows or [Finding("limits: ulimits", "ok", ", ".join(shown), figures=figures)]


def _shm() -> Finding:
    if not _SHM.is_dir():
        return Finding("limits: /dev/shm", "warning", "absent", "data workers hand over batches there: mount a tmpfs")
    disk = os.statvfs(_SHM)
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    measured = f"{_size(free)} of {_size(total)} free"
    status: Status = "failed" if free <= NO_SHM else "warning" if free < SMALL_SHM else "ok"
    way_out = (
        "data workers hand over batches there and die of a bus error when it is full: docker run --shm-size 8g, "
        "mount -o remount,size=8G /dev/shm, or --workers 0"
    )
    return Finding(
        "limits: /dev/shm", status, measured, way_out if status != "ok" else "", figures={"total": total, "free": free}
    )


def _end_of_job() -> list[Finding]:
    """The time that SLURM leaves this job, if it says so."""
    if "SLURM_JOB_END_TIME" not in os.environ:
        return []
    hours = (int(os.environ["SLURM_JOB_END_TIME"]) - time.time()) / 3600
    return [Finding("limits: time", "ok", f"SLURM ends the job in {hours:.1f} h", figures={"hours": hours})]


def _free_processes() -> int:
    """How many more threads this user may start; -1 for no limit."""
    left = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft >= 0 and os.geteuid():  # root is not limited
        mine = [each for each in psutil.process_iter(["uids", "num_threads"]) if each.info["uids"]]
        left.append(soft - sum(each.info["num_threads"] or 1 for each in mine if each.info["uids"].real == os.getuid()))
    most, now = _number(_CGROUP / "pids.max"), _number(_CGROUP / "pids.current")
    if most is not None:
        left.append(most - (now or 0))
    return max(0, min(left)) if left else -1


def _less(value: int, least: int) -> bool:
    return 0 <= value < least


def _amount(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _number(file: Path) -> int | None:
    """The number in a file of the control group; None for "max" or if there is no such file."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _fields(file: Path) -> dict[str, int]:
    try:
        return {name: int(value) for name, value in (line.split() for line in file.read_text().splitlines())}
    except (OSError, ValueError):
        return {}
