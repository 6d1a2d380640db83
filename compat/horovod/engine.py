"""Engine: collectives that ranks may ask for in different orders, run in one order that is the same on all of them.

A call such as `allreduce_async` hands in an operation and gets a handle. Each process set has
a lane: a thread per rank. In a round, the lanes of a set tell each other what their ranks
have newly asked for (an all-gather of JSON over gloo). All of them then know the same, and
run what every rank has asked for; what ranks disagree about fails on all of them. Rounds take
place only while something is asked for.
"""

import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compat.horovod import collectives
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.requests import JOIN, WORLD, Request, disagreement
from compat.horovod.stalls import Stalls

_TURN_S = 1.0  # after which a thread that waits looks around
_LINGER_S = 5.0  # the longest that a rank waits for the others' end
_PAUSE_S = 0.02  # between rounds in which nothing happens
ABANDONED: list[Any] = []  # groups with a dead member: ending them would wait for it

_engine: "Engine | None" = None


def current() -> "Engine":
    """The engine between `init()` and `shutdown()`. Raises ValueError outside."""
    if _engine is None:
        raise ValueError("The Horovod API is not initialized: call hvd.init() first")
    return _engine


def is_running() -> bool:
    return _engine is not None


def set_current(engine: "Engine | None") -> None:
    global _engine
    _engine = engine


@dataclass(eq=False)
class Operation:
    """One collective that this rank has asked for. In place, the results go to the given tensors."""

    lane: "Lane"
    request: Request
    given: Sequence[Tensor]
    in_place: bool
    grouped: bool
    ready: torch.Event | None  # of the stream that made the tensors
    finished: torch.Event | None = None
    asked: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)
    shapes: list[list[list[int]]] = field(default_factory=list)  # of all ranks
    outputs: Sequence[Tensor] = ()
    result: Any = None
    error: str = ""

    def succeed(self, outputs: Sequence[Any]) -> None:
        if self.in_place:
            for tensor, output in zip(self.given, outputs, strict=True):
                tensor.detach().copy_(output)
            outputs = self.given
        self.result = [*outputs] if self.grouped else outputs[0]

    def fail(self, error: str) -> None:
        self.error = self.error or error
        self.done.set()


class Lane(threading.Thread):
    """This rank's side of a process set."""

    def __init__(self, engine: "Engine", set_id: int, group: collectives.Group) -> None:
        super().__init__(name=f"horovod process set {set_id}", daemon=True)
        self.engine, self.group = engine, group
        self.changed = threading.Condition(engine.lock)
        self.operations: dict[str, Operation] = {}  # of this rank, in flight
        self.news: list[Request] = []  # not told to the others yet
        self.table: dict[str, dict[int, Request]] = {}  # by name, by rank: what was told and is in flight
        self.joined: list[int] = []  # ranks, in the order of joining
        self.gone: set[int] = set()  # ranks that have shut down
        self.counts: Counter[str] = Counter()  # unnamed collectives of each kind
        self.broken, self.leaving = "", False
        self.stream: torch.Stream | None = None
        self.stalls = Stalls(engine.store, set_id, group.ranks, engine.rank)

    def submit(self, operation: Operation) -> None:
        with self.changed:
            if self.broken:
                raise HorovodInternalError(self.broken)
            if (name := operation.request.name) in self.operations:
                raise ValueError(
                    f"a collective named {name!r} is in flight: synchronize it first, or choose another name"
                )
            self.operations[name] = operation
            self.news.append(operation.request)
            self.changed.notify_all()

    def leave(self) -> None:
        with self.changed:
            self.leaving = True
            self.changed.notify_all()

    def break_off(self, error: str) -> None:
        """Fail everything in flight and everything later, on all ranks of the set."""
        self.stalls.tell_broken(error)
        self.fail_all(error)

    def fail_all(self, error: str) -> None:
        with self.changed:
            self.broken = self.broken or f"{error}: call shutdown() and init(), or start again"
            for operation in self.operations.values():
                operation.fail(self.broken)
            self.operations = {}

    def run(self) -> None:
        try:
            while not self.broken and len(self.gone) < len(self.group.ranks):
                with self.changed:
                    self.changed.wait_for(lambda: self.operations or self.leaving or self.broken)
                    news, self.news = self.news, []
                    message = {"news": [vars(request) for request in news], "leaving": self.leaving}
                messages = self._exchange(message)
                if self._round(messages) or any(told["news"] for told in messages):
                    continue
                with self.changed:
                    self.changed.wait_for(lambda: self.news, _PAUSE_S)
        except Exception as error:  # the others may be in the middle of the same collective
            text = " ".join(str(error).split())
            if isinstance(error, RuntimeError) and ("onnection" in text or "peer" in text):
                self.break_off(f"a rank has died or left: rank {self.engine.rank} has lost its connection")
            else:
                self.break_off(f"rank {self.engine.rank}: {type(error).__name__}: {text}")

    def _exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all ranks of the set. In JSON: pickled ones could execute code."""
        own = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        lengths = self._gather(torch.tensor([len(own)]))
        longest = int(max(lengths))
        parts = self._gather(torch.nn.functional.pad(own, (0, longest - len(own))))
        return [json.loads(part[: int(length)].numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]

    def _gather(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in self.group.ranks]
        dist.all_gather(parts, own, self.group.process_group)
        return parts

    def _round(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Take in what the ranks have told, and run or fail what can be decided. Returns whether there was such."""
        for rank, told in zip(self.group.ranks, messages, strict=True):
            for fields in told["news"]:
                request = Request(**fields)
                self.table.setdefault(request.name, {})[rank] = request
                if request.kind == "join":
                    self.joined.append(rank)
            if told["leaving"]:
                self.gone.add(rank)
        ready = sorted((name for name in self.table if not self._missing(name)), key=lambda name: name == JOIN)
        for name in ready:
            if error := disagreement(self.table[name], self.group.ranks, self.engine.size):
                self._fail(name, error)
            else:
                self._run(name)
        lost = {name: {*self._missing(name)} & self.gone for name in self.table}
        for name, ranks in lost.items():
            if ranks:
                self._fail(name, f"rank {min(ranks)} has shut down")
        return bool(ready) or any(lost.values())

    def _missing(self, name: str) -> list[int]:
        """Ranks that a collective still waits for; one that has joined is only waited for by others' joins."""
        joined = () if name == JOIN else self.joined
        return [rank for rank in self.group.ranks if rank not in self.table[name] and rank not in joined]

    def _fail(self, name: str, error: str) -> None:
        del self.table[name]
        self.stalls.number += 1
        if name == JOIN:
            self.joined = []
        with self.changed:
            operation = self.operations.pop(name, None)
        if operation:
            operation.fail(error)

    def _run(self, name: str) -> None:
        """Run a collective, and give out its result."""
        told = self.table[name]
        [request, *_] = told.values()
        with self.changed:
            operation = self.operations.get(name)  # None if this rank has joined
        outputs: list[Any] = [None]
        if request.kind == "join":
            outputs = [self.joined[-1]]
            self.joined, self.counts = [], Counter()  # ranks with less data have counted less
        elif request.kind == "add_process_set":
            outputs = [self.engine.add_lane(request.ranks)]
        elif request.kind == "remove_process_set":
            self.engine.remove_lane(request.root)
        if operation:
            operation.shapes = [told[rank].shapes for rank in sorted(told)]
        if request.shapes:
            self._compute(request, operation, [told[rank].splits for rank in sorted(told)])
        elif operation:
            operation.succeed(outputs)
        self.stalls.number += 1
        with self.changed:  # its name is free again before the caller wakes up
            del self.table[name]
            self.operations.pop(name, None)
        if operation:
            operation.done.set()

    def _compute(self, request: Request, operation: Operation | None, splits: list[list[int]]) -> None:
        """Run it on the tensors of this rank, or on zeros. On a GPU, in a stream of this lane's own."""
        if operation:
            tensors, shapes = [tensor.detach() for tensor in operation.given], operation.shapes
        else:
            on_gpu = request.device == "cuda"
            nowhere = self.engine.join_device if on_gpu else torch.device(request.device)
            tensors, shapes = collectives.zeros(request, nowhere), []
        if request.device == "cuda":
            torch.accelerator.set_device_index(tensors[0].device)
            self.stream = self.stream or torch.Stream(tensors[0].device)
            if operation and operation.ready:
                self.stream.wait_event(operation.ready)
        with self.stream if self.stream and request.device == "cuda" else contextlib.nullcontext():
            outputs = collectives.run(request, tensors, shapes, splits, self.group)
            if operation:
                operation.succeed(outputs)
                if request.device == "cuda" and self.stream:
                    operation.outputs = [outputs[0][0]] if request.kind == "alltoall" else outputs
                    operation.finished = self.stream.record_event()
                    for tensor in tensors:
                        tensor.record_stream(self.stream)


class Engine:
    """The world of one `init()`; torch's default process group is there."""

    def __init__(self, store: dist.Store) -> None:
        self.rank, self.size, self.store = dist.get_rank(), dist.get_world_size(), store
        self.lock = threading.RLock()
        self.handles: dict[int, Operation] = {}
        self.numbers = itertools.count()  # of handles
        self.sets = itertools.count()  # of process sets
        self.ranks: dict[int, list[int]] = {}  # of each process set
        self.lanes: dict[int, Lane] = {}  # of the sets that this rank is in
        self.lost_ranks = False  # True if an end found ranks missing
        self.join_device = torch.device("cuda")  # where zeros for others' CUDA tensors are made
        self.add_lane([*range(self.size)])

    def add_lane(self, ranks: list[int]) -> int:
        """Make a process set; returns its id. Called on all ranks of the world."""
        set_id, group = next(self.sets), collectives.make_group(ranks)
        with self.lock:
            self.ranks[set_id] = ranks
            if self.rank in ranks:
                self.lanes[set_id] = Lane(self, set_id, group)
                self.lanes[set_id].start()
        return set_id

    def remove_lane(self, set_id: int) -> None:
        """End a process set. What is in flight there fails."""
        with self.lock:
            self.ranks.pop(set_id)
            lane = self.lanes.pop(set_id, None)
        if lane:
            self._end([lane])

    def submit(
        self,
        kind: str,
        tensors: Sequence[Tensor] = (),
        *,
        name: str | None = None,
        set_id: int | None = WORLD,
        in_place: bool = False,
        grouped: bool = False,
        **fields: Any,
    ) -> int:
        """Ask for a collective; returns its handle. `fields` are a `Request`'s.

        Raises ValueError if its name is in flight, this rank is not in the process set or the
        type can't be reduced, and HorovodInternalError after a rank of the set has died.
        """
        if set_id is None or set_id not in self.ranks:
            raise ValueError(f"process set {set_id} is not registered: give it to init() or add_process_set()")
        if set_id not in self.lanes:
            raise ValueError(f"rank {self.rank} is not in the process set {self.ranks[set_id]}")
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError(f"{kind}: the tensors of a group must be on one device, not {sorted(map(str, devices))}")
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        shapes = [[*tensor.shape] for tensor in tensors]
        device, ready, lane = "cpu", None, self.lanes[set_id]
        if tensors and tensors[0].is_cuda:
            device, ready = "cuda", torch.accelerator.current_stream(tensors[0].device).record_event()
        with self.lock:
            if name is None:
                name = f"{kind}.noname.{lane.counts[kind]}"
                lane.counts[kind] += 1
            request = Request(kind, name, dtypes, shapes, device, **fields)
            operation = Operation(lane, request, tensors, in_place, grouped, ready)
            lane.submit(operation)
            handle = next(self.numbers)
            self.handles[handle] = operation
        return handle

    def poll(self, handle: int) -> bool:
        """True if the collective has ended. Raises ValueError for a handle that was synchronized or never given out."""
        if handle not in self.handles:
            raise ValueError(f"handle {handle} is unknown, or was synchronized already")
        operation = self.handles[handle]
        return operation.done.is_set() and (operation.finished is None or operation.finished.query())

    def synchronize(self, handle: int) -> Any:
        """The result of a collective, once it has ended; None for a handle that was synchronized already."""
        operation = self.handles.get(handle)
        if operation is None:
            return None
        self._await(operation)
        self.handles.pop(handle, None)
        if operation.error:
            raise HorovodInternalError(operation.error)
        if operation.finished is not None:
            stream = torch.accelerator.current_stream()
            stream.wait_event(operation.finished)
            for output in operation.outputs:
                output.record_stream(stream)  # it was allocated for the lane's
        return operation.result

    def call(self, kind: str, **options: Any) -> Any:
        """`submit` and `synchronize`."""
        return self.synchronize(self.submit(kind, **options))

    def _await(self, operation: Operation, until: float = float("inf")) -> None:
        lane = operation.lane
        while not operation.done.wait(_TURN_S) and time.monotonic() < until:
            if error := lane.stalls.broken():
                lane.fail_all(error)
            elif error := lane.stalls.look(operation.request, operation.asked):
                lane.break_off(error)

    def shutdown(self, limit_s: float = float("inf")) -> None:
        """Wait until what is in flight has ended, at most `limit_s` seconds, then for the other ranks, shortly; leave."""
        until = time.monotonic() + limit_s
        for operation in [*self.handles.values()]:
            self._await(operation, until)
        self._end([*self.lanes.values()])

    def _end(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.leave()
        until = time.monotonic() + _LINGER_S
        for lane in lanes:
            lane.join(max(0.0, until - time.monotonic()))
            if lane.broken or lane.is_alive():
                self.lost_ranks = True
                ABANDONED.append(lane.group)
            else:
                dist.destroy_process_group(lane.group.process_group)
            lane.fail_all("shutdown() was called")
