"""The world of the Horovod API: ranks, starting again, a process group that the script has made, the timeline."""

import json
import os
from pathlib import Path

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
    assert run_ranks(3, numbers_of, [3]) == [(0, 3, 0, 3, 0, 1), (1, 3, 1, 3, 0, 1), (2, 3, 2, 3, 0, 1)]
    # Rank 1 is alone with local rank 1, for the second machine has one process.
    assert run_ranks(3, numbers_of, [2, 1]) == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)]
    assert run_ranks(4, numbers_of, [2, 2])[1:3] == [(1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2)]


def starts_again(folder: str) -> list[str]:
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
    return os.listdir("/proc/self/task")


def test_init_after_shutdown(tmp_path: Path) -> None:
    run_ranks(2, starts_again, str(tmp_path))


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


def timed(folder: str) -> None:
    hvd.init()  # the first file is named by the environment
    hvd.allreduce(torch.ones(3, 2), name="first")
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(3), name="not recorded")
    with pytest.raises(OSError) if hvd.rank() == 0 else pytest.raises(ZeroDivisionError):
        hvd.start_timeline(f"{folder}/no/such/folder.json")
        _ = 1 / 0
    hvd.start_timeline(f"{folder}/second.json", mark_cycles=True)
    handles = [hvd.allreduce_async(torch.ones(3), name=f"{n}") for n in range(3)]
    handles += [hvd.allgather_async(torch.ones(2), name="rows"), hvd.broadcast_async(torch.ones(2), 0, name="root")]
    for handle in handles:
        hvd.synchronize(handle)
    if hvd.rank() == 0:
        hvd.allreduce_async(torch.ones(2), name="mismatch")
        hvd.barrier()
    else:
        hvd.allreduce_async(torch.ones(3), name="mismatch")
        hvd.barrier()
    hvd.shutdown()  # completes the file


def test_the_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    run_ranks(2, timed, str(tmp_path), env={"HOROVOD_TIMELINE": tmp_path / "first.json"})
    events = json.loads((tmp_path / "first.json").read_text())
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert [*rows] == ["first"]
    phases = [
        (event["ph"], event["name"]) for event in events if event.get("tid") == rows["first"] and event["ph"] != "M"
    ]
    # Both ranks are ready at their instants; then the collective, and the library that does it.
    assert phases[0] == ("B", "NEGOTIATE_ALLREDUCE") and phases[3] == ("E", "NEGOTIATE_ALLREDUCE")
    assert sorted(phases[1:3]) == [("i", "0"), ("i", "1")]
    assert phases[4:] == [("X", "ALLREDUCE"), ("X", "GLOO")]
    reduce = next(event for event in events if event["name"] == "ALLREDUCE")
    assert reduce["args"] == {"dtype": ["float32"], "shape": [[3, 2]]}
    end = next(event["ts"] for event in events if event["ph"] == "E")
    assert 0 < end <= reduce["ts"] and reduce["dur"] > 0

    events = json.loads((tmp_path / "second.json").read_text())
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows >= {"0", "1", "2", "rows", "root", "cycles", "mismatch"} and "not recorded" not in rows
    names = {event["name"] for event in events}
    assert names >= {"ALLGATHER", "NEGOTIATE_BROADCAST", "BROADCAST", "CYCLE_START", "FAILED"}
    assert {event["ph"] for event in events} == {"M", "B", "i", "E", "X"}
    for event in events:  # what Perfetto asks of an event
        assert {"name", "ph", "pid"} <= event.keys() and (event["ph"] == "M" or event["ts"] >= 0)
