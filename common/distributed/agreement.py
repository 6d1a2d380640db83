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
    """What must be the same on all ranks, by its name for messages.

    These are versions, hashes of sources, and the configuration.
    """
    facts = {"Python": platform.python_version()}
    for name, version in get_package_versions().items():
        facts[name] = str(version)
    facts.update(recipe_source.hash_files(recipe_source.read_source(config)))
    common = Path(__file__).parents[1]
    for path in common.rglob("*.py"):
        name = str(path.relative_to(common.parent))
        facts[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    if config is not None:
        for name, value in dataclasses.asdict(config).items():
            facts[f"--{name}"] = str(value)
    return facts


def check_agreement(
    store: Store, rank: int, world_size: int, facts: dict[str, str], timeout: timedelta
) -> None:
    """Return when every rank has arrived with the same facts.

    Uses only the store, not a process group, which ranks with different versions might fail to
    form. Raises `Refused` on every rank if one does not arrive within `timeout`, or differs from
    rank 0; the message names it and its machine.
    """
    store = PrefixStore("agreement", store)
    store.set_timeout(timeout)
    try:
        _compare_with_main(store, rank, facts)
        if store.add("came", 1) == world_size:
            store.set("all", "")
        store.wait(["all"])
    except RuntimeError as error:
        raise Refused(_describe_missing(store, world_size, timeout)) from error
    if store.check(["difference"]):
        difference = store.get("difference").decode()
        if store.add("read", 1) == world_size:
            store.set("all have read", "")
        if rank == 0:  # the store may end with it
            store.wait(["all have read"], _READ_BY_ALL)
        raise Refused(difference)


def _compare_with_main(store: Store, rank: int, facts: dict[str, str]) -> None:
    """Send the facts of this rank; if they differ from rank 0's, store the difference for all."""
    host = socket.gethostname()
    store.set(str(rank), json.dumps([host, facts]))
    main_host, main_facts = json.loads(store.get("0"))
    differences = describe_differences(facts, main_facts)
    if differences:
        message = f"rank {rank} on {host} is not as rank 0 on {main_host}: {differences}"
        store.compare_set("difference", "", message)


def describe_differences(actual: dict[str, str], expected: dict[str, str]) -> str:
    """The differences between the facts of two ranks, for a message; "" if there are none."""
    differences = []
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) == expected.get(name):
            continue
        if name.endswith(".py"):
            differences.append(f"{name} is another file")
        else:
            value = actual.get(name, "(absent)")
            differences.append(f"{name} {value} instead of {expected.get(name, '(absent)')}")
    return join_first(differences, ", ")


def _describe_missing(store: Store, world_size: int, timeout: timedelta) -> str:
    """A message that names the ranks that have not come, and the machines of those that have."""
    missing = []
    hosts = set()
    try:
        for rank in range(world_size):
            if store.check([str(rank)]):
                host, _ = json.loads(store.get(str(rank)))
                hosts.add(host)
            else:
                missing.append(str(rank))
    except RuntimeError:
        return "rank 0 has ended before the start: see what it said"
    return (
        f"rank {', '.join(missing)} of {world_size} did not come within "
        f"{timeout.total_seconds():.0f} s; there are ranks of {', '.join(sorted(hosts))}: see "
        "what the others said"
    )
