"""Versions: Python, torch, CUDA, driver, NCCL, packages and the commit are equal on all machines."""

import hashlib
import platform
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path

import torch

from common.distributed.agreement import facts
from common.distributed.environment import _commit, packages
from tools.doctor.finding import Finding
from tools.doctor.gpus import query
from tools.doctor.world import World

NAMED = 4  # differences that a row names
ROOT = Path(__file__).resolve().parents[2]


def versions(world: World) -> list[Finding]:
    """Compares all ranks; a row for each machine or rank that differs from most of the others."""
    needed = {"Python": platform.python_version(), **{name: str(version) for name, version in packages().items()}}
    cuda = _of_cuda() if world.device.type == "cuda" else {}
    found = {
        "needed": needed | cuda,
        "files": {name: hashed for name, hashed in facts().items() if name.startswith("common")} | _recipe(world),
        "others": {each.name: each.version for each in distributions() if each.name not in needed},
        "commit": {"commit": str(_commit(ROOT / "Makefile"))},
    }
    of_ranks = world.exchange(found)
    if not world.is_main:
        return []
    here = of_ranks[0]
    commit = here["commit"]["commit"].replace("+changes", " with local changes")
    shown = [f"Python {needed['Python']}", f"torch {needed['torch']}"]
    shown += [f"{name} {version}" for name, version in cuda.items()]
    shown.append("no commit" if commit == "None" else f"commit {commit[:9]}{commit[40:]}")
    rows = [Finding("versions", "ok", ", ".join(shown), figures=needed | cuda | here["commit"])]
    rows += _differing(world, "packages", [ranks["needed"] for ranks in of_ranks], "failed")
    rows += _differing(world, "code", [ranks["files"] for ranks in of_ranks], "failed")
    rows += _differing(world, "commit", [ranks["commit"] for ranks in of_ranks], "warning")
    rows += _differing(world, "other packages", [ranks["others"] for ranks in of_ranks], "warning")
    return rows


def _differing(world: World, what: str, of_ranks: list[dict[str, str]], status) -> list[Finding]:
    """A row for each set of ranks that differ from what most ranks have (from rank 0 if as many have each)."""
    by_texts: dict[str, list[int]] = {}
    figures = {}
    names = sorted({name for theirs in of_ranks for name in theirs})
    usual = {name: Counter(theirs.get(name) for theirs in of_ranks).most_common(1)[0][0] for name in names}
    for rank, theirs in enumerate(of_ranks):
        wrong = [name for name in names if theirs.get(name) != usual[name]]
        if wrong:
            texts = [_difference(name, theirs.get(name), usual[name]) for name in wrong[:NAMED]]
            text = ", ".join(texts) + (f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else "")
            by_texts.setdefault(text, []).append(rank)
            figures[text] = {name: [theirs.get(name), usual[name]] for name in wrong}
    way_out = {
        "packages": "the run refuses to start: install requirements.txt there",
        "code": "the run refuses to start: check out the same commit on all machines",
        "commit": "check out the same commit on all machines",
        "other packages": "the run does not compare these; install the same environment if it behaves differently there",
    }[what]
    return [
        Finding(f"versions: {what}", status, text, way_out, world.places(ranks), figures[text])
        for text, ranks in by_texts.items()
    ]


def _difference(name: str, theirs: str | None, usual: str | None) -> str:
    if name.endswith(".py"):
        return f"{name} is another file" if theirs and usual else f"{name} is {'missing' if usual else 'extra'}"
    if name == "commit":
        return f"{(theirs or '')[:9]}{(theirs or '')[40:]} instead of {(usual or '')[:9]}{(usual or '')[40:]}"
    return f"{name} {theirs or '(absent)'} instead of {usual or '(absent)'}"


def _recipe(world: World) -> dict[str, str]:
    return {world.recipe.name: hashlib.sha256(world.recipe.read_bytes()).hexdigest()} if world.recipe else {}


def _of_cuda() -> dict[str, str]:
    """Versions of what only a run on GPUs uses."""
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    driver = next((row["driver_version"] for row in query(["driver_version"])), "unknown")
    return {
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, nccl)),
        "driver": driver,
    }
