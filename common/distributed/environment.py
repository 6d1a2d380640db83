"""Environment of a run: versions, commit, command, layout, devices and CPU cores."""

import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from common.config import recipe_source
from common.distributed import devices
from common.distributed.collectives import gather_objects, local_world_size, world_size

_PACKAGES = (
    "accelerate",
    "datasets",
    "numpy",
    "pillow",
    "safetensors",
    "timm",
    "torch",
    "torchvision",
    "wandb",
)
_LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun")
_CGROUP = Path("/sys/fs/cgroup")  # of a container
_ALLOTMENT = _CGROUP / "cpu.max"  # CPU time quota and period, in microseconds


def describe_environment(precision: str, device: torch.device, config: object = None) -> dict:
    """The content of environment.json. A collective.

    It has versions, commit, command, layout and devices of this start.
    """
    recipe = recipe_source.find_recipe_file(config)
    if device.type == "cpu":
        device_name = platform.processor() or platform.machine()
    else:
        device_name = devices.get_device_name(device)
    rank_devices = gather_objects((device_name, platform.node()))
    return {
        "command": shlex.join(sys.argv),
        "launch": _get_launch_command(),
        "recipe": str(recipe.resolve()) if recipe else None,
        "source": recipe_source.hash_files(recipe_source.read_source(config)),
        "commit": _get_commit(recipe.resolve()) if recipe else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": get_package_versions(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "world_size": world_size(),
        "local_world_size": local_world_size(),
        "precision": precision,
        "threads": torch.get_num_threads(),
        "ranks": [f"{name} on {host}" for name, host in rank_devices],
    }


def count_cores() -> int:
    """Number of CPU cores that this process may use.

    It is limited by the process's affinity and by the quota of its container.
    """
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _ALLOTMENT.read_text().split()
        max_cores = max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return num_cores
    return min(num_cores, max_cores)


def get_package_versions() -> dict[str, str | None]:
    """Version of each package that may affect the result; None if it is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def get_parent_command() -> list[str]:
    """The command line of the parent process; empty if the system does not show it."""
    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []


def _get_launch_command() -> str:
    """The whole command as it was typed, quoted for a shell.

    It is the launcher's; without one, this process's.
    """
    command = _cut_launch_command(get_parent_command())
    program = Path(command[0]).name
    return shlex.join([program] + command[1:])


def _cut_launch_command(parent_command: list[str]) -> list[str]:
    """The part of `parent_command` from the launcher on; without a launcher, this process's command."""
    for index, arg in enumerate(parent_command[:2]):
        if Path(arg).name in _LAUNCHERS:
            return parent_command[index:]
    for arg in parent_command[:3]:
        if "accelerate" in arg or "torch.distributed" in arg:
            return parent_command
    return sys.orig_argv


def _get_commit(file: Path) -> str | None:
    """The commit of the repository of `file`, or None without one.

    `+changes` is added if files differ or `file` is not tracked.
    """
    folder = file.parent
    try:
        commit = _run_git(folder, "rev-parse", "HEAD")
        is_tracked = _run_git(folder, "ls-files", "--", file.name)
        if is_tracked and not _run_git(folder, "status", "--porcelain", "--untracked-files=no"):
            return commit
        return f"{commit}+changes"
    except (OSError, subprocess.SubprocessError):
        return None


def _run_git(folder: Path, *args: str) -> str:
    """The output of a git command in `folder`. Raises OSError or subprocess.SubprocessError."""
    command = ["git", "-C", str(folder)]
    command.extend(args)
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def get_available_memory() -> int:
    """Bytes that processes may still take.

    They are of the machine, or of the container (control group, version 2) if that has less.
    """
    available = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or "max": no limit
        return available
    # Pages of files that were read, which the kernel gives back.
    used -= int(stat.get("inactive_file", 0))
    return max(0, min(available, limit - used))
