"""Limits: CPU cores and threads, other work, memory, ulimits and /dev/shm of this machine or container."""

import os
import resource
from pathlib import Path

import psutil
import torch

from common.distributed.environment import cores
from tools.doctor.finding import Finding, Status
from tools.doctor.world import World

GIB = 2**30
MEMORY_PER_PROCESS = 2 * GIB  # Python and torch take 0.5 to 1 GiB, its data workers as much again
FEW_FILES = 1024  # pipes of data workers, sockets to other ranks, files of the data set; a small run needs some 60
NO_SHM = 4 * 2**20  # locks of data workers take 4 KiB each, some 10 of them a worker
SMALL_SHM = GIB  # NCCL joins the GPUs of a machine there; Docker's default is 64 MiB
BUSY = 0.25  # share of the cores that other programs use
THREADS_PER_PROCESS = 300  # torch's, gloo's and W&B's threads, and data workers with theirs
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")


def limits(world: World) -> list[Finding]:
    """Rows about this machine."""
    return [_cores(world), _memory(world), *_ulimits(world), _shm(world)]


def other_work(world: World) -> list[Finding]:
    """A row for each machine on which other programs keep the cores busy, while the ranks wait here."""
    world.exchange(None)
    of_ranks = world.exchange(used_by_others() if world.is_local_main else None)
    shares = {world.hosts[rank] if world.hosts else "all": one for rank, one in enumerate(of_ranks) if one is not None}
    if not world.is_main:
        return []
    way_out = "what is measured here, and each step, is slower by that: end them, or take another machine"
    name = "limits: other work"
    rows = [
        Finding(name, "warning", said_busy(share), way_out, host, {"share": share})
        for host, share in shares.items()
        if share > BUSY
    ]
    return rows or [Finding(name, "ok", f"other programs use at most {max(shares.values()):.0%} of the cores")]


def used_by_others() -> float:
    """The share of this process's cores that is in use now, while it waits."""
    shares = psutil.cpu_percent(0.5, percpu=True)
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(shares))
    return sum(shares[core] for core in mine if core < len(shares)) / len(mine) / 100


def said_busy(share: float) -> str:
    """In words: what other programs use."""
    return f"other programs use {share:.0%} of the cores (load {os.getloadavg()[0]:.0f})"


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
        way_out = f"many data workers or ranks need more: ulimit -n {max(4096, few)}"
        rows.append(Finding("limits: open files", "warning", f"{files}, less than {few}", way_out, figures=figures))
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


def _shm(world: World) -> Finding:
    way_out = "docker run --shm-size 8g, or mount -o remount,rw,size=8G /dev/shm"
    if not _SHM.is_dir() or not os.access(_SHM, os.W_OK):
        measured = "read-only" if _SHM.is_dir() else "absent"
        return Finding("limits: /dev/shm", "failed", measured, f"data workers keep their locks there: {way_out}")
    disk = os.statvfs(_SHM)
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    measured, figures = f"{_size(free)} of {_size(total)} free", {"total": total, "free": free}
    if free < NO_SHM:
        way_out = f"data workers keep their locks there: {way_out}, or --workers 0"
        return Finding("limits: /dev/shm", "failed", measured, way_out, figures=figures)
    if free < SMALL_SHM and world.device.type == "cuda" and world.local_world_size > 1:
        way_out = f"NCCL joins the GPUs of a machine there: {way_out}"
        return Finding("limits: /dev/shm", "warning", measured, way_out, figures=figures)
    return Finding("limits: /dev/shm", "ok", measured, figures=figures)


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
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.3g} MiB"


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
