"""Engine: this process's side of the negotiation, and the thread that runs what was agreed.

A call such as `allreduce_async` hands in an operation and gets a handle. The ranks' requests are negotiated on rank 0
(negotiation.py, control.py); then one thread per process runs the collectives in the agreed order. So ranks may ask in
different orders, and a disagreement is an error on all ranks, not a hang.

`ordered_allreduce` skips the negotiation, for callers that give the same tensors in the same order on every rank, such as
the buckets of an optimizer. It has a process group of its own, so that it never mixes with negotiated collectives:

    # Sums a flat, contiguous tensor in place; returns at once.
    work = engine.current().ordered_allreduce(bucket, process_set.process_set_id)
    work.wait()  # raises HorovodInternalError if a rank dies or gives another tensor; on CUDA, the current stream waits

Let ranks agree about the buckets once, by a negotiated collective, before the first one. Ranks that have joined supply zeros.
"""

import itertools
import json
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compat.horovod.collectives import Group, dtype_name, end_group, make_group
from compat.horovod.control import Channel, Server
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.execution import Operation, execute
from compat.horovod.negotiation import WORLD, Key, Request
from compat.horovod.ordered_work import OrderedWork
from compat.horovod.timeline import Timeline

LINGER_S = 5.0  # the longest that a rank waits for the others' end
_TURN_S = 1.0  # after which a thread that waits tells the negotiation
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


class Engine:
    """The world of one `init()`; torch's default process group is there."""

    def __init__(self, store: dist.Store, host: str, home: list[Any], patience_s: float) -> None:
        """`host` is the address at which the ranks reach rank 0; `home` is this rank's entry of `homes` on all ranks."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeline = Timeline()
        self.lock = threading.RLock()
        self.table: dict[Key, Operation] = {}  # in flight
        self.handles: dict[int, Operation] = {}
        self.numbers = itertools.count()  # of handles
        self.names: Counter[tuple[int, str]] = Counter()  # unnamed collectives per process set and kind
        self.groups: dict[int, Group] = {}
        self.threads: set[threading.Thread] = set()  # which have ever asked
        self.waiting: dict[threading.Thread, list[Key]] = {}
        self.broken, self.over, self.leaving = "", threading.Event(), False
        self.homes: list[list[Any]] = []
        self.begun, self.ended = threading.Event(), threading.Event()
        self.decisions: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self.join_device = torch.device("cuda")  # where zeros for others' CUDA tensors are made
        self.served: list[dist.Work] = []  # all-reduces of zeros in progress
        self.server: Server | None = None
        if self.rank == 0:
            token = secrets.token_hex(16)
            self.server = Server(host, self.size, token, self.timeline)
            self.server.start()
            store.set("horovod", json.dumps([*self.server.address, token]))
        host, port, token = json.loads(store.get("horovod"))
        self.channel = Channel((host, port), [token, self.rank, home], self._receive)
        if not self.begun.wait(patience_s) or self.broken:
            raise HorovodInternalError(
                self.broken or f"not all {self.size} ranks called init() within {patience_s:.0f} s"
            )
        self.groups[WORLD] = make_group([*range(self.size)])
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
        """Ask for a collective; returns its handle. `fields` are those of a `Request`.

        Raises ValueError if its name is in flight, this rank is not in the process set or the type can't be reduced, and
        HorovodInternalError after a rank has died.
        """
        if set_id is None or set_id not in self.groups:
            raise ValueError(f"process set {set_id} is not registered: give it to init() or add_process_set()")
        group = self.groups[set_id]
        if self.rank not in group.ranks:
            raise ValueError(f"rank {self.rank} is not in the process set {group.ranks}")
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError(
                f"{kind}: the tensors of a group must be on one device, not on {sorted(map(str, devices))}"
            )
        if name is None:
            with self.lock:
                name = _nameless(kind, self.names[set_id, kind])
                self.names[set_id, kind] += 1
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
                raise ValueError(
                    f"a collective named {name!r} is in flight: synchronize it first, or choose another name"
                )
            self.table[request.key] = operation
            self.threads.add(threading.current_thread())
            handle = next(self.numbers)
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

    def _await(self, operation: Operation, until: float = float("inf")) -> None:
        """Wait for the end, and tell the negotiation if this takes long: it finds ranks that wait for each other."""
        thread, told = threading.current_thread(), False
        while not operation.done.wait(_TURN_S) and time.monotonic() < until:
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
        return OrderedWork(work, bucket.is_cuda, lambda: self.broken, self.break_off)

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
        else:
            self.decisions.put(message)

    def break_off(self, error: str) -> None:
        """End the world on all ranks: everything in flight fails, and everything later."""
        if not self.over.wait(_TURN_S):  # a death, which the control channel tells, is the better reason
            self._send("break", error=error)
            self._break(error)

    def _break(self, error: str) -> None:
        with self.lock:
            self.broken = self.broken or f"{error}: call shutdown() and init(), or start again"
            for operation in self.table.values():
                operation.fail(self.broken)
            self.table = {}
            self.over.set()

    # --- the thread that runs collectives

    def _work(self) -> None:
        while (message := self.decisions.get()) is not None and not self.broken:
            try:
                if message["do"] == "fail":
                    self._fail(message)
                elif message["do"] == "serve":
                    self._serve(message["set_id"], *message["what"])
                else:
                    self._run(message["items"])
            except Exception as error:  # the others may be in the middle of the same collective
                self.break_off(f"rank {self.rank}: {type(error).__name__}: {error}")

    def _fail(self, message: dict[str, Any]) -> None:
        set_id, name = message["key"]
        with self.lock:
            operation = self.table.pop((set_id, name), None)
            if operation:
                kind = operation.request.kind
                if not message["complete"] and name == _nameless(kind, self.names[set_id, kind] - 1):
                    self.names[set_id, kind] -= 1  # others have not counted it
                operation.fail(message["error"])

    def _serve(self, set_id: int, elements: int, dtype: str, device: str) -> None:
        where = self.join_device if device == "cuda" else torch.device(device)
        nothing = torch.zeros(elements, dtype=getattr(torch, dtype), device=where)
        work = dist.all_reduce(nothing, group=self.groups[set_id].ordered, async_op=True)  # others may come later
        self.served = [work, *(earlier for earlier in self.served if not earlier.is_completed())]

    def _run(self, items: list[dict[str, Any]]) -> None:
        began = time.monotonic()
        requests = [Request(**item["request"]) for item in items]
        with self.lock:
            operations = [self.table.get(request.key) for request in requests]  # None if this rank has joined
        if requests[0].kind == "join":
            self.names.clear()  # ranks with less data have counted less
        if requests[0].kind == "add_process_set":
            self.groups[items[0]["set_id"]] = make_group(requests[0].ranks)
            results = [items[0]["set_id"]]
        elif requests[0].kind == "remove_process_set":
            end_group(self.groups.pop(requests[0].root))
            results = [True]
        else:
            results = execute(requests, operations, items, self.groups[requests[0].set_id], self.join_device)
        for request in requests:
            self.timeline.ran(request, began, "NCCL" if request.device == "cuda" else "GLOO")
        for operation, result, item in zip(operations, results, items, strict=True):
            if operation:
                with self.lock:  # its name is free again before the caller wakes up
                    self.table.pop(operation.request.key, None)
                operation.succeed(result, item)

    # --- groups, and the end

    def shutdown(self, limit_s: float = float("inf")) -> None:
        """Wait until what is in flight has ended, at most `limit_s` seconds, then for the other ranks, shortly; leave."""
        until = time.monotonic() + limit_s
        for operation in [*self.handles.values()]:
            self._await(operation, until)
        self.leaving = True
        self._send("leave")
        self.ended.wait(LINGER_S)
        if self.server:
            self.server.closing = True
            self.server.join()
        with self.lock:
            for operation in self.table.values():
                operation.fail("shutdown() was called")
        self.decisions.put(None)
        self.runner.join(LINGER_S)
        if self.broken or self.runner.is_alive():
            _ABANDONED.extend(self.groups.values())
        else:
            for group in self.groups.values():
                end_group(group)
        self.channel.close()
        self.timeline.stop()


def _nameless(kind: str, number: int) -> str:
    """The name of a collective that was given none."""
    return f"{kind}.noname.{number}"
