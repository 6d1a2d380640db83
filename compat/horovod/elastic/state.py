"""States: what ranks keep equal, commit, restore after a failure, and hand to processes that are started later."""

import copy
import queue
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compat.horovod import world
from compat.horovod.elastic.commits import Commits
from compat.horovod.elastic.sampler import ElasticSampler
from compat.horovod.exceptions import HostsUpdatedInterrupt
from compat.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class State:
    """Base of all states. A subclass of its own has `save`, `restore` and `sync`, and its commits stay in memory.

    Args:
        bcast_object: sends an object from rank 0 to all ranks.
        get_rank: the rank of this process.
    """

    def __init__(
        self, bcast_object: Callable[..., Any] = broadcast_object, get_rank: Callable[[], int] = world.rank
    ) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = Commits()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to call after a change of the ranks and before the state is synchronised, such as to set the rate.

        Also called when a new process continues from a commit on disk, since there may be more or fewer ranks by then.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = 0) -> None:
        """Note that machines come (update_res 1), go (2) or both (3): `check_host_updates` raises next time."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, on disk too, then `check_host_updates`. A collective.

        A failure costs the steps since the last commit, and a commit costs a copy of the state and the writing of a file
        on rank 0. Choose how many steps lie between two.
        """
        self.save()
        self._commits.write(self._stored())
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if any was told of a change of machines. A collective."""
        latest, update = self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, kind = self._host_messages.get()
            if timestamp > latest:
                latest, update = timestamp, update | kind
        of_ranks = allgather_object((self._last_updated_timestamp, latest, update))
        before, self._last_updated_timestamp = max(row[0] for row in of_ranks), max(row[1] for row in of_ranks)
        if self._last_updated_timestamp > before:
            updates = {row[2] for row in of_ranks if row[1] > before}
            raise HostsUpdatedInterrupt(skip_sync=updates == {2})  # ranks that stay are equal already

    def save(self) -> None:
        """Copy the state, so that `restore` can come back to it."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0. A collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """What a subclass does after a change of the ranks, before the callbacks."""

    def _stored(self) -> dict[str, Any] | None:
        """What `save` has kept, for the commit on disk; None if it stays in memory."""
        return None

    def _take_stored(self, stored: dict[str, Any]) -> None:
        """Replace what `save` has kept by a commit from disk."""


class ObjectState(State):
    """A state of plain Python values, which are attributes: `state.epoch`. Which types: see `serialization`."""

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_object,
        get_rank: Callable[[], int] = world.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attributes()

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        """Give all ranks the current values of rank 0: after an interrupt they go with the parameters. A collective."""
        if self._saved_state:
            self._saved_state = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def _stored(self) -> dict[str, Any]:
        return self._saved_state

    def _take_stored(self, stored: dict[str, Any]) -> None:
        if set(stored) != set(self._stored()):
            raise ValueError(
                f"the commit in {self._commits.path} holds {', '.join(sorted(stored))}, and this script's state "
                f"{', '.join(sorted(self._stored()))}: remove the file to begin again"
            )
        self._saved_state = stored


class TorchState(ObjectState):
    """A state of models, optimizers, schedulers, samplers and plain values, each an attribute under its keyword.

    Whatever has `state_dict` and `load_state_dict` is kept by them; anything else is a plain value.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        kept = {name: value for name, value in values.items() if _has_state(value)}
        self._kept: dict[str, Any] = kept
        self._states = {name: copy.deepcopy(value.state_dict()) for name, value in kept.items()}
        super().__init__(**{name: value for name, value in values.items() if name not in kept})
        for name, value in kept.items():
            object.__setattr__(self, name, value)

    def save(self) -> None:
        """Copy the state. A collective if there is a sampler: each rank has recorded other indices."""
        self._states = {name: copy.deepcopy(_state_of(value)) for name, value in self._kept.items()}
        super().save()

    def restore(self) -> None:
        for name, value in self._kept.items():
            # A copy: torch's optimizers take over the tensors that they load, and would train the saved ones.
            value.load_state_dict(copy.deepcopy(self._states[name]))
        super().restore()

    def sync(self) -> None:
        for value in self._kept.values():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                value.load_state_dict(broadcast_object(_state_of(value)))
        super().sync()
        self.save()  # all of it is of one moment, should it be restored before the next commit

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_kept", ()):
            self._kept[name], self._states[name] = value, copy.deepcopy(value.state_dict())
        super().__setattr__(name, value)

    def _stored(self) -> dict[str, Any]:
        return super()._stored() | self._states

    def _take_stored(self, stored: dict[str, Any]) -> None:
        super()._take_stored(stored)
        self._states = {name: stored[name] for name in self._kept}
        self._saved_state = {name: value for name, value in stored.items() if name not in self._kept}


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _state_of(value: Any) -> dict[str, Any]:
    """The object's state; a sampler's with the indices that all ranks have recorded, which is a collective."""
    state = value.state_dict()
    if not isinstance(value, ElasticSampler):
        return state
    recorded = allgather_object((state["epoch"], state["processed_indices"]))
    same_epoch = [indices for epoch, indices in recorded if epoch == state["epoch"]]
    return state | {"processed_indices": sorted(set().union(*same_epoch))}
