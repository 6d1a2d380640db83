"""The world of the Horovod API: ranks, starting again, a process group that the script has made."""

import os

import pytest
import torch
import torch.distributed as dist

import compat.horovod as hvd
from tests.compat.ranks import run_ranks


def numbers_of(node: list[int]) -> tuple[int, ...]:
    """Machines with node[0], node[1], ... processes; what each rank finds."""
    rank = int(os.environ["RANK"])
    number = next(place for place in range(len(node)) if rank < sum(node[: place + 1]))
    os.environ["LOCAL_RANK"] = str(rank - sum(node[:number]))
    os.environ |= {"LOCAL_WORLD_SIZE": str(node[number]), "GROUP_RANK": str(number), "GROUP_WORLD_SIZE": str(len(node))}
    hvd.init()
    hvd.init()  # does nothing
    numbers = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    assert hvd.mpi_ops.is_homogeneous() == (len({*node}) == 1)
    hvd.shutdown()
    return numbers


def test_ranks_on_several_machines() -> None:
    # Rank 1 is alone with local rank 1, for the second machine has one process.
    assert run_ranks(3, numbers_of, [2, 1]) == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)]


def starts_again() -> None:
    """Three worlds one after the other; between them there is no process group."""
    for start in range(3):
        hvd.init()
        assert hvd.is_initialized() and dist.is_initialized()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="same").tolist() == [hvd.size()] * 2
        handle = hvd.allreduce_async(torch.full((2,), float(start)), name="left")  # never asked for
        assert handle == 1
        hvd.shutdown()
        hvd.shutdown()  # does nothing
        assert not hvd.is_initialized() and not dist.is_initialized()
    with pytest.raises(ValueError, match="a world of all"):
        hvd.init(comm=[0])
    for wrong in (object(), 3):
        with pytest.raises(ValueError, match="a world of all"):
            hvd.init(comm=wrong)


def test_init_after_shutdown() -> None:
    run_ranks(2, starts_again)


def in_own_group() -> tuple[int, int]:
    """The group that the script has made is used, with its ranks, and is left as it was."""
    hvd.init()
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    values = [torch.full((3,), float(rank)), torch.full((3,), float(rank))]
    handle = hvd.allreduce_async_(values[0], op=hvd.Sum)  # while the script uses its group
    dist.all_reduce(values[1])
    assert hvd.synchronize(handle).tolist() == values[1].tolist()
    numbers = (hvd.local_rank(), hvd.local_size())
    hvd.shutdown()
    dist.all_reduce(values[1])
    return numbers


def test_a_process_group_of_the_script_is_joined(processes) -> None:
    assert processes.run(in_own_group, ranks=3) == [(0, 3), (1, 3), (2, 3)]
    assert processes.run(in_own_group, ranks=2) == [(0, 2), (1, 2)]  # the same processes, another group
