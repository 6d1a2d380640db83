"""Collectives return the same on one process as on many, and a failing rank never leaves the others waiting."""

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
from tests.harness.processes import Processes


def identity() -> tuple:
    c = collectives
    return c.rank(), c.world_size(), c.is_main(), c.local_rank(), c.local_world_size(), c.is_local_main(), c.node_rank()


def identity_from_launcher() -> tuple:
    with mock.patch.dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"):
        return identity()


def test_ranks_know_their_place_from_the_launcher_or_find_it(processes: Processes, monkeypatch) -> None:
    """One process without a group ignores the environment."""
    two = processes.run(identity, ranks=2)
    assert two == [(0, 2, True, 0, 2, True, 0), (1, 2, False, 1, 2, False, 0)]
    assert processes.run(identity_from_launcher, ranks=2) == [(0, 2, True, 0, 1, True, 0), (1, 2, False, 0, 1, True, 0)]
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.setenv(variable, "7")
    assert identity() == (0, 1, True, 0, 1, True, 0)


def exchange() -> dict:
    rank = collectives.rank()
    counts = torch.tensor([[1, 2**60], [rank, 5]])
    collectives.barrier()
    return {
        "gathered": collectives.gather_objects({"rank": rank}),
        "broadcast": [
            collectives.broadcast_object(f"from {rank}", source) for source in range(collectives.world_size())
        ],
        "counts": collectives.reduce_counts(counts).tolist(),
        "untouched": counts.tolist() == [[1, 2**60], [rank, 5]],
        "reduced": {
            op: collectives.reduce_dict({"b": rank + 1, "a": torch.tensor(0.5)}, op)
            for op in ("sum", "mean", "max", "min")
        },
    }


def test_exchange_on_one_process() -> None:
    one = exchange()
    assert one["gathered"] == [{"rank": 0}]
    assert one["broadcast"] == ["from 0"]
    assert one["counts"] == [[1, 2**60], [0, 5]]
    assert all(values == {"b": 1.0, "a": 0.5} for values in one["reduced"].values())


def test_exchange_between_ranks(processes: Processes) -> None:
    answers = processes.run(exchange, ranks=3)
    assert answers == [answers[0]] * 3
    assert answers[0] == {
        "gathered": [{"rank": rank} for rank in range(3)],
        "broadcast": ["from 0", "from 1", "from 2"],
        "counts": [[3, 3 * 2**60], [3, 15]],
        "untouched": True,
        "reduced": {
            "sum": {"b": 6.0, "a": 1.5},
            "mean": {"b": 2.0, "a": 0.5},
            "max": {"b": 3.0, "a": 0.5},
            "min": {"b": 1.0, "a": 0.5},
        },
    }


ARRAYS = (np.arange(5.0).reshape(5, 1)[:, :0], np.array([b"", b"ab\0", b"c", None], object)[:3], np.array([2**60]))


def gather_arrays() -> list[list[np.ndarray]] | None:
    return collectives.gather_to_main([array[collectives.rank() :] for array in ARRAYS])


def test_arrays_are_gathered_on_rank_0(processes: Processes) -> None:
    alone, [two, nothing] = gather_arrays(), processes.run(gather_arrays, ranks=2)
    assert nothing is None and len(alone) == 1 and len(two) == 2
    for start, gathered in [(0, alone[0]), (0, two[0]), (1, two[1])]:
        for mine, theirs in zip(ARRAYS, gathered, strict=True):
            assert mine.dtype == theirs.dtype and mine[start:].shape == theirs.shape
            assert mine[start:].tolist() == theirs.tolist()


class Payload:
    def __init__(self, marker: str):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def be_sent_a_pickle(marker: str) -> list[str]:
    """Rank 1 sends one in each way in which objects travel; what came of it on rank 0."""
    sent, told = Payload(marker) if collectives.rank() else [], []
    for send in (
        collectives.gather_objects,
        collectives.gather_to_main,
        lambda item: collectives.broadcast_object(item, source=1),
    ):
        with contextlib.ExitStack() as forging:
            if collectives.rank():
                pickled = pickle.dumps(sent)
                json = forging.enter_context(mock.patch.object(collectives, "json", create=True))
                json.dumps.return_value.encode.return_value = pickled
                forging.enter_context(mock.patch.object(collectives, "_pack", create=True, return_value=pickled))
            try:
                send(sent)
                told.append("")
            except (ValueError, SafetensorError) as error:
                told.append(type(error).__name__)
    return told


def test_a_received_pickle_is_not_executed(processes: Processes, tmp_path) -> None:
    marker = tmp_path / "executed"
    told, _ = processes.run(be_sent_a_pickle, str(marker), ranks=2)
    assert not marker.exists()
    assert told == ["UnicodeDecodeError", "SafetensorError", "UnicodeDecodeError"]
    pickle.loads(pickle.dumps(Payload(str(marker))))
    assert marker.exists(), "the pickle of this test would execute"


def reduce_not_a_number(op: str) -> float:
    return collectives.reduce_dict({"loss": float("nan") if collectives.rank() == 1 else 2.0}, op)["loss"]


def test_reductions_keep_nan(processes: Processes) -> None:
    for op in ("sum", "mean", "max", "min"):
        assert all(value != value for value in processes.run(reduce_not_a_number, op, ranks=3))


def reduce_different_names() -> str:
    with pytest.raises(ValueError, match=r"loss|top1") as raised:
        collectives.reduce_dict({"lr": 1.0, "loss": 1.0} if collectives.rank() != 1 else {"lr": 1.0, "top1": 1.0})
    return str(raised.value)


def test_differing_names_are_named_on_every_rank(processes: Processes) -> None:
    assert set(processes.run(reduce_different_names, ranks=3)) == {
        "reduce_dict: only one of rank 0 and rank 1 has loss, top1"
    }


def compare(others: str) -> str:
    try:
        return collectives.same_on_all_ranks("data", "3f" if collectives.is_main() else others)
    except Refused as refusal:
        return str(refusal)


def test_a_value_that_differs_between_ranks_is_refused_on_every_rank(processes: Processes) -> None:
    assert processes.run(compare, "3f", ranks=2) == ["3f"] * 2
    said = "data differs between ranks: 3f on rank 0 ({0}), 4a on rank 1 ({0})".format(socket.gethostname())
    assert processes.run(compare, "4a", ranks=2) == [said] * 2
    assert compare("4a") == "3f"


def use_groups() -> dict:
    rank = collectives.rank()
    pair = collectives.subgroup([2, 0])
    total = torch.tensor(10**rank)
    if rank != 1:
        dist.all_reduce(total, group=pair)
    return {
        "total": int(total),
        "same": collectives.subgroup((0, 2)) is pair,
        "host": collectives.host_group() is dist.group.WORLD,
        "node": dist.get_world_size(collectives.node_group()),
    }


def test_subgroups_are_made_once_and_reduce_among_themselves(processes: Processes) -> None:
    member = {"total": 101, "same": True, "host": True, "node": 3}
    assert processes.run(use_groups, ranks=3) == [member, {**member, "total": 10}, member]


def find_uneven_nodes() -> tuple:
    total = torch.tensor(10 ** collectives.rank())
    with mock.patch.object(socket, "gethostname", return_value="b" if collectives.rank() == 1 else "a"):
        dist.all_reduce(total, group=collectives.node_group())
        return identity(), int(total)


def test_nodes_are_found_by_host_and_may_differ_in_size(processes: Processes) -> None:
    assert processes.run(find_uneven_nodes, ranks=3) == [
        ((0, 3, True, 0, 2, True, 0), 101),
        ((1, 3, False, 0, 1, True, 1), 10),
        ((2, 3, False, 1, 2, False, 0), 101),
    ]


def fail_together(failures: dict[int, Exception]) -> tuple[str, str]:
    outcome = ("none", "")
    try:
        with collectives.all_or_none("loading data"):
            if collectives.rank() in failures:
                raise failures[collectives.rank()]
    except BaseException as error:
        outcome = (type(error).__name__, str(error))
    collectives.barrier()  # all ranks are still in step
    return outcome


def test_all_or_none_raises_on_every_rank_or_on_none(processes: Processes) -> None:
    assert processes.run(fail_together, {}, ranks=3) == [("none", "")] * 3
    told = ("Refused", "rank 1: while loading data: OSError: no such file")
    assert processes.run(fail_together, {1: OSError("no such file")}, ranks=3) == [
        told,
        ("OSError", "no such file"),
        told,
    ]
    both = {0: OSError("a\nb"), 2: KeyboardInterrupt()}
    assert processes.run(fail_together, both, ranks=3) == [
        ("OSError", "a\nb"),
        ("Refused", "rank 0: while loading data: OSError: a b; rank 2: while loading data: KeyboardInterrupt: "),
        ("KeyboardInterrupt", ""),
    ]
    refusal = ("Refused", "lr -1 is negative")
    assert processes.run(fail_together, {0: Refused(refusal[1]), 2: Refused(refusal[1])}, ranks=3) == [refusal] * 3
    assert fail_together({0: OSError("no such file")}) == ("OSError", "no such file")


def enter_in_turn(folder: str, failing: int) -> tuple[str, list[str]]:
    """Rank 2 is the second of its node. What came of it, and which ranks had been there before."""
    rank, outcome, seen = collectives.rank(), "none", []
    try:
        with (
            mock.patch.dict(os.environ, LOCAL_RANK=str(int(rank == 2))),
            collectives.main_process_first("downloading"),
        ):
            seen = sorted(os.listdir(folder))
            if rank == failing:
                raise OSError("disk full")
            Path(folder, str(rank)).touch()
    except Exception as error:
        outcome = str(error)
    collectives.barrier()
    return outcome, seen


def test_the_first_rank_of_a_node_goes_first_and_a_failure_reaches_all(processes: Processes, tmp_path) -> None:
    def run(failing: int) -> list[tuple[str, list[str]]]:
        return processes.run(enter_in_turn, tempfile.mkdtemp(dir=tmp_path), failing, ranks=3)

    answers = run(-1)
    assert [outcome for outcome, _ in answers] == ["none"] * 3 and answers[2][1] == ["0", "1"]
    told = "rank {}: while downloading: OSError: disk full"
    (first, _), (second, _), (last, seen) = run(1)
    assert (first, second, last, seen) == (told.format(1), "disk full", told.format(1), []), "the last one stays out"
    assert [outcome for outcome, _ in run(2)] == [told.format(2), told.format(2), "disk full"]


def count_collectives() -> list[int]:
    counts = [collectives.begun()]
    collectives.barrier()
    counts.append(collectives.begun())
    dist.all_reduce(torch.ones(1), group=collectives.subgroup([0, 1]))
    collectives.subgroup([1])  # of which rank 0 is no member
    counts.append(collectives.begun())
    return counts


def test_ranks_count_the_same_collectives_over_any_groups(processes: Processes) -> None:
    first, second = processes.run(count_collectives, ranks=2)
    assert first == second and sorted(set(first)) == first
    assert processes.run(collectives.begun, ranks=1) == [0]


def timeouts() -> list[float]:
    collectives.give_up_after(timedelta(seconds=2 * 10**7))
    groups = collectives.node_group(), collectives.subgroup([0])
    of_members = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in of_members]


def test_groups_have_the_timeout_that_was_set(processes: Processes) -> None:
    assert processes.run(timeouts, ranks=2) == [[2e7, 2e7], [2e7]]
