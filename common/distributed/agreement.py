"""Agreement: checks before a run that all processes have the same code, packages and settings."""

import dataclasses
import hashlib
import json
import platform
import socket
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store

from common.config import recipe_source
from common.distributed.collectives import join_first
from common.distributed.environment import get_package_versions
from common.errors import Refused

_READ_BY_ALL = timedelta(seconds=10)  # how long rank 0 keeps the store open for the others


def collect_facts(config=None) -> dict[str, str]:
    """What must be the same on all ranks, by its name for messages: versions, hashes of sources,
    and the configuration.
    """
    common = Path(__file__).parents[1]
    files = {str(path.relative_to(common.parent)): path for path in common.rglob("*.py")}
    settings = dataclasses.asdict(config) if config is not None else {}
    return {
        "Python": platform.python_version(),
        **{name: str(version) for name, version in get_package_versions().items()},
        **recipe_source.digests(recipe_source.read(config)),
        **{name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()},
        **{f"--{name}": str(value) for name, value in settings.items()},
    }


def check_agreement(
    store: Store, rank: int, world_size: int, mine: dict[str, str], patience: timedelta
) -> None:
    """Return when every rank has arrived with the same facts.

    Uses only the store, not a process group, which ranks with different versions might fail to
    form. Raises `Refused` on every rank if one does not arrive within `patience`, or differs from
    rank 0; the message names it and its machine.
    """
    store, here = PrefixStore("agreement", store), socket.gethostname()
    store.set_timeout(patience)
    try:
        store.set(str(rank), json.dumps([here, mine]))
        there, theirs = json.loads(store.get("0"))
        if found := describe_differences(mine, theirs):
            store.compare_set(
                "difference", "", f"rank {rank} on {here} is not as rank 0 on {there}: {found}"
            )
        if store.add("came", 1) == world_size:
            store.set("all", "")
        store.wait(["all"])
    except RuntimeError as error:
        raise Refused(_missing(store, world_size, patience)) from error
    if store.check(["difference"]):
        difference = store.get("difference").decode()
        if store.add("read", 1) == world_size:
            store.set("all have read", "")
        if rank == 0:  # the store may end with it
            store.wait(["all have read"], _READ_BY_ALL)
        raise Refused(difference)


def describe_differences(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """The differences in words; "" if there are none."""
    found = [
        f"{name} is another file"
        if name.endswith(".py")
        else f"{name} {mine.get(name, '(absent)')} instead of {theirs.get(name, '(absent)')}"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]
    return join_first(found, ", ")


def _missing(store: Store, world_size: int, patience: timedelta) -> str:
    try:
        ranks = [rank for rank in range(world_size) if not store.check([str(rank)])]
    except RuntimeError:
        return "rank 0 has ended before the start: see what it said"
    here = {json.loads(store.get(str(rank)))[0] for rank in set(range(world_size)) - set(ranks)}
    return (
        f"rank {', '.join(map(str, ranks))} of {world_size} did not come within "
        f"{patience.total_seconds():.0f} s; there are ranks of {', '.join(sorted(here))}: see "
        "what the others said"
    )
