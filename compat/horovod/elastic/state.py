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
        return {"values": self._saved_state}

    def _take_stored(self, stored: dict[str, Any]) -> None:
        theirs, own = set(stored["values"]), set(self._saved_state)
        if theirs != own:
            raise ValueError(
                f"the commit in {self._commits.path} holds {', '.join(sorted(theirs))}, and this script's state "
                f"{', '.join(sorted(own))}: remove the file to begin again"
            )
        self._saved_state = stored["values"]


class TorchState(ObjectState):
    """A state of models, optimizers, schedulers, samplers and plain values, each an attribute under its keyword.

    Whatever has `state_dict` and `load_state_dict` is kept by them; anything else is a plain value.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: handler for name, value in values.items() if (handler := _handler_of(value))}
        self._handlers: dict[str, StateHandler] = handlers
        super().__init__(**{name: value for name, value in values.items() if name not in handlers})
        for name, handler in handlers.items():
            object.__setattr__(self, name, handler.value)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        self.save()  # all of it is of one moment, should it be restored before the next commit

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def _stored(self) -> dict[str, Any]:
        return {**super()._stored(), "handled": {name: handler.saved for name, handler in self._handlers.items()}}

    def _take_stored(self, stored: dict[str, Any]) -> None:
        if set(stored["handled"]) != set(self._handlers):
            raise ValueError(
                f"the commit in {self._commits.path} holds {', '.join(sorted(stored['handled']))}, and this script's state "
                f"{', '.join(sorted(self._handlers))}: remove the file to begin again"
            )
        super()._take_stored(stored)
        for name, handler in self._handlers.items():
            handler.saved = stored["handled"][name]


class StateHandler:
    """Keeps one object by its state_dict; `sync` sends that from rank 0. For subclasses, see `set_handler_registry`."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy: torch's optimizers take over the tensors that they load, and would train the saved ones.
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """Both are collectives: each rank has recorded other indices."""

    def save(self) -> None:
        self.saved = self._of_all_ranks()

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self._of_all_ranks()))

    def _of_all_ranks(self) -> dict[str, Any]:
        state = self.value.state_dict()
        recorded = allgather_object((state["epoch"], state["processed_indices"]))
        same_epoch = [indices for epoch, indices in recorded if epoch == state["epoch"]]
        return state | {"processed_indices": sorted(set().union(*same_epoch))}

    def set_value(self, value: Any) -> None:
        self.value, self.saved = value, copy.deepcopy(value.state_dict())


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs of a class and the handler that keeps its objects in a TorchState; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    has_state = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return StateHandler(value) if has_state else None
