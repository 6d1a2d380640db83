"""Elastic training: a script that continues from its last commit when processes die, leave or join.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

Start it with `accelerate launch --max_restarts 3` or `torchrun --max-restarts 3`: when a process
dies, the launcher replaces all of them, and each calls `train` with the state of the last commit.

Horovod keeps a commit in the memory of the ranks that survive. Here rank 0 also writes it to a
file, atomically: in the folder `HOROVOD_ELASTIC_COMMITS`, or else in `<script>.commits` beside the
script, under a hash of the script's arguments. With several machines it must be on storage that
all of them share. `HOROVOD_ELASTIC_COMMITS=none` keeps commits in memory only. A process that ends
without an error removes its commit.
"""

import atexit
import contextlib
import copy
import functools
import hashlib
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

from common.durable import make_folder, replace_file
from common.errors import Refused
from compat.horovod import serialization, world
from compat.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from compat.horovod.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = ["ElasticSampler", "TorchState", "run"]

VARIABLE = "HOROVOD_ELASTIC_COMMITS"
MAX_FAILURES = 3  # in this process without a commit between them
_num_states = 0  # of this process: the second state of a script has a file of its own


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is a state, so that it outlives failures.

    Before each call the state is synchronised from rank 0; a new process first loads the
    last commit from disk. After a HorovodInternalError on all ranks the state is restored
    from the last commit, Horovod starts again, and the function is called again. It may
    repeat the steps since the last commit.

    Raises:
        HorovodInternalError: the fourth in a row without a commit between them.
    """

    @functools.wraps(func)
    def wrapper(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        state._resume()
        num_failures = 0
        last_commit = state._commits
        while True:
            try:
                state.sync()
                result = func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if state._commits != last_commit:
                    num_failures = 0
                num_failures += 1
                last_commit = state._commits
                if num_failures > MAX_FAILURES:
                    raise
                print(f"rank {world.rank()}: {error}; restoring the last commit", file=sys.stderr)
                state.restore()
            except HostsUpdatedInterrupt:  # of the script's own
                pass
            else:
                if world.rank() == 0:
                    atexit.register(state._remove)
                return result
            world.shutdown()
            world.init()
            state.on_reset()

    return wrapper


class TorchState:
    """Models, optimizers, schedulers, samplers and plain values, each an attribute under its keyword.

    Whatever has `state_dict` and `load_state_dict` is kept by them; anything else is a plain
    value. Which types: see `serialization`.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        global _num_states
        values = {"model": model, "optimizer": optimizer, **kwargs}
        self._path = choose_commit_file(_num_states)
        self._names = list(values)
        self._callbacks: list[Callable[[], None]] = []
        self._commits = 0  # number of the last one
        _num_states += 1
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to call after a change of the ranks, before the state is synchronised.

        Also called when a new process continues from a commit on disk, since there may be
        more or fewer ranks by then.
        """
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, on disk too.

        A failure costs the steps since the last commit, and a commit costs a copy of the
        state and the writing of a file on rank 0. Choose how many steps lie between two.

        Raises:
            TypeError: if the state has a class that `serialization` does not read back.
            Refused: if the file can't be written.
        """
        self.save()
        self._commits += 1
        if self._path is None or world.rank() != 0:
            return
        data = serialization.dumps((self._commits, self._saved), "the elastic state")
        try:
            make_folder(self._path.parent)
            replace_file(self._path, data)
        except OSError as error:
            raise Refused(
                f"can't write the commit {self._path} ({error.strerror}): set {VARIABLE} to a "
                "folder that can be written, or to none to keep commits in memory"
            ) from error

    def check_host_updates(self) -> None:
        """Do nothing: a launcher that finds other machines starts new processes."""

    def save(self) -> None:
        """Copy the state, so that `restore` can come back to it."""
        self._saved = {}
        for name in self._names:
            value = getattr(self, name)
            if _has_state(value):
                value = value.state_dict()
            self._saved[name] = copy.deepcopy(value)

    def restore(self) -> None:
        """Return to the last `save`."""
        # A copy: torch's optimizers train the tensors that they load.
        for name, saved in copy.deepcopy(self._saved).items():
            value = getattr(self, name)
            if _has_state(value):
                value.load_state_dict(saved)
            else:
                setattr(self, name, saved)

    def sync(self) -> None:
        """Give all ranks the current values of rank 0. A collective."""
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            elif _has_state(value):
                value.load_state_dict(broadcast_object(value.state_dict()))
            else:
                setattr(self, name, broadcast_object(value))
        self.save()

    def _resume(self) -> None:
        """Continue from the commit on disk, if rank 0 can read one. A collective."""
        stored = None
        if self._path and world.rank() == 0 and self._path.exists():
            stored = serialization.loads(self._path.read_bytes())
            print(
                f"resuming from commit {stored[0]} in {self._path}; to begin again, remove it",
                file=sys.stderr,
            )
        stored = broadcast_object(stored)
        if stored is None:
            return
        self._commits, saved = stored
        if saved.keys() != self._saved.keys():
            raise ValueError(
                f"the commit in {self._path} holds {', '.join(sorted(saved))}, and this script's "
                f"state {', '.join(sorted(self._saved))}: remove the file to begin again"
            )
        self._saved = saved
        self.restore()
        self.on_reset()

    def _remove(self) -> None:
        # An exception ends this process.
        if self._path is None or getattr(sys, "last_value", None) is not None:
            return
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files are there
            self._path.parent.rmdir()


def choose_commit_file(state_index: int) -> Path | None:
    """Choose the file of the last commit of this script's state; None if it stays in memory."""
    folder_name = os.environ.get(VARIABLE, "")
    if folder_name.lower() == "none":
        return None
    script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "horovod.py").resolve()
    folder = script.parent / f"{script.stem}.commits"
    if folder_name:
        folder = Path(folder_name)
    digest = hashlib.sha256(json.dumps(sys.argv[1:]).encode()).hexdigest()
    return folder / f"{digest[:8]}-{state_index}.pt"


def _has_state(value: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(value, name, None)) for name in names)


class ElasticSampler(Sampler[int]):
    """Indices of this rank's samples; a restart in mid-epoch deals out those that are left.

    In step k with b samples per rank, the ranks together take positions [k*b*size,
    (k+1)*b*size) of the epoch's order. So `record_batch` counts positions, and the count
    is the same on all ranks. The order depends on seed and epoch alone, not on the number
    of ranks. If the rest of an epoch does not divide by the ranks, its first samples are
    repeated.

    Put the sampler into the `TorchState`, call `record_batch` after each optimizer step,
    and `set_epoch(epoch + 1)` at the end of an epoch, which clears what was recorded.

    Args:
        dataset: has a length, which stays the same.
        shuffle: True for a random order.
        seed: of the order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, with nothing processed. Call it at the end of the one before."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed `batch_size` samples, in order. All ranks call it."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the rest of the epoch out again, over the ranks that there are now."""
        self.num_replicas = world.size()
        self.rank = world.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        remaining = order[self.processed_num :]
        num_missing = -len(remaining) % self.num_replicas
        # As often as needed, since fewer samples than ranks may remain.
        repeated = itertools.islice(itertools.cycle(remaining), num_missing)
        self.indices = (remaining + list(repeated))[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
