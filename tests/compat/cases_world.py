"""Worlds that start and end: ranks on several machines, starting again, what is in flight at the
end, overlapping process sets.

Each of these cases calls `hvd.init` itself, behind all cases of `test_ranks` that share a world.
"""

import os
import threading
from pathlib import Path

import pytest
import torch

import compat.horovod as hvd


def test_nothing_of_the_shared_world_is_left() -> None:
    hvd.shutdown()
    assert not hvd.global_process_set.ranks and not hvd.is_initialized()
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    assert "pt_gloo_runloop" not in names  # one that still held a tensor would abort Python's end


def test_ranks_of_machines() -> None:
    """Machines of 2 and 1 processes: rank 1 is alone with local rank 1."""
    rank = int(os.environ["RANK"])
    before = os.environ.copy()
    os.environ |= {"LOCAL_RANK": "010"[rank], "LOCAL_WORLD_SIZE": "221"[rank]}
    os.environ |= {"GROUP_RANK": "001"[rank], "GROUP_WORLD_SIZE": "2"}
    hvd.init()
    hvd.init()  # does nothing
    numbers = (
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
    )
    assert numbers == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)][rank]
    hvd.shutdown()
    os.environ.clear()
    os.environ.update(before)


def test_what_is_in_flight_at_the_end_is_finished() -> None:
    """What is in flight at shutdown is finished first; a thread asks only after rank 0 has begun to
    shut down.
    """
    hvd.init()
    tensor = torch.ones(3)
    size = hvd.size()
    hvd.allreduce(torch.ones(1), name="now")
    hvd.allreduce_async(torch.ones(2), name="left")  # never asked for
    if hvd.rank() == 0:
        hvd.allreduce_async_(tensor, name="late", op=hvd.Sum)
    else:
        late = threading.Timer(
            0.2, lambda: hvd.synchronize(hvd.allreduce_async_(tensor, name="late", op=hvd.Sum))
        )
        late.start()
        late.join()
    hvd.shutdown()
    hvd.shutdown()  # does nothing
    assert tensor.tolist() == [size] * 3 and not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="not initialized"):
        hvd.allreduce(tensor)


def test_in_a_group_of_the_script() -> None:
    """It is used, with its ranks, and is left as it was."""
    group = torch.distributed
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    address = f"tcp://127.0.0.1:{os.environ['SECOND_PORT']}"
    group.init_process_group("gloo", init_method=address, rank=size - 1 - rank, world_size=size)
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (group.get_rank(), size) == (size - 1 - rank, size)
    values = [torch.full((3,), float(rank)), torch.full((3,), float(rank))]
    handle = hvd.allreduce_async_(values[0], op=hvd.Sum)  # while the script uses its group
    group.all_reduce(values[1])
    assert hvd.synchronize(handle).tolist() == values[1].tolist()
    hvd.shutdown()
    group.all_reduce(values[1])
    group.destroy_process_group()


def test_process_sets() -> None:
    """Sets that overlap, given to init or added later, in all collectives."""
    evens = hvd.ProcessSet([2, 0])
    odds = hvd.ProcessSet([1])
    with pytest.raises(ValueError, match="not initialized"):
        evens.size()
    hvd.init(process_sets=[evens, odds])
    rank = hvd.rank()
    size = hvd.size()
    assert (evens.ranks, evens.process_set_id, odds.process_set_id) == ([0, 2], 1, 2)
    own_set, other_set = (evens, odds) if rank % 2 == 0 else (odds, evens)
    assert own_set.included() and not other_set.included()
    assert (own_set.size(), own_set.rank(), hvd.global_process_set.size()) == (
        len(own_set.ranks),
        rank // 2,
        size,
    )
    with pytest.raises(ValueError, match=f"rank {rank} is not in"):
        other_set.rank()
    for call in (
        hvd.allreduce_async,
        hvd.allgather_async,
        hvd.alltoall_async,
        hvd.reducescatter_async,
    ):
        with pytest.raises(ValueError, match=f"rank {rank} is not in the process set"):
            call(torch.ones(2), process_set=other_set)
    # The same name at the same time in sets that share no rank.
    value = torch.full((2,), float(rank), requires_grad=True)
    average = hvd.allreduce(value, name="grad", process_set=own_set)
    assert average.tolist() == [sum(own_set.ranks) / len(own_set.ranks)] * 2
    (average * (rank + 1)).sum().backward()  # the gradient is reduced within the set, too
    assert value.grad.tolist() == [sum(r + 1 for r in own_set.ranks) / len(own_set.ranks)] * 2
    assert hvd.allgather(value[:1], process_set=own_set).tolist() == own_set.ranks
    root = own_set.ranks[-1]  # a rank of the world
    assert hvd.broadcast(value, root, process_set=own_set).tolist() == [root] * 2
    assert hvd.reducescatter(value, op=hvd.Sum, process_set=own_set).tolist() == [
        sum(own_set.ranks)
    ] * (2 // len(own_set.ranks))
    hvd.barrier(process_set=own_set)
    if own_set is evens:
        with pytest.raises(
            hvd.HorovodInternalError, match=r"root rank 1 is not in the process set \[0, 2\]"
        ):
            hvd.broadcast(value, 1, process_set=evens)
    for wrong in ([0, 2], evens, [], [0, 0]):
        with pytest.raises(ValueError, match=r"registered already|at least one rank"):
            hvd.add_process_set(wrong)
    for wrong in (["0"], 3):
        with pytest.raises(ValueError, match="list of ranks"):
            hvd.ProcessSet(wrong)
    pair = hvd.add_process_set([0, 1])
    if pair.included():
        assert hvd.allgather(torch.tensor([rank]), process_set=pair).tolist() == [0, 1]
    assert hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(pair) and not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(2), process_set=pair)
    assert hvd.add_process_set([0, 1]).process_set_id > own_set.process_set_id
    hvd.shutdown()
    assert evens.process_set_id is None
    with pytest.raises(ValueError, match="use process sets"):
        hvd.init(comm=[0])
    hvd.init(process_sets=[[0, 1], evens])
    assert evens.process_set_id == 2
    hvd.shutdown()
