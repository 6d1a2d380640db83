"""On what did this run happen?"""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from common.config import recipe_source
from common.distributed.collectives import gather_objects, local_world_size, world_size

_PACKAGES = ("accelerate", "datasets", "numpy", "pillow", "safetensors", "timm", "torch", "torchvision", "wandb")
_ALLOTMENT = Path("/sys/fs/cgroup/cpu.max")  # microseconds of computing, in so many microseconds


def environment(precision: str, device: torch.device, config: object = None) -> dict:
    """Versions, commit, command, layout and devices of this start; every rank calls it with its `device`.

    Of the recipe, whose configuration is `config`, the path and a hash of each file of its source.
    """
    recipe = recipe_source.started(config)
    on_gpu = device.type == "cuda"  # a machine may have one and the run be on its CPU
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    return {
        "command": " ".join(sys.argv),
        "recipe": str(recipe.resolve()) if recipe else "a notebook",
        "source": recipe_source.digests(recipe_source.read(config)),
        "commit": _commit(recipe.resolve()) if recipe else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages(),
        "cuda": torch.version.cuda if on_gpu else None,
        "world_size": world_size(),
        "local_world_size": local_world_size(),
        "precision": precision,
        "threads": torch.get_num_threads(),
        "ranks": [f"{name} on {host}" for name, host in gather_objects((name, platform.node()))],
    }


def cores() -> int:
    """How many this process may use: those it is bound to, and no more than its container is allotted."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _ALLOTMENT.read_text().split()
        return min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return count


def packages() -> dict[str, str | None]:
    """Version of each package that has a say in the result; None where it is not installed."""
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(file: Path) -> str | None:
    """The git commit that the folder of `file` is at, with `+changes` where files differ from it or `file` is not in it.

    None outside git.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        is_in_it = git("ls-files", "--", file.name) and not git("status", "--porcelain", "--untracked-files=no")
        return commit + "+changes" * (not is_in_it)
    except (OSError, subprocess.SubprocessError):
        return None
