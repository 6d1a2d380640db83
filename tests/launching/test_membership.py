"""Launchers know who takes part, and accept nothing in the store that no launcher wrote."""

import json
import pickle
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousStateError

from common.launching.membership import LEFT, RUNNING, WAITING, Membership, Round

pytestmark = pytest.mark.smoke


@pytest.fixture
def member() -> Iterator[Callable[..., Membership]]:
    """`member(store, host)` makes the membership of a machine. All of them end with the test, as
    with their launchers.
    """
    members: list[Membership] = []

    def make(store: HashStore, host: str, silence: float = 1000.0) -> Membership:
        members.append(Membership(store, host, "10.0.0.1", interval=0.05, silence=silence))
        return members[-1]

    yield make
    for each in members:
        each.stop()


def read_states(team: Membership) -> dict[str, tuple[str, int]]:
    return {record.host: (record.state, record.round) for record in team.read_present().values()}


def test_machines_see_each_other_come_run_leave_and_close(member) -> None:
    store = HashStore()
    first = member(store, "a")
    second = member(store, "b")
    assert (first.machine_id, second.machine_id) == (0, 1) and first.read_round() == Round()
    assert read_states(first) == read_states(second) == {"a": (WAITING, 0), "b": (WAITING, 0)}
    first.start_round(Round(1, [0, 1]))
    assert second.read_round() == Round(1, [0, 1])
    second.set_state(RUNNING, second.read_round())
    first.set_state(LEFT, first.read_round())
    assert read_states(second) == {"b": (RUNNING, 1)}
    second.close()
    assert first.is_closed()
    with pytest.raises(RendezvousClosedError):
        first.read_present()


def test_a_silent_machine_is_lost_until_it_is_heard_again(member) -> None:
    store = HashStore()
    first = member(store, "a", silence=0.5)
    second = member(store, "b", silence=0.5)
    time.sleep(0.7)
    assert read_states(first) == {"a": (WAITING, 0), "b": (WAITING, 0)}, (
        "both have renewed their records"
    )
    second.stop()
    until = time.monotonic() + 3
    while "b" in read_states(first):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert list(read_states(first)) == ["a"]
    second.set_state(WAITING, Round())
    assert "b" in read_states(first)


def test_what_no_launcher_wrote_is_refused_and_not_executed(member) -> None:
    team = member(HashStore(), "a")
    team.stop()
    record = json.loads(team._store.get("machine/0"))
    for key, right, read in (
        ("machine/0", record, team.read_present),
        ("round", vars(Round(1, [0])), team.read_round),
    ):
        wrong = [json.dumps(right | {name: None}) for name in right]
        wrong += [
            json.dumps(right | {"beats": True, "machines": ["a"], "host": "\x1b[2J"}),
            json.dumps(right | {"more": 1}),
        ]
        for text in (
            *wrong,
            "",
            "[" * 100_000,
            "[]",
            "null",
            pickle.dumps(RendezvousStateError()).decode("latin1"),
        ):
            team._store.set(key, text)
            with pytest.raises(RendezvousStateError):
                read()
        team._store.set(key, json.dumps(right))
