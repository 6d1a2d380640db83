"""World: init and shutdown, ranks and sizes, and what this build can do.

`init()` works under accelerate launch, torchrun, mpirun, srun and plain Python. It joins
the process group of torch.distributed that the script has made, or makes one, which
`shutdown()` ends again.
"""

import atexit
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from common.distributed import collectives, devices
from common.launching.launchers import Launch, complete
from compat.horovod import engine
from compat.horovod.collectives import get_backend, get_timeout
from compat.horovod.engine import Engine
from compat.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    forget_process_sets,
    global_process_set,
)

__all__ = """init shutdown is_initialized size rank local_size local_rank cross_size cross_rank
start_timeline stop_timeline mpi_threads_supported mpi_built mpi_enabled ddl_built ccl_built
gloo_built gloo_enabled nccl_built cuda_built rocm_built
""".split()

_FLUSH_AT_EXIT_S = 5.0

_store: dist.Store | None = None  # through which the ranks meet; kept for the next init()
_starts = 0  # how often this process has started a world: the same number on all ranks
_owns_group = False
_process = 0  # the one that called init()


def init(
    comm: None = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None
) -> None:
    """Start the world, or do nothing if it has been started and not shut down.

    Args:
        comm: refused: there is no MPI. For some of the ranks use process sets.
        process_sets: process sets, or lists of ranks, to register; the same on all ranks.
            "dynamic" registers none. Either way `add_process_set` can be called later.

    Raises ValueError for arguments that are not supported, and `Refused` if the launcher's
    variables contradict each other.
    """
    global _starts, _process
    if engine.is_running():
        return
    if comm is not None:
        raise ValueError(
            f"comm={comm!r}: the world has all ranks that were started; for some of them use "
            "process sets"
        )
    _starts += 1
    _process = os.getpid()
    _join_group(complete(os.environ))
    collectives.nodes()  # asks all ranks, once
    engine.set_current(Engine())
    global_process_set.ranks = list(range(size()))
    if process_sets and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)
    atexit.register(_end)


def _join_group(launch: Launch) -> None:
    """Make torch's process group unless there is one."""
    global _store, _owns_group
    if dist.is_initialized():
        return
    if _store is None and launch.world_size == 1:
        _store = dist.HashStore()
    elif _store is None:
        from common.launching.meeting import connect_to_store  # imports accelerate

        _store = connect_to_store(os.environ, launch, get_timeout())
    group_store = dist.PrefixStore(f"group/{_starts}", _store)
    dist.init_process_group(
        get_backend(), store=group_store, rank=launch.rank, world_size=launch.world_size
    )
    _owns_group = True


def shutdown() -> None:
    """End the world on this rank, once its operations in flight have ended. `init()` may follow.

    Operations that other ranks still want from this one fail there with HorovodInternalError.
    """
    _end(limit_s=None)


def _end(limit_s: float | None = _FLUSH_AT_EXIT_S) -> None:
    global _owns_group
    if not engine.is_running() or os.getpid() != _process:  # in a fork
        return
    try:
        engine.current().shutdown(limit_s)
    finally:
        engine.set_current(None)
    atexit.unregister(_end)
    forget_process_sets()
    if _owns_group:
        collectives.leave_process_group()
    _owns_group = False


def is_initialized() -> bool:
    """True if `init()` was called, and `shutdown()` not yet."""
    return engine.is_running()


def size() -> int:
    """Number of processes."""
    return engine.current().size


def rank() -> int:
    """This process's number in the world, from 0."""
    return engine.current().rank


def local_size() -> int:
    """Number of processes on this machine."""
    return len(_find_machine())


def local_rank() -> int:
    """This process's number on its machine, from 0: its GPU."""
    return _find_machine().index(rank())


def cross_size() -> int:
    """Number of machines that have a process with this one's local rank."""
    return len(_list_machines())


def cross_rank() -> int:
    """This process's number among those with the same local rank."""
    return _list_machines().index(_find_machine())


def _find_machine() -> tuple[int, ...]:
    """The ranks of this machine."""
    return next(ranks for ranks in collectives.nodes() if rank() in ranks)


def _list_machines() -> list[tuple[int, ...]]:
    """The ranks of each machine that has a process with this one's local rank."""
    return [ranks for ranks in collectives.nodes() if len(ranks) > local_rank()]


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: ARG001
    """Record nothing, and say so on rank 0."""
    if rank() == 0:
        print("hvd.start_timeline: no timeline is recorded; use torch.profiler", file=sys.stderr)


def stop_timeline() -> None:
    """Do nothing."""


def mpi_threads_supported() -> bool:
    """Raises ValueError, as Horovod without MPI does."""
    raise ValueError("There is no MPI here: processes talk over gloo and NCCL, also under mpirun")


def mpi_built() -> bool:
    """False: collectives never run on MPI. Nor on IBM's DDL or Intel's oneCCL."""
    return False


mpi_enabled = ddl_built = ccl_built = mpi_built
gloo_built = gloo_enabled = dist.is_gloo_available


def nccl_built() -> int:
    """The version of torch's NCCL, such as 22703 for 2.27.3; 0 if torch has none."""
    major, minor, patch = devices.get_nccl_version()[:3] or (0, 0, 0)
    return major * 10000 + minor * 100 + patch


def cuda_built() -> bool:
    """True if torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """True if torch was built with ROCm."""
    return torch.version.hip is not None
