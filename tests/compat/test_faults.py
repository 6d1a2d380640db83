"""A rank that dies, leaves, stalls or forgets `shutdown` keeps nobody waiting: the others raise, or
end, in bounded time.
"""

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import compat.horovod as hvd
from tests.harness.forked import Ended, Forks
from tests.harness.launching import ROOT, find_free_port, inherit_environment


def end_ranks(forks: Forks, case: functools.partial, **environment: object) -> list[Ended]:
    """How each of three ranks ended that ran `case`."""
    variables = {name: str(value) for name, value in environment.items()}
    return [rank.end() for rank in forks.start_main(3, case, variables)]


def is_lost(lost: int, how: str) -> None:
    """A rank is killed or stopped; the others raise within seconds, also from a collective that is
    under way.
    """
    hvd.init()
    rank = hvd.rank()
    began = time.monotonic()
    big = torch.ones(8_000_000)
    processes = hvd.allgather_object(os.getpid())
    handles = [
        hvd.allreduce_async(big, name=f"{number}")
        for number in range(20 * (how == "killed in one"))
    ]
    if rank == lost:
        if handles:
            hvd.synchronize(handles[0])  # the others are under way
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)

    def finish() -> None:
        for handle in handles:
            hvd.synchronize(handle)
        hvd.allreduce(torch.ones(3))

    with pytest.raises(hvd.HorovodInternalError, match="a rank has died, left or stopped"):
        finish()
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(3))
    hvd.shutdown()
    assert not hvd.is_initialized()
    with contextlib.suppress(ProcessLookupError):
        os.kill(processes[lost], signal.SIGKILL)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("lost, how", [(0, "killed"), (1, "killed in one"), (1, "stopped")])
def test_a_lost_rank_is_noticed_at_once(forks, lost: int, how: str) -> None:
    ends = end_ranks(forks, functools.partial(is_lost, lost, how), HOROVOD_GLOO_TIMEOUT_SECONDS=10)
    assert [end.code for end in ends] == [-9 if rank == lost else 0 for rank in range(3)], ends


def stall() -> None:
    """Rank 1 does not ask, and waits for nothing: this is reported after
    HOROVOD_STALL_CHECK_TIME_SECONDS, and fails later.
    """
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("compat.horovod").addHandler(handler)
    hvd.init()
    if hvd.rank() == 1:
        while not os.path.exists(os.environ["DONE"]):
            time.sleep(0.05)
    else:
        with pytest.raises(
            hvd.HorovodInternalError,
            match=r"'slow' waits for ranks \[1\].* not submitted it in 4 s",
        ):
            hvd.allreduce(torch.ones(3), name="slow")
        if hvd.rank() == 0:
            open(os.environ["DONE"], "w").close()
    hvd.shutdown()
    hvd.init()  # all ranks live, so a new world is possible
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [3, 3, 3]
    hvd.shutdown()
    print(json.dumps(records))


def test_a_stall_is_reported_with_its_ranks_and_ended_on_request(forks, tmp_path) -> None:
    times = {"HOROVOD_STALL_CHECK_TIME_SECONDS": 2, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": 4}
    ends = end_ranks(forks, functools.partial(stall), **times, DONE=tmp_path / "done")
    assert [end.code for end in ends] == [0] * 3, ends
    [report], *other_reports = (json.loads(end.stdout) for end in ends)
    assert (
        "allreduce 'slow' waits for ranks [1], which have not submitted it for more than 2 s"
        in report
    )
    assert other_reports == [[], []]


PROGRAM = """
    import atexit, sys, torch
    atexit.register(print, "other handlers run")
    import compat.horovod as hvd
    assert not torch.distributed.is_initialized()  # nothing is started at import
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    hvd.allreduce(torch.ones(3))
    if hvd.rank() == 1:
        hvd.allreduce_async(torch.ones(3), name="only here")
        sys.exit(7)
    try:
        hvd.allreduce(torch.ones(3), name="needs rank 1")
    except hvd.HorovodInternalError as error:
        print(error)
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=pair).tolist() == [2, 2, 2]
    if hvd.rank() == 0:
        raise KeyError("uncaught")
    hvd.shutdown()
"""


def test_a_rank_that_leaves_without_shutdown() -> None:
    """It ends in time, with its own code and output. What needs it fails, and the others go on
    among themselves.
    """
    world = {
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)],
            env=inherit_environment()
            | world
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    ends = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 7, 0], ends
    for stdout, _ in (ends[0], ends[2]):
        assert stdout.startswith("rank 1 has shut down") and stdout.endswith(
            "other handlers run\n"
        ), ends
    assert "KeyError: 'uncaught'" in ends[0][1] and ends[1] == ("other handlers run\n", ""), ends
