"""Limits of this machine or container: cores, memory, open files, locked memory and /dev/shm."""

import os
import re
import resource
from pathlib import Path

import psutil
import torch

from common.distributed.environment import cores
from tools.doctor.finding import GIB, Finding, judged
from tools.doctor.world import World

MEMORY_PER_PROCESS = 2 * GIB  # Python and torch take 0.5 to 1 GiB, its data workers as much again
FEW_FILES = 1024  # pipes of data workers, sockets to other ranks, files of the data set; a small run needs some 60
NO_SHM = 4 * 2**20  # locks of data workers take 4 KiB each, some 10 of them a worker
SMALL_SHM = GIB  # NCCL joins the GPUs of a machine there; Docker's default is 64 MiB
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")


def limits(world: World) -> list[Finding]:
    """Rows about this machine."""
    return [_cores(world), _memory(world), *_ulimits(world), _shm(world)]


def _cores(world: World) -> Finding:
    usable, present = cores(), os.cpu_count() or 1
    threads, processes = torch.get_num_threads(), world.local_world_size
    measured = f"{usable} CPU cores for {processes} x {threads} threads"
    if usable < present:
        measured += f" (of {present} cores; a CPU quota or affinity withholds the others)"
    fewer = "processes share a core: start fewer, or allot more cores to the job or container"
    export = f"more threads than cores slow each other down: export OMP_NUM_THREADS={max(1, usable // processes)}"
    return judged(
        "limits: cores",
        measured,
        (usable < processes, "warning", fewer),
        (processes * threads > usable, "warning", export),
    )


def _memory(world: World) -> Finding:
    machine = psutil.virtual_memory()
    total, free, holder = machine.total, machine.available, "this machine"
    allotted = _number("memory.max")
    if allotted is not None and allotted < total:
        # Pages of files that were read count as used, but are given back.
        cached = re.search(r"^inactive_file (\d+)", _content("memory.stat"), re.MULTILINE)
        used = (_number("memory.current") or 0) - int(cached[1] if cached else 0)
        total, free, holder = allotted, min(free, allotted - used), "the container"
    measured = f"{free / GIB:.1f} of {total / GIB:.1f} GiB memory free ({holder})"
    count, needed = world.local_world_size, world.local_world_size * MEMORY_PER_PROCESS
    way_out = f"{count} processes take about {needed / GIB:.0f} GiB: the kernel may kill them; free memory"
    return judged("limits: memory", measured, (free < needed, "warning", way_out))


def _ulimits(world: World) -> list[Finding]:
    """Rows for open files and, with InfiniBand, locked memory; -1 is no limit."""
    files, locked = (resource.getrlimit(what)[0] for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    few = max(FEW_FILES, 8 * world.world_size)
    more = f"many data workers or ranks need more: ulimit -n {max(4096, few)}"
    rows = [judged("limits: open files", f"{files} (-1: no limit)", (0 <= files < few, "warning", more))]
    if locked >= 0 and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        unlock = "InfiniBand locks the memory that it sends: ulimit -l unlimited (Docker: --ulimit memlock=-1)"
        rows.append(Finding("limits: locked memory", "failed", f"{locked / 2**20:.0f} MiB", unlock))
    return rows


def _shm(world: World) -> Finding:
    enlarge = "docker run --shm-size 8g, or mount -o remount,rw,size=8G /dev/shm"
    locks = f"data workers keep their locks there: {enlarge}, or --workers 0"
    if not os.access(_SHM, os.W_OK):
        return Finding("limits: /dev/shm", "failed", "read-only" if _SHM.is_dir() else "absent", locks)
    disk = os.statvfs(_SHM)
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    has_several = world.device.type == "cuda" and world.local_world_size > 1
    return judged(
        "limits: /dev/shm",
        f"{free / 2**20:,.0f} of {total / 2**20:,.0f} MiB free",
        (free < NO_SHM, "failed", locks),
        (has_several and free < SMALL_SHM, "warning", f"NCCL joins the GPUs of a machine there: {enlarge}"),
    )


def _content(name: str) -> str:
    """A file of the control group; "" if there is none."""
    return (_CGROUP / name).read_text() if (_CGROUP / name).is_file() else ""


def _number(name: str) -> int | None:
    """The number in a file of the control group; None for "max" or if there is no such file."""
    text = _content(name).strip()
    return int(text) if text.isdigit() else None
