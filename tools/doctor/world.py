"""World: the processes that the doctor runs in, as a check sees them, and their store."""

import json
import socket
import time
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from common.distributed import devices
from common.launching.launch_checks import wants_cpu
from common.launching.launchers import EXPORTED, Launch, complete

NAMED = 4  # ranks or hosts that a row names
ANSWER_S = 30.0  # how long a process waits for the others in one exchange


class LostPeer(Exception):
    """Another process has failed in the check that this one is in; its finding says why."""


@dataclass
class World:
    """What a check knows about its process and the others."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    launch: Launch = field(default_factory=lambda: Launch(EXPORTED))
    host: str = field(default_factory=socket.gethostname)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # "cuda:1": what this process computes on
    recipe: Path | None = None  # for checks that need a model and data
    words: list[str] = field(default_factory=list)  # flags of the recipe
    hosts: list[str] = field(default_factory=list)  # of each rank, once they have met
    store: Store | None = None  # None for one process, and until they have met
    is_met: bool = False  # all processes have reached the store
    is_cut: bool = False  # this process knows why no process group can be formed, such as a firewall
    check: str = ""  # the one that runs
    exchanges: int = 0  # in this check so far

    def __post_init__(self) -> None:
        self.hosts = self.hosts or [self.host] * self.world_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True if this is the first process of its machine."""
        return self.local_rank == 0

    @property
    def is_one_machine(self) -> bool:
        """True if all processes are on one machine."""
        return self.local_world_size == self.world_size and len(self.machines) == 1

    @property
    def machines(self) -> list[list[int]]:
        """The ranks of each machine. One process: [[0]]; two machines: [[0, 1], [2, 3]]."""
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            ranks.setdefault(host, []).append(rank)
        return [*ranks.values()]

    def name(self, rank: int) -> str:
        """How the table names a rank: "rank 3 (node1)"."""
        return f"rank {rank} ({self.hosts[rank]})"

    def exchange(self, value: Any, patience: float = ANSWER_S) -> list[Any]:
        """The values of all ranks, in rank order, on every rank. It needs no process group.

        Values must be JSON. Raises `LostPeer` at once if another rank fails in the same check, and after `patience`
        seconds if one does not come.

        One process: exchange("a") -> ["a"]. Two ranks: exchange("a" | "b") -> ["a", "b"] | ["a", "b"].
        """
        if self.store is None:
            return [json.loads(json.dumps(value))]
        self.exchanges += 1
        store = PrefixStore(f"exchange/{self.check}/{self.exchanges}", self.store)
        store.set(str(self.rank), json.dumps(value))
        if self.is_main:
            found = [json.loads(self.take(store, str(rank), rank, patience)) for rank in range(self.world_size)]
            store.set("all", json.dumps(found))
        return json.loads(self.take(store, "all", 0, patience))

    def take(self, store: Store, key: str, rank: int, patience: float = ANSWER_S) -> bytes:
        """Wait for the value of `key`, which `rank` sets; raises `LostPeer` as `exchange` does."""
        until = time.monotonic() + patience
        while True:
            try:
                store.wait([key], timedelta(seconds=1))
                return store.get(key)
            except dist.DistStoreError:
                if self.store is not None and self.store.check([f"raised/{self.check}"]):
                    raise LostPeer from None
                if time.monotonic() > until:
                    raise LostPeer(f"{self.name(rank)} did not answer within {patience:.0f} s") from None

    def enter(self, check: str) -> None:
        """Note that `check` begins on this rank."""
        self.check, self.exchanges = check, 0

    def raised(self) -> None:
        """Tell the others that this rank has failed in the current check."""
        if self.store is not None:
            self.store.set(f"raised/{self.check}", str(self.rank))


def places(ranks: Collection[int], among: Collection[int], hosts: Sequence[str]) -> str:
    """Names for `ranks`: their hosts, if those have no other ranks in `among` and are not all hosts; else rank by rank."""
    here = {hosts[rank] for rank in ranks}
    is_whole = all(rank in ranks for rank in among if hosts[rank] in here)
    names = [*dict.fromkeys(hosts[rank] for rank in ranks)] if is_whole and len({*hosts}) > 1 else []
    names = names or [f"rank {rank} ({hosts[rank]})" for rank in sorted({*ranks})]
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def this_process(environ: MutableMapping[str, str], recipe: Path | None, words: list[str]) -> World:
    """The world that the launcher's variables describe. Raises `Refused` if they contradict."""
    launch = complete(environ)
    device = torch.device("cpu")
    if not wants_cpu(environ) and devices.kind() == "cuda":
        device = torch.device("cuda", min(launch.local_rank, torch.accelerator.device_count() - 1))
        torch.accelerator.set_device_index(device)
    sizes = (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size, launch.node_rank or 0)
    return World(*sizes, launch=launch, device=device, recipe=recipe, words=words)
