"""States: what ranks keep equal, commit, restore after a failure, and hand to processes that are started later."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compat.horovod import world
from compat.horovod.elastic.commits import Commits
from compat.horovod.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class ObjectState:
    """A state of plain Python values, which are attributes: `state.epoch`. Which types: see `serialization`.

    Args:
        bcast_object: sends an object from rank 0 to all ranks.
        get_rank: the rank of this process.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_object,
        get_rank: Callable[[], int] = world.rank,
        **kwargs: Any,
    ) -> None:
        self._bcast_object = bcast_object
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = Commits()
        self._saved_state = kwargs
        ObjectState.restore(self)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to call after a change of the ranks and before the state is synchronised, such as to set the rate.

        Also called when a new process continues from a commit on disk, since there may be
        more or fewer ranks by then.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, on disk too.

        A failure costs the steps since the last commit, and a commit costs a copy of the
        state and the writing of a file on rank 0. Choose how many steps lie between two.
        """
        self.save()
        self._commits.write(self._stored())

    def check_host_updates(self) -> None:
        """Do nothing: a launcher that finds other machines ends the processes, and starts new ones."""

    def save(self) -> None:
        """Copy the state, so that `restore` can come back to it."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Return to the last `save`."""
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Give all ranks the current values of rank 0. A collective."""
        if self._saved_state:
            values = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            for name, value in values.items():
                setattr(self, name, value)
        self.save()

    def _stored(self) -> dict[str, Any]:
        """What `save` has kept, for the commit on disk."""
        return self._saved_state

    def _take_stored(self, stored: dict[str, Any]) -> None:
        """Replace what `save` has kept by a commit from disk."""
        if set(stored) != set(self._stored()):
            raise ValueError(
                f"the commit in {self._commits.path} holds {', '.join(sorted(stored))}, and this script's state "
                f"{', '.join(sorted(self._stored()))}: remove the file to begin again"
            )
        self._saved_state = stored


class TorchState(ObjectState):
    """A state of models, optimizers, schedulers, samplers and plain values, each an attribute under its keyword.

    Whatever has `state_dict` and `load_state_dict` is kept by them; anything else is a
    plain value.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        self._kept = {
            name: value
            for name, value in values.items()
            if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
        }
        self._states = {name: copy.deepcopy(value.state_dict()) for name, value in self._kept.items()}
        for name, value in self._kept.items():
            object.__setattr__(self, name, value)
        super().__init__(**{name: value for name, value in values.items() if name not in self._kept})

    def save(self) -> None:
        self._states = {name: copy.deepcopy(value.state_dict()) for name, value in self._kept.items()}
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
                value.load_state_dict(broadcast_object(value.state_dict()))
        super().sync()

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
