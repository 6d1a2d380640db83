"""State of a rendezvous as JSON in the store, so that reading it can't execute code.

torch's rendezvous pickles its state, and anybody who reaches the store can write to it. With this backend the store holds
JSON, which is checked when it is read. torch only unpickles what this process has pickled itself.
"""

import json
import pickle
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token, _NodeDesc, _RendezvousState


class JsonBackend(C10dRendezvousBackend):
    """torch's backend, with JSON in the store. Raises RendezvousStateError if the store holds anything else."""

    def get_state(self) -> tuple[bytes, Token] | None:
        found = super().get_state()
        return found and (_checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        mine = to_json(pickle.loads(state))  # pickled by this process, a moment ago
        found = super().set_state(mine, token)
        return found and (_checked(found[0]), *found[1:])


def to_json(state: _RendezvousState) -> bytes:
    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "deadline": state.deadline and state.deadline.isoformat(),
            "closed": state.closed,
            "participants": [[_fields(node), rank] for node, rank in state.participants.items()],
            "wait_list": [_fields(node) for node in state.wait_list],
            "redundancy_list": [_fields(node) for node in state.redundancy_list],
            "last_heartbeats": [[_fields(node), beat.isoformat()] for node, beat in state.last_heartbeats.items()],
        }
    ).encode()


def from_json(text: bytes) -> _RendezvousState:
    """The inverse of `to_json`. Raises RendezvousStateError if `text` was not written by it."""
    state = _RendezvousState()
    try:
        found = json.loads(text)
        state.round = _of(int, found["round"])
        state.complete = _of(bool, found["complete"])
        state.deadline = None if found["deadline"] is None else _time(found["deadline"])
        state.closed = _of(bool, found["closed"])
        state.participants = {_node(node): _of(int, rank) for node, rank in found["participants"]}
        state.wait_list = {_node(node) for node in found["wait_list"]}
        state.redundancy_list = {_node(node) for node in found["redundancy_list"]}
        state.last_heartbeats = {_node(node): _time(beat) for node, beat in found["last_heartbeats"]}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RendezvousStateError(f"no state of a rendezvous: {type(error).__name__}: {error}") from error
    return state


def _checked(text: bytes) -> bytes:
    return pickle.dumps(from_json(text))


def _fields(node: _NodeDesc) -> list:
    return [node.addr, node.pid, node.local_id]


def _node(fields: list) -> _NodeDesc:
    addr, pid, local_id = fields
    if not _of(str, addr).isprintable():  # it is shown in a terminal
        raise ValueError("a name that can't be printed")
    return _NodeDesc(addr, _of(int, pid), _of(int, local_id))


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError("a time without a zone")
    return time


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value
