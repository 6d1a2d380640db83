"""Collectives return the same on one process as on many, and a failing rank never leaves the others
waiting.
"""

import contextlib
import os
import pickle
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from common.distributed import collectives
from common.errors import Refused
from tests.harness.odd_files import Malicious
from tests.harness.processes import Processes

ARRAYS = (
    np.arange(5.0).reshape(5, 1)[:, :0],
    np.array([b"", b"ab\0", b"c", None], object)[:3],
    np.array([2**60]),
)
OPERATIONS = ("sum", "mean", "max", "min")


def get_identity() -> tuple:
    c = collectives
    return (
        c.rank(),
        c.world_size(),
        c.is_main(),
        c.local_world_size(),
        c.is_local_main(),
        c.node_rank(),
    )


def exchange() -> dict:
    c = collectives
    rank = collectives.rank()
    counts = torch.tensor([[1, 2**60], [rank, 5]])
    values = {"b": rank + 1, "a": torch.tensor(0.5)}
    odd = {"loss": float("nan") if rank else 2.0}
    c.barrier()
    results = {
        "arrays": c.gather_to_main([array[rank:] for array in ARRAYS]),
        "gathered": c.gather_objects({"rank": rank}),
        "broadcast": [c.broadcast_object(f"from {rank}", root) for root in range(c.world_size())],
        "counts": c.reduce_counts(counts).tolist(),
        "untouched": counts.tolist() == [[1, 2**60], [rank, 5]],
    }
    for operation in OPERATIONS:
        results[operation] = c.reduce_dict(values, operation)
    results["nan"] = [str(c.reduce_dict(odd, operation)["loss"]) for operation in OPERATIONS]
    return results


@pytest.fixture(scope="module")
def exchanged(processes: Processes) -> dict[int, list[dict]]:
    """What each rank of one and of three has after its exchanges, by number of ranks."""
    return {1: [exchange()], 3: processes.run(exchange, ranks=3)}


EXPECTED = {  # of n ranks r with the values r + 1
    "gathered": lambda ranks: [{"rank": rank} for rank in ranks],
    "broadcast": lambda ranks: [f"from {rank}" for rank in ranks],
    "counts": lambda ranks: [[len(ranks), len(ranks) * 2**60], [sum(ranks), len(ranks) * 5]],
    "untouched": lambda ranks: True,
    "sum": lambda ranks: {"b": sum(ranks) + len(ranks), "a": 0.5 * len(ranks)},
    "mean": lambda ranks: {"b": sum(ranks) / len(ranks) + 1, "a": 0.5},
    "max": lambda ranks: {"b": float(len(ranks)), "a": 0.5},
    "min": lambda ranks: {"b": 1.0, "a": 0.5},
    "nan": lambda ranks: ["nan" if len(ranks) > 1 else "2.0"] * 4,
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", EXPECTED)
def test_one_process_and_several_exchange_alike(exchanged, name: str, ranks: int) -> None:
    expected = EXPECTED[name](range(ranks))
    assert [results[name] for results in exchanged[ranks]] == [expected] * ranks


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_main_process_alone_gathers_arrays(exchanged, ranks: int) -> None:
    arrays_by_rank = exchanged[ranks][0]["arrays"]
    for results in exchanged[ranks][1:]:
        assert results["arrays"] is None
    for rank, arrays in enumerate(arrays_by_rank):
        for actual, array in zip(arrays, ARRAYS, strict=True):
            expected = array[rank:]
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            assert actual.tolist() == expected.tolist()


def receive_a_pickle(marker: str) -> list[str]:
    """Rank 1 sends one in each way in which objects travel; the errors of rank 0."""
    errors = []
    pickled = pickle.dumps(Malicious(marker))
    fake = mock.Mock()
    fake.dumps.return_value.encode.return_value = pickled
    patches = contextlib.nullcontext()
    if collectives.rank():
        patches = mock.patch.multiple(collectives, json=fake, _pack=lambda _: pickled)
    for send in (
        collectives.gather_objects,
        collectives.gather_to_main,
        lambda item: collectives.broadcast_object(item, source=1),
    ):
        with patches:
            try:
                send([])
            except (ValueError, SafetensorError) as error:
                errors.append(type(error).__name__)
    return errors


def test_a_received_pickle_is_not_executed(processes: Processes, tmp_path) -> None:
    marker = tmp_path / "executed"
    errors, _ = processes.run(receive_a_pickle, str(marker), ranks=2)
    assert not marker.exists()
    assert errors == ["UnicodeDecodeError", "SafetensorError", "UnicodeDecodeError"]
    pickle.loads(pickle.dumps(Malicious(marker)))
    assert marker.exists(), "the pickle of this test would execute"


def differ() -> list[str]:
    """What ranks are told whose names or values differ, and one value that does not."""
    name, value = ("top1", "4a") if collectives.rank() == 1 else ("loss", "3f")
    with pytest.raises(ValueError, match=r"loss|top1") as names:
        collectives.reduce_dict({"lr": 1.0, name: 1.0})
    with pytest.raises(Refused) as values:
        collectives.check_same_on_all_ranks("data", value)
    return [str(names.value), str(values.value), collectives.check_same_on_all_ranks("data", "5b")]


def test_a_name_or_value_that_differs_is_named_on_every_rank(processes: Processes) -> None:
    values = "data differs between ranks: 3f on rank 0 ({0}), 4a on rank 1 ({0})".format(
        socket.gethostname()
    )
    expected = ["reduce_dict: only one of rank 0 and rank 1 has loss, top1", values, "5b"]
    assert processes.run(differ, ranks=3) == [expected] * 3


def use_groups() -> tuple:
    """Rank 1 is on another machine: places, sums of 10^rank over a pair and over a node, timeout,
    and collectives begun.
    """
    rank = collectives.rank()
    counts = [collectives.count_collectives()]
    collectives.set_timeout(timedelta(seconds=2 * 10**7))
    pair = collectives.subgroup([2, 0])
    totals = [torch.tensor(10**rank) for _ in range(2)]
    if rank != 1:
        dist.all_reduce(totals[0], group=pair)
    assert collectives.subgroup((0, 2)) is pair and collectives.host_group() is dist.group.WORLD
    with mock.patch.object(socket, "gethostname", return_value="aba"[rank]):
        dist.all_reduce(totals[1], group=collectives.node_group())
    options = collectives.node_group()._get_backend(torch.device("cpu")).options
    counts += [
        collectives.count_collectives(),
        collectives.barrier() or collectives.count_collectives(),
    ]
    pair_total, node_total = map(int, totals)
    return get_identity(), pair_total, node_total, options._timeout.total_seconds(), counts


def test_groups_are_of_the_ranks_that_share_a_host(processes: Processes) -> None:
    """They are made once, and have the timeout that was set. Ranks of the same groups count the
    same collectives.
    """
    answers = processes.run(use_groups, ranks=3)
    assert [answer[:-1] for answer in answers] == [
        ((0, 3, True, 2, True, 0), 101, 101, 2e7),
        ((1, 3, False, 1, True, 1), 10, 10, 2e7),
        ((2, 3, False, 2, False, 0), 101, 101, 2e7),
    ]
    counts = [answer[-1] for answer in answers]
    assert counts[0] == counts[2] and sorted(set(counts[0])) == counts[0]
    assert get_identity() == (0, 1, True, 1, True, 0)


def fail_together(failures: dict[int, BaseException]) -> str:
    try:
        with collectives.all_or_none("loading data"):
            if collectives.rank() in failures:
                raise failures[collectives.rank()]
        outcome = "none"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
    collectives.barrier()  # all ranks are still in step
    return outcome


NEGATIVE = Refused("lr -1 is negative")
LOST = "Refused: rank 1: while loading data: OSError: no such file"
BOTH = (
    "Refused: rank 0: while loading data: OSError: a b; rank 2: while loading data: "
    "KeyboardInterrupt: "
)
MIXED = (
    "Refused: rank 0: while loading data: Refused: lr -1 is negative; rank 2: while loading data: "
    "OSError: gone"
)
REFUSAL = "Refused: lr -1 is negative"


@pytest.mark.parametrize(
    "failures, outcomes",
    [
        ({}, ["none"] * 3),
        ({0: NEGATIVE}, [REFUSAL]),
        ({1: OSError("no such file")}, [LOST, "OSError: no such file", LOST]),
        (
            {0: OSError("a\nb"), 2: KeyboardInterrupt()},
            ["OSError: a\nb", BOTH, "KeyboardInterrupt: "],
        ),
        ({0: NEGATIVE, 2: NEGATIVE}, [REFUSAL] * 3),
        ({0: NEGATIVE, 2: OSError("gone")}, [REFUSAL, MIXED, "OSError: gone"]),
    ],
)
def test_all_or_none_raises_on_every_rank_or_on_none(
    processes: Processes, failures: dict, outcomes: list[str]
) -> None:
    """Also without a process group."""
    ranks = len(outcomes)
    if ranks > 1:
        assert processes.run(fail_together, failures, ranks=ranks) == outcomes
    else:
        assert [fail_together(failures)] == outcomes


def enter_in_turn(folder: str, failing: int) -> tuple[str, list[str]]:
    """Rank 2 is the second of its node. What came of it, and which ranks had been there before."""
    rank = collectives.rank()
    outcome = "none"
    seen = []
    with mock.patch.object(socket, "gethostname", return_value="aba"[rank]):
        collectives.nodes()
    try:
        with collectives.main_process_first("downloading"):
            seen = sorted(os.listdir(folder))
            if rank == failing:
                raise OSError("disk full")
            Path(folder, str(rank)).touch()
    except Exception as error:
        outcome = str(error)
    collectives.barrier()
    return outcome, seen


def test_the_first_rank_of_a_node_goes_first(processes: Processes, tmp_path) -> None:
    def run(failing: int) -> list[tuple[str, list[str]]]:
        return processes.run(enter_in_turn, tempfile.mkdtemp(dir=tmp_path), failing, ranks=3)

    answers = run(-1)
    assert [outcome for outcome, _ in answers] == ["none"] * 3 and answers[2][1] == ["0", "1"]
    message = "rank {}: while downloading: OSError: disk full"
    (first, _), (second, _), (last, seen) = run(1)
    assert (first, second, last, seen) == (message.format(1), "disk full", message.format(1), []), (
        "the last one stays out"
    )
    assert [outcome for outcome, _ in run(2)] == [message.format(2), message.format(2), "disk full"]
