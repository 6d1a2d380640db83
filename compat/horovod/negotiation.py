"""Negotiation: decides which collectives run, in which order, from what the ranks have asked for. No sockets, no tensors.

Ranks may ask in any order. A collective has a name; it runs once every rank of its process set has asked for it, and all
of them in one order, which is the same on every rank. If the ranks disagree about it, or some of them can never ask for it,
it fails on every rank that has asked.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

WORLD = 0  # id of the process set of all ranks
JOIN = (WORLD, "<join>")
AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
_NEUTRAL_TO_ZERO = (AVERAGE, SUM)  # reductions to which a joined rank can supply zeros

Key = tuple[int, str]  # id of the process set, name


@dataclass
class Request:
    """What one rank asks for. Ranks must agree about all fields, except for the rows of ragged kinds and their splits."""

    kind: str  # allreduce, allgather, broadcast, alltoall, reducescatter, barrier, join, add_process_set, ...
    name: str
    set_id: int = WORLD
    dtypes: list[str] = field(default_factory=list)  # one per tensor: a grouped collective has several
    shapes: list[list[int]] = field(default_factory=list)
    device: str = "cpu"
    op: int = SUM
    root: int = 0  # rank in the world
    prescale: float = 1.0
    postscale: float = 1.0
    splits: list[int] | None = None  # rows for each rank, of alltoall
    ranks: list[int] = field(default_factory=list)  # of the process set that is added or removed

    @property
    def key(self) -> Key:
        return self.set_id, self.name

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


_AGREED = {
    "kind": "operations",
    "dtypes": "data types",
    "device": "kinds of device",
    "op": "reductions",
    "root": "root ranks",
    "prescale": "prescale factors",
    "postscale": "postscale factors",
    "ranks": "process sets",
}
_RAGGED = ("allgather", "alltoall")  # whose tensors may differ in the first dimension
_BY_ROWS = (*_RAGGED, "reducescatter")  # whose tensors need a first dimension


@dataclass
class Decision:
    """A message that every one of `ranks` gets."""

    ranks: list[int]
    message: dict[str, Any]
    alike: tuple = ()  # what all-reduces that may share one collective have in common
    elements: int = 0


@dataclass
class _Pending:
    since: float
    requests: dict[int, Request] = field(default_factory=dict)  # by rank
    reported: bool = False


class _Ordered:
    """All-reduces of one process set that ran without negotiation: what was announced, and how far each rank is."""

    def __init__(self) -> None:
        self.first = 0  # number of the first announcement that is kept
        self.log: list[list[Any]] = []  # announcements: elements, dtype, device
        self.done: dict[int, int] = defaultdict(int)  # by rank


class Negotiator:
    """The state of a negotiation between `size` ranks. Each method returns the decisions that follow."""

    def __init__(self, size: int) -> None:
        self.sets: dict[int, list[int]] = {WORLD: [*range(size)]}
        self.pending: dict[Key, _Pending] = {}
        self.joined: list[int] = []  # in the order of joining
        self.gone: dict[int, str] = {}  # rank -> why
        self.waiting: dict[int, set[Key]] = {}  # what the threads of a rank wait for, if all of them do
        self.ordered: dict[int, _Ordered] = defaultdict(_Ordered)
        self._next_set = WORLD + 1

    def submit(self, rank: int, request: Request, now: float) -> list[Decision]:
        """A rank asks for a collective."""
        if request.set_id not in self.sets:
            return [_failure([rank], request.key, f"process set {request.set_id} does not exist, or not any more")]
        pending = self.pending.setdefault(request.key, _Pending(now))
        pending.requests[rank] = request
        if request.kind == "join":
            self.joined.append(rank)
            return [*self._serve(rank), *self._completed(sorted(self.pending, key=lambda key: key == JOIN))]
        if gone := [other for other in self.sets[request.set_id] if other in self.gone]:
            return [self._fail(request.key, f"rank {gone[0]} {self.gone[gone[0]]}")]
        return self._completed([request.key])

    def leave(self, rank: int, why: str) -> list[Decision]:
        """A rank has shut down or died: what needs it fails."""
        self.gone[rank] = why
        self.waiting.pop(rank, None)
        return [
            self._fail(key, f"rank {rank} {why}", spare=rank) for key in [*self.pending] if rank in self.sets[key[0]]
        ]

    def wait(self, rank: int, keys: Iterable[Key]) -> list[Decision]:
        """All threads of a rank wait for these collectives, or no longer do: fails those that can never complete."""
        self.waiting[rank] = {*keys}
        return self._deadlocked()

    def announce(self, rank: int, set_id: int, what: list[Any]) -> list[Decision]:
        """A rank runs its next ordered all-reduce, `what` = [elements, dtype, device], without asking."""
        ordered = self.ordered[set_id]
        place = ordered.done[rank] - ordered.first
        ordered.done[rank] += 1
        if place == len(ordered.log):
            ordered.log.append(what)
        elif ordered.log[place] != what:
            text = f"ordered all-reduce {place + ordered.first}: rank {rank} gives {what}, others {ordered.log[place]}"
            return [Decision([*self.sets[WORLD]], {"do": "break", "error": text})]
        decisions = [serve for joined in self.joined for serve in self._serve(joined)]
        last = min(ordered.done[member] for member in self.sets.get(set_id, [rank]))
        del ordered.log[: last - ordered.first]
        ordered.first = last
        return decisions

    def stalled(self, now: float, warn_s: float, fail_s: float) -> tuple[list[str], list[Decision]]:
        """Warnings about collectives that have waited for `warn_s` seconds, and failures of those that have for `fail_s`."""
        warnings, decisions = [], []
        for key, pending in [*self.pending.items()]:
            waited, text = now - pending.since, f"{self._title(key)} waits for ranks {self._missing(key)}"
            if fail_s and waited > fail_s:
                decisions.append(self._fail(key, f"{text}, which have not submitted it in {fail_s:g} s"))
            elif warn_s and waited > warn_s and not pending.reported and key != JOIN:
                pending.reported = True
                warnings.append(f"{text} for more than {warn_s:g} s; ranks {[*pending.requests]} have submitted it")
        return warnings, decisions

    def _missing(self, key: Key) -> list[int]:
        """Ranks that the collective still waits for; one that has joined is only waited for by others' joins."""
        present = self.pending[key].requests
        joined = () if key == JOIN else self.joined
        return [rank for rank in self.sets[key[0]] if rank not in present and rank not in joined]

    def _completed(self, keys: Iterable[Key]) -> list[Decision]:
        """What runs, or fails since the ranks disagree, of those that no rank is missing for."""
        decisions = []
        for key in keys:
            if key in self.pending and not self._missing(key):
                requests = self.pending[key].requests
                error = self._disagreement(key, requests)
                decisions.append(self._fail(key, error) if error else self._run(key, requests))
        return decisions

    def _disagreement(self, key: Key, requests: dict[int, Request]) -> str:
        """What the ranks disagree about, or what else makes the collective impossible; "" if nothing does."""
        (first, model), *others = sorted(requests.items())
        title, members = self._title(key), self.sets[key[0]]
        for rank, request in others:
            for name, words in _AGREED.items():
                here, there = getattr(model, name), getattr(request, name)
                if here != there:
                    return f"{title}: mismatched {words}: {here} on rank {first}, {there} on rank {rank}"
            if _fixed(model) != _fixed(request):
                return f"{title}: mismatched shapes: {model.shapes} on rank {first}, {request.shapes} on rank {rank}"
        for rank, request in requests.items():
            if request.kind in _BY_ROWS and [] in request.shapes:
                return f"{title}: rank {rank} gives a tensor of no dimensions, which has no rows"
            if request.kind == "alltoall" and (error := _bad_splits(request, len(members))):
                return f"{title}: rank {rank}: {error}"
        if model.kind == "broadcast" and model.root not in members:
            return f"{title}: root rank {model.root} is not in the process set {members}"
        if model.kind == "remove_process_set" and (
            busy := [name for set_id, name in self.pending if set_id == model.root]
        ):
            return f"{title}: {busy[0]!r} is in flight there"
        if model.kind == "add_process_set" and not {*model.ranks} <= {*self.sets[WORLD]}:
            return f"{title}: there are {len(self.sets[WORLD])} ranks, not all of {model.ranks}"
        if len(requests) < len(members) and (model.kind != "allreduce" or model.op not in _NEUTRAL_TO_ZERO):
            return f"{title}: ranks {self.joined} have joined, and can only take part in sums and averages"
        return ""

    def _run(self, key: Key, requests: dict[int, Request]) -> Decision:
        del self.pending[key]
        model, members = next(iter(requests.values())), self.sets[key[0]]
        item: dict[str, Any] = {"request": vars(model)}
        if model.kind in _RAGGED:
            item["shapes"] = [requests[rank].shapes for rank in members]
            item["splits"] = [requests[rank].splits for rank in members]
        elif model.kind == "join":
            item["last"], self.joined = self.joined[-1], []
        elif model.kind == "add_process_set":
            item["set_id"], self.sets[self._next_set] = self._next_set, model.ranks
            self._next_set += 1
        elif model.kind == "remove_process_set":
            del self.sets[model.root]
        alike: tuple = ()
        if model.kind == "allreduce" and model.op != ADASUM:
            alike = (model.set_id, model.device, model.op, model.prescale, model.postscale)
        return Decision(members, {"do": "run", "items": [item]}, alike, model.elements)

    def _fail(self, key: Key, error: str, spare: int = -1) -> Decision:
        """The collective fails on all ranks that have asked for it, except for one that has gone."""
        complete = not self._missing(key)
        requests = self.pending.pop(key).requests
        if key == JOIN:
            self.joined = []
        return _failure([rank for rank in requests if rank != spare], key, error, complete)

    def _serve(self, rank: int) -> list[Decision]:
        """Ordered all-reduces that others have begun, and for which a rank that has joined supplies zeros."""
        decisions = []
        for set_id, ordered in self.ordered.items():
            if rank in self.sets.get(set_id, ()):
                for what in ordered.log[ordered.done[rank] - ordered.first :]:
                    decisions.append(Decision([rank], {"do": "serve", "set_id": set_id, "what": what}))
                    ordered.done[rank] += 1
        return decisions

    def _deadlocked(self) -> list[Decision]:
        """Failures of what ranks wait for that can never go on: each of them waits for another that does.

        A rank goes on if one of its threads waits for nothing, or for something whose missing ranks all go on.
        """
        stuck = {rank for rank, keys in self.waiting.items() if keys and keys <= self.pending.keys()}
        while freed := [rank for rank in stuck if any(not stuck & {*self._missing(key)} for key in self.waiting[rank])]:
            stuck -= {*freed}
        keys = sorted({key for rank in stuck for key in self.waiting[rank]})
        waits = "; ".join(f"{self._title(key)} waits for ranks {self._missing(key)}" for key in keys)
        return [self._fail(key, f"ranks {sorted(stuck)} wait for each other: {waits}") for key in keys]

    def _title(self, key: Key) -> str:
        request = next(iter(self.pending[key].requests.values()))
        where = f" of process set {self.sets[key[0]]}" if key[0] != WORLD else ""
        return f"{request.kind} '{key[1]}'{where}"


def fused(decisions: Iterable[Decision], most_elements: int) -> list[Decision]:
    """Decisions with neighbouring all-reduces put together: several small tensors then take one collective."""
    result: list[Decision] = []
    for decision in decisions:
        last = result[-1] if result else decision
        elements = last.elements + decision.elements
        if result and decision.alike and decision.alike == last.alike and elements <= most_elements:
            last.message["items"] += decision.message["items"]
            last.elements = elements
        else:
            result.append(decision)
    return result


def _failure(ranks: list[int], key: Key, error: str, complete: bool = True) -> Decision:
    """`complete`: all ranks have asked for it, so they have counted it alike if it has no name."""
    return Decision(ranks, {"do": "fail", "key": key, "error": error, "complete": complete})


def _fixed(request: Request) -> list[list[int]]:
    """The dimensions that ranks must agree about: not the first one of ragged kinds, for which -1 stands."""
    if request.kind not in _RAGGED:
        return request.shapes
    return [[-1, *shape[1:]] if shape else [] for shape in request.shapes]


def _bad_splits(request: Request, size: int) -> str:
    rows, splits = request.shapes[0][0], request.splits
    if splits is None:
        return f"{rows} rows can't be split equally among {size} ranks: give splits" if rows % size else ""
    if len(splits) != size or min(splits, default=0) < 0 or sum(splits) != rows:
        return f"splits {splits} are not {size} counts of rows that sum up to {rows}"
    return ""
