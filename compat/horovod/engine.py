"""Engine: this process's side of the negotiation, and the thread that runs what was agreed.

A call such as `allreduce_async` hands in an operation and gets a handle. The ranks' requests are negotiated on rank 0
(negotiation.py, control.py); then one thread per process runs the collectives in the agreed order. So ranks may ask in
different orders, and a disagreement is an error on all ranks, not a hang.

`ordered_allreduce` skips the negotiation, for callers that give the same tensors in the same order on every rank, such as
the buckets of an optimizer. It has a process group of its own, so that it never mixes with negotiated collectives:

    work = engine.current().ordered_allreduce(bucket, process_set)  # sums a flat, contiguous tensor in place; returns at once
    work.wait()  # raises HorovodInternalError if a rank dies or gives another tensor; on CUDA, the current stream waits

Let ranks agree about the buckets once, by a negotiated collective, before the first one. Ranks that have joined supply zeros.
"""

import json
import os
import queue
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compat.horovod import collectives
from compat.horovod.collectives import Group, dtype_name
from compat.horovod.control import Channel, Server
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.negotiation import WORLD, Key, Request
from compat.horovod.timeline import Timeline

LINGER_S = 5.0  # the longest that a rank waits for the others' end
_TURN = 1.0  # seconds between looks of a thread that waits
_ABANDONED: list[Group] = []  # groups with a dead member: ending them would wait for it

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


class Operation:
    """One collective that this rank has asked for."""

    def __init__(self, request: Request, tensors: Sequence[Tensor], in_place: bool, grouped: bool) -> None:
        self.request, self.tensors, self.in_place, self.grouped = request, [*tensors], in_place, grouped
        self.done = threading.Event()
        self.result: Any = None
        self.error = ""
        self.ready = self.finished = None  # CUDA events
        if any(tensor.is_cuda for tensor in tensors):
            self.ready = torch.cuda.Event()
            self.ready.record()

    def succeed(self, result: Any) -> None:
        self.result = result
        self.done.set()

    def fail(self, error: str) -> None:
        self.error = self.error or error
        self.done.set()


class OrderedWork:
    """An ordered all-reduce in progress."""

    def __init__(self, engine: "Engine", work: dist.Work, on_device: bool) -> None:
        self.engine, self.work, self.on_device = engine, work, on_device

    def wait(self) -> None:
        """Return when the tensor holds the sum; on CUDA, when the current stream will wait for it."""
        while True:
            if self.engine.broken:
                raise HorovodInternalError(self.engine.broken)
            try:
                if self.on_device:
                    self.work.wait()
                else:
                    self.work.wait(timedelta(seconds=_TURN))
                return
            except RuntimeError as error:
                if self.work.is_completed() and (self.on_device or "Operation timed out" not in str(error)):
                    self.engine.break_off(f"an ordered all-reduce failed: {error}")
                    raise HorovodInternalError(self.engine.broken) from error


class Engine:
    """The world of one `init()`; torch's default process group is there."""

    def __init__(self, store: dist.Store, host: str, home: str, patience_s: float) -> None:
        """`host` is this machine's address for the other ranks, used on rank 0; `home` names the node."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeline = Timeline()
        self.lock = threading.RLock()
        self.table: dict[Key, Operation] = {}  # asked for, not yet agreed
        self.running: list[Operation] = []
        self.handles: dict[int, Operation] = {}
        self.names: Counter[tuple[int, str]] = Counter()  # unnamed collectives per process set and kind
        self.groups: dict[int, Group] = {}
        self.threads: set[threading.Thread] = set()  # which have ever asked
        self.waiting: dict[threading.Thread, list[Key]] = {}
        self.broken, self.leaving = "", False
        self.homes: list[str] = []
        self.begun, self.ended = threading.Event(), threading.Event()
        self.decisions: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self.server: Server | None = None
        if self.rank == 0:
            token = secrets.token_hex(16)
            self.server = Server(host, self.size, token, self.timeline)
            self.server.start()
            store.set("horovod", json.dumps([*self.server.address, token]))
        host, port, token = json.loads(store.get("horovod"))
        self.channel = Channel((host, port), [token, self.rank, home], self._receive)
        if not self.begun.wait(patience_s) or self.broken:
            raise HorovodInternalError(self.broken or f"not all {self.size} ranks called init() within {patience_s:.0f} s")
        self.groups[WORLD] = self._group([*range(self.size)])
        self.runner = threading.Thread(target=self._work, name="horovod collectives", daemon=True)
        self.runner.start()

    # --- asking

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
        """Ask for a collective; returns its handle.

        Raises ValueError if its name is in flight, this rank is not in the process set or the type can't be reduced, and
        HorovodInternalError after a rank has died.
        """
        if set_id is None or set_id not in self.groups:
            raise ValueError(f"process set {set_id} is not registered: give it to init() or add_process_set()")
        group = self.groups[set_id]
        if self.rank not in group.ranks:
            raise ValueError(f"rank {self.rank} is not in the process set {group.ranks}")
        tensors = [tensor.detach() for tensor in tensors]
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError(f"{kind}: the tensors of a group must be on one device, not on {sorted(map(str, devices))}")
        if name is None:
            with self.lock:
                number = self.names[set_id, kind]
                self.names[set_id, kind] += 1
            name = f"{kind}.noname.{number}"
        request = Request(
            kind,
            name,
            set_id,
            dtypes=[dtype_name(tensor.dtype) for tensor in tensors],
            shapes=[[*tensor.shape] for tensor in tensors],
            device=next(iter(devices)).type if devices else "cpu",
            **fields,
        )
        operation = Operation(request, tensors, in_place, grouped)
        with self.lock:
            if self.broken:
                raise HorovodInternalError(self.broken)
            if request.key in self.table:
                raise ValueError(f"a collective named {name!r} is still in flight: choose another name, or synchronize it first")
            self.table[request.key] = operation
            self.threads.add(threading.current_thread())
            handle = max(self.handles, default=-1) + 1
            self.handles[handle] = operation
            self._send("submit", **vars(request))
        return handle

    def poll(self, handle: int) -> bool:
        """Whether the collective has ended. Raises ValueError for a handle that was synchronized or never given out."""
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
            torch.cuda.current_stream().wait_event(operation.finished)
        return operation.result

    def call(self, kind: str, **options: Any) -> Any:
        """`submit` and `synchronize`."""
        return self.synchronize(self.submit(kind, **options))

    def _await(self, operation: Operation) -> None:
        """Wait for the end, and tell the negotiation if this takes long: it finds ranks that wait for each other."""
        thread, told = threading.current_thread(), False
        while not operation.done.wait(_TURN):
            with self.lock:
                self.waiting[thread] = [operation.request.key]
                self.threads = {thread for thread in self.threads if thread.is_alive()}
                if not told and self.threads <= self.waiting.keys() and not self.broken:
                    told = True
                    self._send("wait", keys=[key for keys in self.waiting.values() for key in keys])
        with self.lock:
            self.waiting.pop(thread, None)
            if told and not self.broken:
                self._send("wait", keys=[])

    def _send(self, do: str, **fields: Any) -> None:
        try:
            self.channel.send(do, **fields)
        except OSError as error:
            self._break(f"rank 0 can't be reached: {error}")

    # --- ordered all-reduces

    def ordered_allreduce(self, bucket: Tensor, set_id: int = WORLD) -> OrderedWork:
        """Sum a flat, contiguous tensor in place over a process set, without negotiation: see the module's text."""
        with self.lock:
            if self.broken:
                raise HorovodInternalError(self.broken)
            what = [bucket.numel(), dtype_name(bucket.dtype), bucket.device.type]
            self._send("announce", set_id=set_id, what=what)
            work = dist.all_reduce(bucket, group=self.groups[set_id].ordered, async_op=True)
        return OrderedWork(self, work, bucket.is_cuda)

    # --- what the control channel says

    def _receive(self, message: dict | None) -> None:
        if message is None:
            self.ended.set()
            if not self.leaving:
                self._break("rank 0 has left")
            self.begun.set()
        elif message["do"] == "begin":
            self.homes = message["homes"]
            self.begun.set()
        elif message["do"] == "break":
            self._break(message["error"])
        elif message["do"] == "end":
            self.ended.set()
        else:
            self.decisions.put(message)

    def break_off(self, error: str) -> None:
        """End the world on all ranks: everything in flight fails, and everything later."""
        self._send("break", error=error)
        self._break(error)

    def _break(self, error: str) -> None:
        with self.lock:
            self.broken = self.broken or f"{error}: call shutdown() and init(), or start again"
            for operation in (*self.table.values(), *self.running):
                operation.fail(self.broken)
            self.table = {}

    # --- the thread that runs collectives

    def _work(self) -> None:
        while (message := self.decisions.get()) is not None and not self.broken:
            try:
                if message["do"] == "fail":
                    set_id, name = message["key"]
                    with self.lock:
                        failed = self.table.pop((set_id, name), None)
                    if failed:
                        failed.fail(message["error"])
                elif message["do"] == "serve":
                    self._serve(message["set_id"], *message["what"])
                else:
                    self._run(message["items"])
            except Exception as error:  # the others may be in the middle of the same collective
                self.break_off(f"rank {self.rank}: {type(error).__name__}: {error}")

    def _serve(self, set_id: int, elements: int, dtype: str, device: str) -> None:
        nothing = torch.zeros(elements, dtype=getattr(torch, dtype), device=device)
        dist.all_reduce(nothing, group=self.groups[set_id].ordered)

    def _run(self, items: list[dict[str, Any]]) -> None:
        began = time.monotonic()
        requests = [Request(**item["request"]) for item in items]
        with self.lock:
            operations = [self.table.pop(request.key, None) for request in requests]
            self.running = [operation for operation in operations if operation]
        stream = self._stream()
        with torch.cuda.stream(stream):  # None is no stream
            results = self._results(requests, operations, items)
            for operation in self.running:
                if stream is not None and operation.ready is not None:
                    operation.finished = torch.cuda.Event()
                    operation.finished.record()
        for request in requests:
            self.timeline.ran(request, began, "NCCL" if request.device == "cuda" else "GLOO")
        for operation, result in zip(operations, results, strict=True):
            if operation:
                operation.succeed(result)
        self.running = []
