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
    """The content of environment.json: versions, commit, command, layout and devices of this start.
    A collective.
    """
    recipe = recipe_source.started(config)
    on_cpu = device.type == "cpu"
    name = platform.processor() or platform.machine() if on_cpu else devices.get_device_name(device)
    return {
        "command": shlex.join(sys.argv),
        "launch": _launch_command(),
        "recipe": str(recipe.resolve()) if recipe else None,
        "source": recipe_source.digests(recipe_source.read(config)),
        "commit": _commit(recipe.resolve()) if recipe else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": get_package_versions(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "world_size": world_size(),
        "local_world_size": local_world_size(),
        "precision": precision,
        "threads": torch.get_num_threads(),
        "ranks": [f"{name} on {host}" for name, host in gather_objects((name, platform.node()))],
    }


def count_cores() -> int:
    """Number of CPU cores that this process may use: limited by its affinity and by the quota of
    its container.
    """
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = _ALLOTMENT.read_text().split()
        return min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return count


def get_package_versions() -> dict[str, str | None]:
    """Version of each package that may affect the result; None if it is not installed."""
    found: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def get_parent_command() -> list[str]:
    """The command line of the parent process; empty if the system does not show it."""
    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []


def _launch_command() -> str:
    """The whole command as it was typed, quoted for a shell: the launcher's; without one, this process's."""
    words = get_parent_command()
    place = next(
        (place for place, word in enumerate(words[:2]) if Path(word).name in _LAUNCHERS), None
    )
    if place is None and not any(
        "accelerate" in word or "torch.distributed" in word for word in words[:3]
    ):
        place, words = 0, sys.orig_argv
    words = words[place or 0 :]
    return shlex.join([Path(words[0]).name, *words[1:]])


def _commit(file: Path) -> str | None:
    """The commit of the repository of `file`, if any, with `+changes` if files differ or `file` is
    not tracked.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.parent), *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        is_in_it = git("ls-files", "--", file.name) and not git(
            "status", "--porcelain", "--untracked-files=no"
        )
        return commit + "+changes" * (not is_in_it)
    except (OSError, subprocess.SubprocessError):
        return None


def get_available_memory() -> int:
    """Bytes that processes may still take: of the machine, or of the container (control group,
    version 2) if that has less.
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
