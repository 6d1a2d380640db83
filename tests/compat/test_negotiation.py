"""The negotiation decides alike whatever the order of requests: what runs, fails, is fused, and who waits for ever."""

import itertools
import random
from typing import Any

import pytest

from compat.horovod.negotiation import ADASUM, AVERAGE, JOIN, MAX, SUM, WORLD, Decision, Negotiator, Request, fused


def tensor(name: str, *shape: int, set_id: int = WORLD, kind: str = "allreduce", **fields: Any) -> Request:
    return Request(kind, name, set_id, ["float32"], [[*shape]], **fields)


def ran(decisions: list[Decision]) -> list[str]:
    return [
        item["request"]["name"] for each in decisions if each.message["do"] == "run" for item in each.message["items"]
    ]


def failed(decisions: list[Decision]) -> dict[str, tuple[list[int], str]]:
    return {
        each.message["key"][1]: (sorted(each.ranks), each.message["error"])
        for each in decisions
        if each.message["do"] == "fail"
    }


def test_each_collective_runs_once_when_the_last_rank_asks_in_any_order() -> None:
    for seed in range(50):
        asks = [(rank, f"{number}") for rank in range(3) for number in range(6)]
        random.Random(seed).shuffle(asks)
        negotiator, missing = Negotiator(3), {f"{number}": {0, 1, 2} for number in range(6)}
        for rank, name in asks:
            missing[name].discard(rank)
            assert ran(negotiator.submit(rank, tensor(name, 2), 0.0)) == ([] if missing[name] else [name])
        assert not negotiator.pending


def test_sets_with_the_same_name_are_apart() -> None:
    negotiator = Negotiator(3)
    negotiator.sets |= {1: [0, 1], 2: [1, 2]}
    assert ran(negotiator.submit(0, tensor("x", 2, set_id=1), 0.0)) == []
    assert ran(negotiator.submit(1, tensor("x", 3, set_id=2), 0.0)) == []
    [decision] = negotiator.submit(1, tensor("x", 2, set_id=1), 0.0)
    assert decision.ranks == [0, 1]
    [decision] = negotiator.submit(2, tensor("x", 3, set_id=2), 0.0)
    assert decision.ranks == [1, 2]
    assert "does not exist" in failed(negotiator.submit(0, tensor("x", 2, set_id=7), 0.0))["x"][1]


def test_a_set_can_be_removed_only_when_nothing_is_in_flight_there() -> None:
    negotiator = Negotiator(2)
    for rank in range(2):
        decisions = negotiator.submit(rank, Request("add_process_set", "add", ranks=[0, 1]), 0.0)
    assert decisions[0].message["items"][0]["set_id"] == 1
    negotiator.submit(0, tensor("busy", 2, set_id=1), 0.0)
    for rank in range(2):
        decisions = negotiator.submit(rank, Request("remove_process_set", "remove", root=1), 0.0)
    assert "'busy' is in flight" in failed(decisions)["remove"][1]
    negotiator.submit(1, tensor("busy", 2, set_id=1), 0.0)
    for rank in range(2):
        decisions = negotiator.submit(rank, Request("remove_process_set", "remove", root=1), 0.0)
    assert ran(decisions) == ["remove"] and 1 not in negotiator.sets


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_ranks_that_wait_in_a_circle_fail_and_others_do_not(order: tuple[int, ...]) -> None:
    """Rank r waits for `r`, which the next rank has not asked for."""
    negotiator = Negotiator(4)
    negotiator.sets |= {1: [0, 1], 2: [1, 2], 3: [2, 0]}
    for rank in range(3):
        negotiator.submit(rank, tensor(f"{rank}", 2, set_id=rank + 1), 0.0)
    negotiator.submit(3, tensor("other", 2), 0.0)
    *first, last = order
    for rank in first:
        assert negotiator.wait(rank, [(rank + 1, f"{rank}")]) == []
    failures = failed(negotiator.wait(last, [(last + 1, f"{last}")]))
    assert {name: ranks for name, (ranks, _) in failures.items()} == {"0": [0], "1": [1], "2": [2]}
    assert [*negotiator.pending] == [(WORLD, "other")]


def test_a_rank_with_a_thread_that_can_go_on_keeps_nobody_waiting() -> None:
    negotiator = Negotiator(2)
    negotiator.submit(0, tensor("a", 2), 0.0)
    negotiator.submit(1, tensor("b", 2), 0.0)
    assert negotiator.wait(1, [(WORLD, "b"), (WORLD, "done before")]) == []  # that thread is about to wake up
    assert negotiator.wait(0, [(WORLD, "a")]) == []
    assert negotiator.wait(1, []) == []  # it has, and asks for what rank 0 waits for
    assert ran(negotiator.submit(1, tensor("a", 2), 0.0)) == ["a"]
    assert ran(negotiator.submit(0, tensor("b", 2), 0.0)) == ["b"]


def test_ranks_that_have_joined_supply_zeros_to_sums_and_averages_only() -> None:
    for op, runs in ((SUM, True), (AVERAGE, True), (MAX, False), (ADASUM, False)):
        negotiator = Negotiator(3)
        negotiator.submit(0, tensor("before", 2, op=op), 0.0)
        negotiator.submit(1, tensor("before", 2, op=op), 0.0)
        decisions = negotiator.submit(2, Request("join", JOIN[1]), 0.0)
        assert bool(ran(decisions)) == runs
        if runs:
            assert decisions[0].ranks == [0, 1, 2]
        else:
            assert "[2] have joined" in failed(decisions)["before"][1]
        negotiator.submit(0, Request("join", JOIN[1]), 0.0)
        assert bool(ran(negotiator.submit(1, tensor("after", 2, op=op), 0.0))) == runs
        [last] = negotiator.submit(1, Request("join", JOIN[1]), 0.0)
        assert last.message["items"][0]["last"] == 1
        assert negotiator.joined == []


def test_ordered_all_reduces_are_served_by_ranks_that_join_later_and_differences_are_told() -> None:
    negotiator = Negotiator(3)
    for number in range(3):
        assert negotiator.announce(0, WORLD, [number, "float32", "cpu"]) == []
    assert negotiator.announce(1, WORLD, [0, "float32", "cpu"]) == []
    assert negotiator.announce(2, WORLD, [0, "float32", "cpu"]) == []
    decisions = negotiator.submit(1, Request("join", JOIN[1]), 0.0)
    assert [(each.ranks, each.message["what"][0]) for each in decisions] == [([1], 1), ([1], 2)]
    [decision] = negotiator.announce(0, WORLD, [9, "float32", "cpu"])
    assert (decision.ranks, decision.message["what"][0]) == ([1], 9)
    [decision] = negotiator.announce(2, WORLD, [7, "float32", "cpu"])
    assert decision.message["do"] == "break" and decision.ranks == [0, 1, 2]
    assert "ordered all-reduce 1: rank 2 gives [7" in decision.message["error"]


def test_a_rank_that_leaves_fails_what_needs_it_now_and_later() -> None:
    negotiator = Negotiator(3)
    negotiator.sets[1] = [0, 2]
    negotiator.submit(0, tensor("now", 2), 0.0)
    negotiator.submit(1, tensor("its own", 2), 0.0)
    negotiator.submit(0, tensor("others", 2, set_id=1), 0.0)
    failures = failed(negotiator.leave(1, "has shut down"))
    assert failures == {"now": ([0], "rank 1 has shut down"), "its own": ([], "rank 1 has shut down")}
    assert failed(negotiator.submit(2, tensor("later", 2), 0.0))["later"] == ([2], "rank 1 has shut down")
    assert ran(negotiator.submit(2, tensor("others", 2, set_id=1), 0.0)) == ["others"]


def test_what_stalls_is_told_once_and_fails_on_request() -> None:
    negotiator = Negotiator(2)
    negotiator.submit(0, tensor("slow", 2), 10.0)
    assert negotiator.stalled(69.0, 60.0, 0.0) == ([], [])
    [text], decisions = negotiator.stalled(71.0, 60.0, 0.0)
    assert "'slow' waits for ranks [1] for more than 60 s; ranks [0] have submitted it" in text
    assert decisions == [] and negotiator.stalled(72.0, 60.0, 0.0) == ([], [])
    assert negotiator.stalled(1e6, 0.0, 0.0) == ([], [])  # switched off
    _, decisions = negotiator.stalled(81.0, 60.0, 70.0)
    assert failed(decisions)["slow"][0] == [0]


def test_neighbouring_all_reduces_that_are_alike_are_fused() -> None:
    def decided(requests: list[Request]) -> list[list[str]]:
        negotiator = Negotiator(1)
        decisions = [decision for request in requests for decision in negotiator.submit(0, request, 0.0)]
        return [ran([decision]) for decision in fused(decisions, 10)]

    same = [tensor(name, 3) for name in "abcd"]
    assert decided(same) == [["a", "b", "c"], ["d"]]  # at most 10 elements together
    others = [tensor("e", 3, op=MAX), tensor("f", 3, kind="broadcast"), tensor("g", 3, prescale=2.0)]
    assert decided([same[0], others[0], same[1], others[1], others[2]]) == [["a"], ["e"], ["b"], ["f"], ["g"]]
    assert decided([tensor("big", 11), same[0], same[1]]) == [["big"], ["a", "b"]]
    assert decided([tensor("a", 3, op=ADASUM), tensor("b", 3, op=ADASUM)]) == [["a"], ["b"]]
