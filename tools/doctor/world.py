"""World: the processes that the doctor runs in, and how they meet and exchange values."""

import argparse
import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistStoreError, HashStore, PrefixStore, Store

from common.distributed.agreement import check_agreement
from common.errors import Refused
from common.launching.launchers import Launch
from common.launching.meeting import connect_to_store
from tools.doctor.table import Finding


@dataclass
class World:
    """What a check knows about its process and the others.

    Before they meet, a process has a store of its own.
    """

    launch: Launch
    options: argparse.Namespace
    device: torch.device  # "cuda:1": what this process computes on
    ranks: Sequence[int]  # of the processes that share the store: this one, or all
    hosts: list[str] = field(default_factory=list)  # the machine of each of `ranks`
    # The first rank of each machine, once they have met.
    main_ranks: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)  # of this rank, so far
    start: float = field(default_factory=time.monotonic)
    store: Store = field(default_factory=HashStore)
    # This process knows why no process group can be formed, such as a firewall.
    is_cut: bool = False
    check: str = ""  # the one that runs
    num_exchanges: int = 0  # in this check so far

    @property
    def rank(self) -> int:
        return self.launch.rank

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank. It needs no process group.

        Values must be JSON. Raises DistStoreError if another rank fails in the same check. Waits
        without end for one that does not come: the check has a time limit.

        One process: exchange("a") -> ["a"]. Two ranks: exchange("a" | "b") -> ["a", "b"] | ["a", "b"].
        """
        self.num_exchanges += 1
        store = PrefixStore(f"{self.check}/{self.num_exchanges}", self.store)
        store.set(str(self.rank), json.dumps(value))
        keys = [str(rank) for rank in self.ranks]
        while True:
            try:
                store.wait(keys, timedelta(seconds=1))
                return [json.loads(text) for text in store.multi_get(keys)]
            except DistStoreError:
                if self.store.check([f"failed/{self.check}"]):
                    raise

    def arrive(self, where: str) -> None:
        """Return when all ranks are there, or after 10 s: one may have died."""
        self.store.set(f"{where}/{self.rank}", "")
        with contextlib.suppress(RuntimeError):
            self.store.wait([f"{where}/{rank}" for rank in self.ranks], timedelta(seconds=10))


def meet(world: World) -> list[Finding]:
    """Wait until all processes have reached rank 0's store, which becomes the world's.

    Returns a row if one does not come.
    """
    host = socket.gethostname()
    world.hosts = [host]
    if world.launch.world_size == 1:
        return []
    timeout = timedelta(seconds=world.options.wait)
    try:
        store = connect_to_store(os.environ, world.launch, timeout)
        check_agreement(store, world.rank, world.launch.world_size, {}, timeout)
    except (Refused, OSError, RuntimeError) as error:
        target = f"{world.launch.address}:{world.launch.port}"
        measured = f"rank {world.rank} on {host} can't meet the others at {target}"
        return [Finding("network: meeting", "failed", measured, str(error))]
    world.store = PrefixStore("doctor", store)
    world.ranks = range(world.launch.world_size)
    processes = world.exchange([host, world.launch.local_rank])
    world.hosts = [host for host, _ in processes]
    # Not by the hosts' names, which clones share.
    world.main_ranks = [rank for rank in world.ranks if processes[rank][1] == 0]
    return []
