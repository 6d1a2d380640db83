"""Collectives return the same on one process as on many, and a failing rank never leaves the others waiting."""

import contextlib
import os
import pickle
import socket
from datetime import timedelta
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


def test_one_process_without_a_group_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.setenv(variable, "7")
    assert identity() == (0, 1, True, 0, 1, True, 0)


def test_ranks_find_their_local_rank_and_node_without_a_launcher(processes: Processes) -> None:
    two = processes.run(identity, ranks=2)
    assert two == [(0, 2, True, 0, 2, True, 0), (1, 2, False, 1, 2, False, 0)]
    assert processes.run(identity, ranks=1) == [(0, 1, True, 0, 1, True, 0)]


def identity_from_launcher() -> tuple:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    try:
        return identity()
    finally:
        del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]


def test_local_rank_is_that_of_the_launcher(processes: Processes) -> None:
    assert processes.run(identity_from_launcher, ranks=2) == [(0, 2, True, 0, 1, True, 0), (1, 2, False, 0, 1, True, 0)]


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


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchange_between_ranks(processes: Processes, ranks: int) -> None:
    answers = processes.run(exchange, ranks=ranks)
    assert answers == [answers[0]] * ranks
    assert answers[0]["gathered"] == [{"rank": rank} for rank in range(ranks)]
    assert answers[0]["broadcast"] == [f"from {rank}" for rank in range(ranks)]
    assert answers[0]["counts"] == [[ranks, ranks * 2**60], [sum(range(ranks)), 5 * ranks]]
    assert answers[0]["untouched"]
    total = sum(range(1, ranks + 1))
    assert answers[0]["reduced"]["sum"] == {"b": total, "a": 0.5 * ranks}
    assert answers[0]["reduced"]["mean"] == {"b": total / ranks, "a": 0.5}
    assert answers[0]["reduced"]["max"] == {"b": ranks, "a": 0.5}
    assert answers[0]["reduced"]["min"] == {"b": 1, "a": 0.5}


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


def test_counts_must_be_integers() -> None:
    with pytest.raises(TypeError, match="float32"):
        collectives.reduce_counts(torch.ones(2))


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
    assert processes.run(use_groups, ranks=3)[0] == member  # a new default group gets new subgroups


def agree_beside_a_device_backend() -> tuple:
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        host = collectives.host_group()
        made_once = host is collectives.host_group() and host is not dist.group.WORLD
        return made_once, collectives.gather_objects(collectives.rank())


def test_the_host_has_its_own_group_if_the_default_group_is_for_devices(processes: Processes) -> None:
    assert processes.run(agree_beside_a_device_backend, ranks=2) == [(True, [0, 1])] * 2


def test_groups_without_a_process_group() -> None:
    assert (collectives.host_group(), collectives.node_group(), collectives.subgroup([0])) == (None, None, None)


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


def test_all_or_none_refuses_with_the_same_text_on_every_rank(processes: Processes) -> None:
    refusal = ("Refused", "lr -1 is negative")
    assert processes.run(fail_together, {2: Refused(refusal[1])}, ranks=3) == [refusal] * 3
    assert processes.run(fail_together, {0: Refused(refusal[1]), 1: Refused(refusal[1])}, ranks=2) == [refusal] * 2


def test_all_or_none_on_one_process_passes_the_error_through() -> None:
    assert fail_together({}) == ("none", "")
    assert fail_together({0: OSError("no such file")}) == ("OSError", "no such file")


def enter_in_turn(folder: str, failing: int, local: bool) -> tuple[str, list[str]]:
    rank = collectives.rank()
    seen: list[str] = []
    outcome = "none"
    try:
        with collectives.main_process_first("downloading", local=local):
            seen = sorted(os.listdir(folder))
            if rank == failing:
                raise OSError("disk full")
            open(f"{folder}/{rank}", "w").close()
    except Exception as error:
        outcome = str(error)
    collectives.barrier()
    return outcome, seen


def test_main_process_goes_first(processes: Processes, tmp_path: os.PathLike) -> None:
    answers = processes.run(enter_in_turn, str(tmp_path), -1, False, ranks=3)
    assert [outcome for outcome, _ in answers] == ["none"] * 3
    assert answers[0][1] == []
    assert all("0" in seen for _, seen in answers[1:])


def test_a_failing_main_process_neither_admits_nor_hangs_the_others(processes: Processes, tmp_path) -> None:
    told = "rank 0: while downloading: OSError: disk full"
    assert processes.run(enter_in_turn, str(tmp_path), 0, False, ranks=3) == [("disk full", []), (told, []), (told, [])]
    assert os.listdir(tmp_path) == []


def test_a_later_process_that_fails_tells_the_main_process(processes: Processes, tmp_path: os.PathLike) -> None:
    answers = processes.run(enter_in_turn, str(tmp_path), 1, False, ranks=2)
    assert [outcome for outcome, _ in answers] == ["rank 1: while downloading: OSError: disk full", "disk full"]


def enter_in_turn_on_two_nodes(folder: str, failing: int) -> tuple[str, list[str]]:
    os.environ["LOCAL_RANK"] = str(int(collectives.rank() == 2))  # ranks 0 and 1 are the first of their nodes
    try:
        return enter_in_turn(folder, failing, True)
    finally:
        del os.environ["LOCAL_RANK"]


def test_the_first_rank_of_every_node_goes_first(processes: Processes, tmp_path: os.PathLike) -> None:
    answers = processes.run(enter_in_turn_on_two_nodes, str(tmp_path), -1, ranks=3)
    assert [outcome for outcome, _ in answers] == ["none"] * 3
    assert answers[2][1] == ["0", "1"]


def test_a_failing_first_rank_of_a_node_stops_all_nodes(processes: Processes, tmp_path: os.PathLike) -> None:
    told = "rank 1: while downloading: OSError: disk full"
    answers = processes.run(enter_in_turn_on_two_nodes, str(tmp_path), 1, ranks=3)
    assert [outcome for outcome, _ in answers] == [told, "disk full", told]


def test_main_process_first_on_one_process(tmp_path: os.PathLike) -> None:
    assert enter_in_turn(str(tmp_path), -1, False) == ("none", [])
    assert enter_in_turn(str(tmp_path), 0, True) == ("disk full", ["0"])


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
