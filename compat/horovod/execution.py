"""Execution of agreed collectives: from what this rank has handed in to the results that `synchronize` returns."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compat.horovod import collectives
from compat.horovod.collectives import Group
from compat.horovod.negotiation import Request

_streams: dict[torch.device, torch.cuda.Stream] = {}


class Operation:
    """One collective that this rank has asked for. In place, the results go to the given tensors."""

    def __init__(self, request: Request, tensors: Sequence[Tensor], in_place: bool, grouped: bool) -> None:
        self.request, self.given, self.in_place, self.grouped = request, [*tensors], in_place, grouped
        self.tensors = [tensor.detach() for tensor in tensors]
        self.done = threading.Event()
        self.result: Any = None
        self.item: dict[str, Any] = {}  # what was agreed, with the shapes of all ranks
        self.error = ""
        self.ready: torch.cuda.Event | None = None
        self.finished: torch.cuda.Event | None = None
        if request.device == "cuda":
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(self.tensors[0].device))

    def succeed(self, result: Any, item: dict[str, Any]) -> None:
        self.result, self.item = result, item
        self.done.set()

    def fail(self, error: str) -> None:
        self.error = self.error or error
        self.done.set()


def execute(
    requests: Sequence[Request],
    operations: Sequence[Operation | None],
    items: Sequence[dict[str, Any]],
    group: Group,
    join_device: torch.device,
) -> list[Any]:
    """Run one decision; one result per request. Several requests are all-reduces that travel together.

    An operation is None if this rank has joined; it then supplies zeros, on `join_device` if the others' are on a GPU.
    """
    kind = requests[0].kind
    if kind == "join":
        return [items[0]["last"]]
    if kind == "barrier":  # all ranks have asked for it: that is a barrier
        return [None]
    given = [operation for operation in operations if operation]
    nowhere = join_device if requests[0].device == "cuda" else torch.device(requests[0].device)
    device = given[0].tensors[0].device if given else nowhere
    if device.type != "cuda":
        return _results(requests, operations, items, group, device)
    torch.cuda.set_device(device)
    stream = _streams.setdefault(device, torch.cuda.Stream(device))
    with torch.cuda.stream(stream):
        for operation in given:
            assert operation.ready
            stream.wait_event(operation.ready)
        results = _results(requests, operations, items, group, device)
        for operation in given:
            for tensor in operation.tensors:
                tensor.record_stream(stream)
            operation.finished = torch.cuda.Event()
            operation.finished.record(stream)
    return results


def _results(
    requests: Sequence[Request],
    operations: Sequence[Operation | None],
    items: Sequence[dict[str, Any]],
    group: Group,
    device: torch.device,
) -> list[Any]:
    inputs = [
        operation.tensors if operation else collectives.zeros(request, device)
        for request, operation in zip(requests, operations, strict=True)
    ]
    outputs: list[list[Any]]
    [tensors, *_], request, item = inputs, requests[0], items[0]
    if request.kind == "allreduce":
        reduced = iter(collectives.all_reduce([tensor for part in inputs for tensor in part], request, group))
        outputs = [[next(reduced) for _ in part] for part in inputs]
    elif request.kind == "broadcast":
        outputs = [[collectives.broadcast(tensor, request.root, group) for tensor in tensors]]
    elif request.kind == "allgather":
        shapes = zip(*item["shapes"], strict=True)  # one entry per tensor, each with one shape per rank
        outputs = [
            [collectives.gather(tensor, of_ranks, group) for tensor, of_ranks in zip(tensors, shapes, strict=True)]
        ]
    elif request.kind == "alltoall":
        shapes_of_ranks = [shapes[0] for shapes in item["shapes"]]
        output, received = collectives.all_to_all(tensors[0], item["splits"], shapes_of_ranks, group)
        outputs = [[(output, torch.tensor(received, dtype=torch.int32))]]
    else:
        outputs = [[collectives.reduce_scatter(tensor, request, group) for tensor in tensors]]
    return [
        operation and _handed_back(operation, output) for operation, output in zip(operations, outputs, strict=True)
    ]


def _handed_back(operation: Operation, outputs: list[Any]) -> Any:
    if operation.in_place:
        for tensor, output in zip(operation.tensors, outputs, strict=True):
            tensor.copy_(output)
        outputs = operation.given
    return outputs if operation.grouped else outputs[0]
