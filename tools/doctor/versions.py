"""Versions: Python, torch, CUDA, driver, NCCL and packages are equal on all machines."""

import platform

import torch

from common.distributed import devices
from common.distributed.environment import packages
from tools.doctor.finding import Finding, differing
from tools.doctor.gpus import query
from tools.doctor.world import World


def versions(world: World) -> list[Finding]:
    """Compares all ranks; a row for each machine or rank that differs from most of the others. A run compares its code."""
    needed = {"Python": platform.python_version(), **{name: str(version) for name, version in packages().items()}}
    cuda: dict[str, str] = {}
    if world.device.type == "cuda":
        cuda = {
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, devices.nccl_version())),
            "driver": next((row["driver_version"] for row in query(["driver_version"])), "unknown"),
        }
    shown = {"Python": needed["Python"], "torch": needed["torch"], **cuda}
    install = "the run refuses to start: install requirements.txt there"
    return [
        Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in shown.items())),
        *differing(world, "versions: packages", "failed", install, needed | cuda),
    ]
