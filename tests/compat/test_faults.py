"""A rank that dies, leaves, stalls or forgets `shutdown` keeps nobody waiting: the others raise, or end, in bounded time."""

import contextlib
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import compat.horovod as hvd
from compat.horovod import engine
from tests.compat.ranks import run_ranks
from tests.harness.launching import ROOT, free_port, inherited


def dies(moment: str) -> tuple[float, str] | None:
    """Rank 1 is killed; the others raise within seconds, also from a collective that is under way, and can tell who died."""
    hvd.init()
    rank, began = hvd.rank(), time.monotonic()
    big = torch.ones(8_000_000)
    begin = {
        "before one": lambda number: None,
        "within collectives": lambda number: functools.partial(
            hvd.synchronize, hvd.allreduce_async(big, name=f"{number}")
        ),
        "within ordered ones": lambda number: engine.current().ordered_allreduce(big.clone()).wait,
    }[moment]

    def work() -> None:
        waits = [begin(number) for number in range(20)]
        for wait in filter(None, waits):
            wait()
            if rank == 1:  # the first is done, the others are under way
                break
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(3))

    with pytest.raises(hvd.HorovodInternalError) as raised:
        work()
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(3))
    if moment == "before one":
        hvd.shutdown()
        assert not hvd.is_initialized()
    return time.monotonic() - began, str(raised.value)


@pytest.mark.parametrize("moment", ["before one", "within collectives", "within ordered ones"])
def test_a_death_is_noticed_at_once(moment: str) -> None:
    answers = run_ranks(3, dies, moment, dying=1)
    assert answers[1] is None
    for seconds, text in (answers[0], answers[2]):
        assert seconds < 20
        assert "rank 1 died" in text


def rank_0_dies() -> None:
    hvd.init()
    hvd.allreduce(torch.ones(3))
    if hvd.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.HorovodInternalError, match="rank 0"):
        hvd.allreduce(torch.ones(3))


def test_the_death_of_rank_0_which_negotiates_too() -> None:
    run_ranks(3, rank_0_dies, dying=0)


def leaves() -> str:
    """Rank 1 ends normally, without shutdown: what needs it fails, and the others go on among themselves."""
    hvd.init(process_sets=[[0, 2]])
    others = [0, 2]
    if hvd.rank() == 1:
        return ""
    with pytest.raises(hvd.HorovodInternalError, match="rank 1 has shut down"):
        hvd.allreduce(torch.ones(3), name="needs it")
    pair = next(iter(group for number, group in engine.current().groups.items() if number and group.ranks == others))
    assert pair.ranks == others
    handle = engine.current().submit("allreduce", [torch.ones(3)], set_id=1)
    assert hvd.synchronize(handle).tolist() == [2, 2, 2]
    hvd.shutdown()
    return "went on"


def test_an_orderly_end_of_one_rank() -> None:
    assert run_ranks(3, leaves) == ["went on", "", "went on"]


def flushes() -> list[float]:
    """What is in flight at shutdown is finished first; a thread of rank 1 asks only after rank 0 has begun to shut down."""
    hvd.init()
    tensor = torch.ones(3)
    if hvd.rank() == 0:
        hvd.allreduce_async_(tensor, name="late", op=hvd.Sum)
        hvd.allreduce(torch.ones(1), name="now")
        hvd.shutdown()
    else:
        hvd.allreduce(torch.ones(1), name="now")
        late = threading.Timer(0.2, lambda: hvd.synchronize(hvd.allreduce_async_(tensor, name="late", op=hvd.Sum)))
        late.start()
        late.join()
        hvd.shutdown()
    with pytest.raises(ValueError, match="not initialized"):
        hvd.allreduce(tensor)
    return tensor.tolist()


def test_shutdown_finishes_what_is_in_flight() -> None:
    assert run_ranks(2, flushes) == [[2, 2, 2]] * 2


def stalls() -> list[str]:
    """Rank 1 does not ask, and waits for nothing: this is reported after HOROVOD_STALL_CHECK_TIME_SECONDS, and fails later."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("compat.horovod").addHandler(handler)
    hvd.init()
    if hvd.rank() == 1:
        while not os.path.exists(os.environ["DONE"]):
            time.sleep(0.05)
    else:
        with pytest.raises(hvd.HorovodInternalError, match=r"'slow' waits for ranks \[1\].* not submitted it in 2 s"):
            hvd.allreduce(torch.ones(3), name="slow")
        if hvd.rank() == 0:
            open(os.environ["DONE"], "w").close()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [3, 3, 3]  # the world is usable
    hvd.shutdown()
    return records


def test_a_stall_is_reported_with_the_missing_ranks_and_ended_on_request(tmp_path) -> None:
    settings = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": 1,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": 2,
        "DONE": tmp_path / "done",
    }
    reports, *others = run_ranks(3, stalls, env=settings)
    [report] = reports
    assert "allreduce 'slow' waits for ranks [1] for more than 1 s" in report
    assert "ranks [0, 2] have submitted it" in report or "ranks [2, 0] have submitted it" in report
    assert others == [[], []]


def different_buckets() -> None:
    """The caller has to prevent it; at the latest, what follows fails."""
    hvd.init()
    work = engine.current().ordered_allreduce(torch.ones(3 + hvd.rank()))
    with contextlib.suppress(hvd.HorovodInternalError):
        work.wait()
    with pytest.raises(hvd.HorovodInternalError, match="ordered all-reduce"):
        hvd.allreduce(torch.ones(3))
    hvd.shutdown()
    hvd.init()  # all ranks live, so a new world is possible
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
    hvd.shutdown()


def test_ordered_all_reduces_of_different_tensors_end_the_world() -> None:
    run_ranks(2, different_buckets)


PROGRAM = """
    import sys, torch
    import compat.horovod as hvd
    assert not torch.distributed.is_initialized()  # nothing is started at import
    hvd.init()
    hvd.allreduce(torch.ones(3))
    if hvd.rank() == 1:
        hvd.allreduce_async(torch.ones(3), name="only here")
        sys.exit(7)
    try:
        hvd.allreduce(torch.ones(3), name="needs rank 1")
    except hvd.HorovodInternalError as error:
        print(error)
"""


def test_the_interpreter_ends_where_shutdown_is_forgotten() -> None:
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)],
            env=inherited() | world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    ends = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 7], ends
    # Rank 1, which finishes what is in flight first, and rank 0 wait for each other; or rank 1 has left before.
    assert re.search("rank 1 has shut down|wait for each other", ends[0][0]), ends
    assert all("Error" not in stderr for _, stderr in ends), ends
