"""Versions: Python, torch, CUDA, driver, NCCL, packages and the commit are equal on all machines."""

import hashlib
import platform
from importlib.metadata import distributions
from pathlib import Path

import torch

from common.distributed import devices
from common.distributed.agreement import facts
from common.distributed.environment import _commit, packages
from tools.doctor.finding import Finding, differing
from tools.doctor.gpus import query
from tools.doctor.world import World

ROOT = Path(__file__).resolve().parents[2]


def versions(world: World) -> list[Finding]:
    """Compares all ranks; a row for each machine or rank that differs from most of the others."""
    needed = {name: str(version) for name, version in packages().items()}
    needed["Python"] = platform.python_version()
    cuda = _of_cuda() if world.device.type == "cuda" else {}
    code = {name: digest for name, digest in facts().items() if name.startswith("common")}
    if world.recipe:
        code[world.recipe.name] = hashlib.sha256(world.recipe.read_bytes()).hexdigest()
    others = {each.name: each.version for each in distributions() if each.name not in needed}
    commit = str(_commit(ROOT / "Makefile"))
    commit = commit[:9] + " with local changes" * commit.endswith("+changes")
    main = {"Python": needed["Python"], "torch": needed["torch"], **cuda}
    shown = [f"{name} {version}" for name, version in main.items()]
    shown.append("no commit" if commit == "None" else f"commit {commit}")
    install = "the run refuses to start: install requirements.txt there"
    same = "check out the same commit on all machines"
    uncompared = "the run does not compare these; install the same if it behaves differently there"
    return [
        Finding("versions", "ok", ", ".join(shown)),
        *differing(world, "versions: packages", "failed", install, needed | cuda),
        *differing(world, "versions: code", "failed", f"the run refuses to start: {same}", code),
        *differing(world, "versions: commit", "warning", same, {"commit": commit}),
        *differing(world, "versions: other packages", "warning", uncompared, others),
    ]


def _of_cuda() -> dict[str, str]:
    """Versions of what only a run on GPUs uses."""
    return {
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, devices.nccl_version())),
        "driver": next((row["driver_version"] for row in query(["driver_version"])), "unknown"),
    }
