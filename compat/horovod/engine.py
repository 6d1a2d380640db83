"""Engine: collectives that ranks may request in different orders, run in one order on all of them.

A call such as `allreduce_async` makes an operation, which is its handle. Each process set has a
lane: a thread per rank. In a round, the lanes of a set tell each other what their ranks have
newly requested (an all-gather of JSON over gloo). All of them then know the same, and run what
every rank has requested; what ranks disagree about fails on all of them. Lanes take part in
rounds also while their ranks compute, so one that does not answer is dead or stopped.

All lanes of a set end in the round in which one of its ranks leaves, or each with the first
error of the network. Lanes destroy their groups at once. So the sockets close, and the other
lanes notice. And gloo's threads end: one that still held a tensor while Python exits would
abort the process.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.collectives import is_lost_peer
from common.errors import describe_error
from compat.horovod import collectives
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.requests import JOIN, WORLD, Request, find_disagreement

LOG = logging.getLogger("compat.horovod")
_IDLE_S = 0.1  # between rounds while a rank waits for nothing
_CROSSWISE_S = 0.001  # between rounds while ranks wait for different operations

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
    """A collective that this rank has requested. In place, results go to the input tensors."""

    request: Request
    inputs: Sequence[Tensor]
    in_place: bool
    grouped: bool
    input_event: torch.Event | None  # of the stream that made the inputs
    output_event: torch.Event | None = None  # of the lane's stream
    done: threading.Event = field(default_factory=threading.Event)
    shapes: list[list[list[int]]] = field(default_factory=list)  # of all ranks
    outputs: Sequence[Tensor] = ()
    result: Any = None
    error: str = ""

    def succeed(self, outputs: Sequence[Any]) -> None:
        if self.in_place:
            for tensor, output in zip(self.inputs, outputs, strict=True):
                tensor.detach().copy_(output)
            outputs = self.inputs
        self.result = list(outputs) if self.grouped else outputs[0]

    def fail(self, error: str) -> None:
        self.error = error
        self.done.set()

    def poll(self) -> bool:
        """True if the operation has ended."""
        if not self.done.is_set():
            return False
        return self.output_event is None or self.output_event.query()

    def wait(self) -> Any:
        """The result, once the operation has ended. Raises HorovodInternalError if it failed."""
        self.done.wait()
        if self.error:
            raise HorovodInternalError(self.error)
        if self.output_event is not None:
            stream = torch.accelerator.current_stream()
            stream.wait_event(self.output_event)
            for output in self.outputs:
                output.record_stream(stream)  # it was allocated for the lane's
        return self.result


class Lane(threading.Thread):
    """This rank's side of a process set."""

    def __init__(self, engine: "Engine", set_id: int, group: collectives.Group) -> None:
        super().__init__(name=f"horovod process set {set_id}", daemon=True)
        self.engine = engine
        self.group = group
        self.ranks = group.ranks
        self.changed = threading.Condition()
        self.operations: dict[str, Operation] = {}  # of this rank, in flight
        self.unsent: list[Request] = []  # the other ranks do not know of them yet
        self.requests: dict[str, dict[int, Request]] = {}  # by name, by rank
        self.start_times: dict[str, float] = {}  # by name: when the first rank requested it
        self.warned: set[str] = set()  # names of which was warned
        self.joined: list[int] = []  # ranks, in the order of joining
        self.counts: Counter[str] = Counter()  # unnamed collectives of each kind
        self.pause: float | None = 0.0  # before the next round
        self.end_reason = ""  # why the lane has ended
        self.is_leaving = False
        self.stream: torch.Stream | None = None
        self.warn_s = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", 60))
        if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            self.warn_s = math.inf
        self.fail_s = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0))
        if not self.fail_s:
            self.fail_s = math.inf

    def submit(self, operation: Operation) -> None:
        """Raises ValueError if the name is in flight, HorovodInternalError after the lane's end."""
        request = operation.request
        with self.changed:
            if self.end_reason:
                raise HorovodInternalError(self.end_reason)
            if not request.name:
                request.name = f"{request.kind}.noname.{self.counts[request.kind]}"
                self.counts[request.kind] += 1
            if request.name in self.operations:
                raise ValueError(
                    f"a collective named {request.name!r} is in flight: synchronize it first, or "
                    "choose another name"
                )
            self.operations[request.name] = operation
            self.unsent.append(request)
            self.changed.notify()

    def leave(self) -> None:
        with self.changed:
            self.is_leaving = True
            self.changed.notify()

    def run(self) -> None:
        leaving_ranks: list[int] = []
        try:
            while not leaving_ranks:
                leaving_ranks = self._run_round()
            reason = f"rank {leaving_ranks[0]} has shut down"
            if self.stream:
                self.stream.synchronize()
        except Exception as error:
            leaving_ranks = []
            text = describe_error(error)
            if is_lost_peer(error):
                text = "a rank has died, left or stopped: its connection is lost"
            reason = f"rank {self.engine.rank}: {text}"
        with self.changed:
            self.end_reason = f"{reason}: call shutdown() and init(), or start again"
            for operation in self.operations.values():
                operation.fail(self.end_reason)
            self.operations = {}
        with contextlib.suppress(Exception):  # the script may have destroyed all groups
            if not leaving_ranks:  # NCCL's kernels would wait for the lost rank
                self.group.process_group.abort()
            dist.destroy_process_group(self.group.process_group)
        del self.group  # gloo's threads and sockets end with the last reference

    def _run_round(self) -> list[int]:
        """Exchange new requests; run or fail those that can be decided. Returns the ranks that leave."""
        with self.changed:
            self.changed.wait_for(lambda: self.unsent or self.is_leaving, self.pause)
            message = {
                "requests": [vars(request) for request in self.unsent],
                "leaving": self.is_leaving,
                "stalled": self._find_stalled(),
            }
            self.unsent = []
        messages = self._exchange(message)
        has_new = False
        leaving_ranks = []
        for rank, rank_message in zip(self.ranks, messages, strict=True):
            for fields in rank_message["requests"]:
                has_new = True
                self._add_request(rank, Request(**fields))
            if rank_message["leaving"]:
                leaving_ranks.append(rank)
        # A join comes last: what it has waited for is run before.
        complete = [name for name in self.requests if not self._find_missing(name)]
        for name in sorted(complete, key=lambda name: name == JOIN):
            error = find_disagreement(self.requests[name], self.ranks, self.engine.size)
            if error:
                self._fail(name, error)
            else:
                self._run(name)
        for name, error in messages[0]["stalled"].items():  # the first rank's clock decides
            if name in self.requests:
                self._fail(name, error)
        if complete or has_new:
            self.pause = 0.0
        elif len(self.ranks) == 1:
            self.pause = None
        else:
            self.pause = _CROSSWISE_S if self.operations else _IDLE_S
        return leaving_ranks

    def _add_request(self, rank: int, request: Request) -> None:
        self.requests.setdefault(request.name, {})[rank] = request
        self.start_times.setdefault(request.name, time.monotonic())
        if request.kind == "join":
            self.joined.append(rank)

    def _exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all ranks of the set. In JSON: pickled ones could execute code."""
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        lengths = collectives.gather(torch.tensor([len(data)]), self.group)
        max_length = int(max(lengths))
        padded = torch.nn.functional.pad(data, (0, max_length - len(data)))
        data_by_rank = collectives.gather(padded, self.group)
        messages = []
        for rank_data, length in zip(data_by_rank, lengths, strict=True):
            messages.append(json.loads(rank_data[: int(length)].numpy().tobytes()))
        return messages

    def _find_stalled(self) -> dict[str, str]:
        """By name: why operations that wait too long have to fail. The first rank decides, and warns."""
        errors: dict[str, str] = {}
        if self.engine.rank != self.ranks[0]:
            return errors
        for name, request_by_rank in self.requests.items():
            if name == JOIN:
                continue
            kind = next(iter(request_by_rank.values())).kind
            text = (
                f"{kind} '{name}' waits for ranks {self._find_missing(name)}, which have not "
                "submitted it"
            )
            waited_s = time.monotonic() - self.start_times[name]
            if waited_s > self.fail_s:
                errors[name] = f"{text} in {self.fail_s:g} s"
            elif waited_s > self.warn_s and name not in self.warned:
                self.warned.add(name)
                LOG.warning("%s for more than %g s", text, self.warn_s)
        return errors

    def _find_missing(self, name: str) -> list[int]:
        """Ranks that a collective waits for; others' joins alone wait for one that has joined."""
        present = set(self.requests[name])
        if name != JOIN:
            present.update(self.joined)
        return [rank for rank in self.ranks if rank not in present]

    def _pop(self, name: str) -> Operation | None:
        """Forget an operation, whose name is free again. Returns this rank's, if it has requested it."""
        del self.requests[name], self.start_times[name]
        self.warned.discard(name)
        with self.changed:
            return self.operations.pop(name, None)

    def _fail(self, name: str, error: str) -> None:
        if name == JOIN:
            self.joined = []
        operation = self._pop(name)
        if operation:
            operation.fail(error)

    def _run(self, name: str) -> None:
        """Run a collective, and give out its result."""
        request_by_rank = self.requests[name]
        request = next(iter(request_by_rank.values()))
        operation = self.operations.get(name)  # None if this rank has joined
        outputs: list[Any] = [None]
        if request.kind == "join":
            outputs = [self.joined[-1]]
            self.joined = []
            self.counts = Counter()  # ranks with less data have counted less
        elif request.kind == "add_process_set":
            outputs = [self.engine.add_lane(request.ranks)]
        elif request.kind == "remove_process_set":
            self.engine.remove_lane(request.root)
        in_rank_order = [request_by_rank[rank] for rank in sorted(request_by_rank)]
        if operation:
            operation.shapes = [rank_request.shapes for rank_request in in_rank_order]
        if request.shapes:
            splits = [rank_request.splits for rank_request in in_rank_order]
            self._compute(request, operation, splits)
        elif operation:
            operation.succeed(outputs)
        self._pop(name)
        if operation:
            operation.done.set()

    def _compute(
        self, request: Request, operation: Operation | None, splits: list[list[int]]
    ) -> None:
        """Run it on this rank's tensors, or on zeros. On a GPU, in a stream of this lane's own."""
        is_on_gpu = request.device == "cuda"
        shapes: list[list[list[int]]] = []
        if operation:
            tensors = [tensor.detach() for tensor in operation.inputs]
            shapes = operation.shapes
        else:
            device = self.engine.join_device if is_on_gpu else torch.device(request.device)
            tensors = collectives.create_zeros(request, device)
        if not is_on_gpu:
            outputs = collectives.run(request, tensors, shapes, splits, self.group)
            if operation:
                operation.succeed(outputs)
            return
        torch.accelerator.set_device_index(tensors[0].device)
        if self.stream is None:
            self.stream = torch.Stream(tensors[0].device)
        if operation and operation.input_event:
            self.stream.wait_event(operation.input_event)
        with self.stream:
            outputs = collectives.run(request, tensors, shapes, splits, self.group)
            if operation:
                operation.succeed(outputs)
                operation.outputs = [outputs[0][0]] if request.kind == "alltoall" else outputs
                operation.output_event = self.stream.record_event()
                for tensor in tensors:
                    tensor.record_stream(self.stream)


class Engine:
    """The world of one `init()`; torch's default process group is there."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.set_ids = itertools.count()  # of process sets to come
        self.ranks: dict[int, list[int]] = {}  # of each process set
        self.lanes: dict[int, Lane] = {}  # of the sets that this rank is in
        self.layers: Any = None  # the group over which SyncBatchNorm talks
        self.join_device = torch.device("cuda")  # where zeros for others' CUDA tensors are made
        self.add_lane(list(range(self.size)))

    def add_lane(self, ranks: list[int]) -> int:
        """Make a process set; returns its id. Called on all ranks of the world."""
        set_id = next(self.set_ids)
        group = collectives.make_group(ranks)
        self.ranks[set_id] = ranks
        if group:
            self.lanes[set_id] = Lane(self, set_id, group)
            self.lanes[set_id].start()
        return set_id

    def remove_lane(self, set_id: int) -> None:
        """End a process set. Operations in flight there fail."""
        del self.ranks[set_id]
        lane = self.lanes.pop(set_id, None)
        if lane:
            lane.leave()
            lane.join()

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
    ) -> Operation:
        """Request a collective. `fields` are a `Request`'s.

        Raises ValueError if its name is in flight, this rank is not in the process set or the
        type can't be reduced, and HorovodInternalError after a rank of the set has died.
        """
        if set_id is None or set_id not in self.ranks:
            raise ValueError(f"process set {set_id} is not registered: see add_process_set()")
        if set_id not in self.lanes:
            raise ValueError(f"rank {self.rank} is not in the process set {self.ranks[set_id]}")
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError(
                f"{kind}: the tensors of a group must be on one device, not "
                f"{sorted(map(str, devices))}"
            )
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        shapes = [list(tensor.shape) for tensor in tensors]
        device = "cpu"
        input_event = None
        if tensors and tensors[0].is_cuda:
            device = "cuda"
            input_event = torch.accelerator.current_stream(tensors[0].device).record_event()
        request = Request(kind, name or "", dtypes, shapes, device, **fields)
        operation = Operation(request, tensors, in_place, grouped, input_event)
        self.lanes[set_id].submit(operation)
        return operation

    def call(self, kind: str, **options: Any) -> Any:
        """`submit`, and the result."""
        return self.submit(kind, **options).wait()

    def shutdown(self, limit_s: float | None = None) -> None:
        """Wait for the operations in flight, at most `limit_s` seconds, and leave all process sets."""
        start = time.monotonic()
        lanes = list(self.lanes.values())
        for lane in lanes:
            for operation in list(lane.operations.values()):
                timeout_s = None
                if limit_s is not None:
                    timeout_s = max(0.0, start + limit_s - time.monotonic())
                operation.done.wait(timeout_s)
        for lane in lanes:
            lane.leave()
        for lane in lanes:
            lane.join()  # a rank that is stopped is waited for as long as gloo does
        if self.layers is not None:
            with contextlib.suppress(ValueError):  # the script has destroyed it
                dist.destroy_process_group(self.layers)
            self.layers = None
