"""Process sets: groups of ranks that run collectives among themselves."""

from collections.abc import Iterable, Sequence

from compat.horovod import engine
from compat.horovod.requests import WORLD

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some ranks of the world, for the parameter `process_set` of collectives.

    Register it with `init` or `add_process_set` first. `process_set_id` is None until then, and
    again after `remove_process_set` or `shutdown`.
    """

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable) or not all(
            isinstance(rank, int) for rank in ranks_or_comm
        ):
            raise ValueError(
                "a ProcessSet takes a list of ranks; communicators are not supported, for there "
                "is no MPI"
            )
        self.process_set_id: int | None = None
        self.ranks = sorted(ranks_or_comm)

    def size(self) -> int:
        """Number of ranks in the set. Raises ValueError if it is not registered."""
        return len(self._get_registered_ranks())

    def rank(self) -> int:
        """This process's rank in the set.

        Raises ValueError if it is not in the set, or the set is not registered.
        """
        ranks = self._get_registered_ranks()
        if not self.included():
            raise ValueError(f"rank {engine.current().rank} is not in the process set {ranks}")
        return ranks.index(engine.current().rank)

    def included(self) -> bool:
        """True if this process is in the set. Raises ValueError if the set is not registered."""
        return engine.current().rank in self._get_registered_ranks()

    def _get_registered_ranks(self) -> list[int]:
        if self.process_set_id not in engine.current().ranks:
            raise ValueError(f"{self} is not registered: give it to init() or add_process_set()")
        return self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = WORLD
_registered: list[ProcessSet] = []


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks, at any time. All ranks of the world call it alike.

    Horovod's "dynamic" mode is not needed. Raises ValueError if these ranks are registered already,
    and HorovodInternalError if the calls differ between ranks.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    running = engine.current()
    ranks = process_set.ranks
    if not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(f"a process set has at least one rank, and each once: {process_set}")
    if ranks in running.ranks.values():
        raise ValueError(f"a process set of the ranks {ranks} is registered already")
    process_set.process_set_id = running.call("add_process_set", ranks=ranks)
    _registered.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a process set, whose object can be registered again. All ranks of the world call it alike.

    Returns True if there was something to end: False for the global process set and for
    one that is not registered.
    """
    set_id = process_set.process_set_id
    if set_id == WORLD or set_id not in engine.current().ranks:
        return False
    engine.current().call("remove_process_set", root=set_id)
    process_set.process_set_id = None
    return True


def forget_process_sets() -> None:
    """After the end of the world: the objects keep their ranks, and can be registered again."""
    for process_set in _registered:
        process_set.process_set_id = None
    _registered.clear()
    global_process_set.ranks = []
