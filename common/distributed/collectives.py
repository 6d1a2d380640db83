"""Collectives: the functions by which the processes of a run exchange data and wait for each other.

All of them work without a process group too, as for a single process. Data for the host is sent
over a gloo group, so no call waits for a device unless it is given a device tensor. Every function
is a collective (every rank must call it, in the same order) unless its docstring says "No
communication"; of `nodes` and what follows from it, only the first call is one.

In examples, `f(a | b) -> c | d` means that two ranks give a and b and get c and d.

Gloo does not authenticate senders, so nothing received is unpickled: objects are sent as JSON,
arrays as safetensors.
"""

import gc
import json
import os
import socket
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save

from common.errors import Refused

_LAST_WORK_S = 0.1  # time for threads of gloo to finish
_NAMED = 3  # what a message lists: many ranks often fail for the same reason

_timeout: timedelta | None = None  # of the groups that this module makes
_cache: dict[Hashable, Any] = {}
_cache_group: dist.ProcessGroup | None = None


def is_distributed() -> bool:
    """True if a process group exists. No communication."""
    return dist.is_initialized()


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of collectives over the groups that this module makes (default: torch's). No
    communication.
    """
    global _timeout
    _timeout = timeout


def count_collectives() -> int:
    """Number of collectives that this process has begun, including those still queued on a device.

    All ranks begin the same collectives in the same order, so a rank that has begun fewer keeps the
    others waiting. No communication; may be called from any thread.
    """
    default = dist.group.WORLD if is_distributed() else None
    groups = [default, *(_cache.values() if _cache_group is default else ())]
    made = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    return sum(group._get_sequence_number_for_group() for group in made)  # type: ignore[attr-defined]


def rank() -> int:
    """Number of this process in the run, from 0. No communication."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Number of processes of the run. No communication."""
    return dist.get_world_size() if is_distributed() else 1


def is_main() -> bool:
    """True on rank 0. No communication."""
    return rank() == 0


def local_world_size() -> int:
    """Number of processes on this node."""
    return len(_node())


def is_local_main() -> bool:
    """True on the first rank of each node."""
    return _node()[0] == rank()


def node_rank() -> int:
    """Number of this node, from 0."""
    return nodes().index(_node())


def nodes() -> list[tuple[int, ...]]:
    """The ranks of each node, nodes ordered by their first rank: [(0, 1), (2, 3)] for two nodes of two ranks.

    Ranks are on one node if they share the host name, the boot id and the launcher (GROUP_RANK). So
    two launchers on one machine count as two nodes, which helps to try out a run on two nodes.
    """
    return _cached("nodes", _find_nodes) or [(0,)]


def barrier() -> None:
    """Return when every rank has called it."""
    if is_distributed():
        dist.barrier(group=host_group())


def gather_objects(item: Any) -> list[Any]:
    """The objects of all ranks, in rank order, on every rank. Objects must be JSON; a tuple arrives
    as a list.

    gather_objects("a" | "b") -> ["a", "b"] | ["a", "b"]
    """
    return [json.loads(data) for data in _gathered(json.dumps(item).encode())]


def gather_to_main(arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]] | None:
    """The arrays of all ranks, in rank order, on rank 0; None on the others. Elements of object
    arrays must be bytes.

    gather_to_main([[1]] | [[2, 3]]) -> [[[1]], [[2, 3]]] | None
    """
    if not is_distributed():
        return [list(arrays)]
    gathered = _gathered(_pack(arrays), to_main=True)
    return [_unpack(data) for data in gathered] if is_main() else None


def all_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over the ranks, as a new tensor on the same device; does not wait for the
    device.
    """
    total = values.clone()
    if is_distributed():
        dist.all_reduce(total)
    return total


def broadcast_object(item: Any, source: int = 0) -> Any:
    """The object of rank `source`, sent as JSON, on every rank; the arguments of other ranks are ignored."""
    data = _as_tensor(json.dumps(item if rank() == source else None).encode())
    if is_distributed():
        size = _sizes(data)[source]
        data = data if rank() == source else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(data, source, group=host_group())
    return json.loads(data.numpy().tobytes())


def reduce_dict(values: Mapping[str, float | torch.Tensor], op: str = "sum") -> dict[str, float]:
    """Reduce scalars by name over the ranks in float64; op is "sum", "mean", "max" or "min". NaN on
    a rank gives NaN.

    "mean" averages over ranks; for a mean over samples, reduce sums and counts. A device tensor
    makes the call wait for the device. Raises ValueError on every rank if the names differ between
    ranks; the message has them.

    reduce_dict({"loss": 1} | {"loss": 2}) -> {"loss": 3.0} | {"loss": 3.0}
    """
    of_ranks = gather_objects({name: float(value) for name, value in values.items()})
    for other, theirs in enumerate(of_ranks):
        if difference := sorted(theirs.keys() ^ of_ranks[0].keys()):
            raise ValueError(
                f"reduce_dict: only one of rank 0 and rank {other} has {', '.join(difference)}"
            )
    reduction = getattr(np, op)
    return {
        name: float(reduction(np.array([theirs[name] for theirs in of_ranks])))
        for name in of_ranks[0]
    }


def reduce_counts(counts: torch.Tensor) -> torch.Tensor:
    """The exact sum of an int64 tensor over the ranks, as a new tensor on the same device (sent
    from host memory).

    Raises TypeError if the tensor is not int64: a float sum of counts is not exact.
    """
    if counts.dtype != torch.int64:
        raise TypeError(f"reduce_counts sums int64 tensors exactly, got {counts.dtype}")
    total = counts.detach().to("cpu", copy=True).contiguous()
    if is_distributed():
        dist.all_reduce(total, group=host_group())
    return total.to(counts.device)


def leave_process_group() -> None:
    """Destroy the process group, if there is one, so that Python can exit.

    A thread of gloo may still hold tensors of the last collective. It would abort the process if it
    released them while Python is exiting, so this function gives it some time.
    """
    global _cache_group
    if is_distributed():
        _cache.clear()
        _cache_group = None
        dist.destroy_process_group()
        gc.collect()  # the threads of a group end with the last reference to it
        time.sleep(_LAST_WORK_S)  # in case a reference is left


def host_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks, for data of the host; None for one process. The first call is a
    collective.
    """
    if is_distributed() and dist.get_backend() == "gloo":
        return dist.group.WORLD
    return _cached("host", lambda: dist.new_group(backend="gloo", timeout=_timeout))


def subgroup(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A group of these ranks with the default backend, made once; None for one process.

    Every rank of the run must call it, and gets torch's placeholder for a non-member if it is none.
    """
    members = sorted(ranks)
    return _cached(tuple(members), lambda: dist.new_group(members, timeout=_timeout))


def node_group() -> dist.ProcessGroup | None:
    """A group of the ranks on this node, with the default backend; None for one process."""
    # Every rank must take part in making every group.
    groups = {members: subgroup(members) for members in nodes()}
    return groups[_node()]


def check_same_on_all_ranks(what: str, value: Any) -> Any:
    """`value`, after checking that every rank has the same. Else raises `Refused` on every rank,
    with ranks and values.
    """
    of_ranks = gather_objects((value, socket.gethostname()))
    named = [f"{theirs} on rank {other} ({host})" for other, (theirs, host) in enumerate(of_ranks)]
    others = [
        name for name, (theirs, _) in zip(named, of_ranks, strict=True) if theirs != of_ranks[0][0]
    ]
    if others:
        raise Refused(f"{what} differs between ranks: {named[0]}, {', '.join(others[:_NAMED])}")
    return value


def is_lost_peer(error: BaseException) -> bool:
    """True if `error` was raised by a collective because another process was lost. No communication."""
    # Gloo raises a plain RuntimeError that begins with the path of its source file.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


@contextmanager
def all_or_none(what: str) -> Iterator[None]:
    """If the block raises on one rank, it raises on all, so that no rank waits for one that failed.

        with all_or_none("loading data"):
            samples = load(path)

    If rank 1 raises OSError("no such file"), rank 0 raises `Refused("rank 1: while loading data:
    OSError: no such file")`. If every exception is a `Refused`, every rank raises `Refused` with
    the same text. Without failure it costs one small collective. A block may itself contain
    collectives only if all ranks reach them or none does.
    """
    try:
        yield
    except BaseException as error:  # also KeyboardInterrupt on one rank has to reach the others
        _agree(what, error)
        raise
    _agree(what)


@contextmanager
def main_process_first(what: str) -> Iterator[None]:
    """The first rank of each node runs the block before the others: download once, then read.

        with main_process_first("downloading"):
            path = download(url)

    Failures spread as in `all_or_none`: if a first rank raises, the others raise `Refused` instead
    of entering; if another one raises, so do the first ranks at the block's end.
    """
    goes_first = is_local_main()
    if not goes_first:
        _agree(what)
    with all_or_none(what):
        yield
    if goes_first:
        _agree(what)


def _agree(what: str, error: BaseException | None = None) -> None:
    """Return if no rank has an error, or if the caller raises its own; else raise `Refused`."""
    if not is_distributed():
        return
    failed = torch.tensor(int(error is not None))
    dist.all_reduce(failed, group=host_group())
    if not failed:
        return
    report = error and (
        isinstance(error, Refused),
        type(error).__name__,
        " ".join(str(error).split()),
    )
    failures = {failing: report for failing, report in enumerate(gather_objects(report)) if report}
    if all(refused for refused, _, _ in failures.values()):
        raise Refused("; ".join(dict.fromkeys(text for _, _, text in failures.values()))) from error
    if error is None:
        named = [
            f"rank {failing}: while {what}: {kind}: {text}"
            for failing, (_, kind, text) in failures.items()
        ]
        raise Refused(join_first(named))


def join_first(texts: list[str], separator: str = "; ") -> str:
    """The first of `texts` for a message, and the number of the others. No communication."""
    more = len(texts) - _NAMED
    return separator.join(texts[:_NAMED] + [f"and {more} more"] * (more > 0))


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _gathered(data: bytes, to_main: bool = False) -> list[bytes]:
    """What each rank sends, in rank order; with `to_main` nothing on ranks but rank 0."""
    if not is_distributed():
        return [data]
    mine = _as_tensor(data)
    sizes = _sizes(mine)
    mine = torch.nn.functional.pad(mine, (0, max(sizes) - len(mine)))
    gathered = [torch.empty_like(mine) for _ in sizes] if is_main() or not to_main else []
    if to_main:
        dist.gather(mine, gathered or None, dst=0, group=host_group())
    else:
        dist.all_gather(gathered, mine, group=host_group())
    return [theirs[:size].numpy().tobytes() for theirs, size in zip(gathered, sizes, strict=False)]


def _sizes(data: torch.Tensor) -> list[int]:
    """The number of bytes that each rank sends."""
    sizes = torch.zeros(world_size(), dtype=torch.int64)
    sizes[rank()] = len(data)
    return reduce_counts(sizes).tolist()


def _pack(arrays: Sequence[np.ndarray]) -> bytes:
    """Arrays as safetensors; an object array becomes two arrays, the lengths and the joined bytes
    of its elements.
    """
    parts = {}
    for number, array in enumerate(arrays):
        if array.dtype == object:
            parts[f"{number} lengths"] = np.array([len(item) for item in array], np.int64)
            array = np.frombuffer(b"".join(array), np.uint8)
        parts[str(number)] = np.ascontiguousarray(array)
    return save(parts)


def _unpack(data: bytes) -> list[np.ndarray]:
    parts = load(data)
    lengths = {name: parts.pop(name) for name in [*parts] if name.endswith(" lengths")}
    arrays = [parts[str(number)] for number in range(len(parts))]
    for name, of_items in lengths.items():
        number = int(name.split()[0])
        ends, joined = np.cumsum(of_items).tolist(), arrays[number].tobytes()
        items = [
            joined[end - length : end] for end, length in zip(ends, of_items.tolist(), strict=True)
        ]
        # With None, numpy keeps the bytes objects.
        arrays[number] = np.array([*items, None], object)[:-1]
    return arrays


def _node() -> tuple[int, ...]:
    """The ranks of this node, ascending."""
    return next(members for members in nodes() if rank() in members)


def _find_nodes() -> list[tuple[int, ...]]:
    boot = Path("/proc/sys/kernel/random/boot_id")  # cloned machines may have the same host name
    here = (
        socket.gethostname(),
        boot.read_text() if boot.exists() else "",
        os.environ.get("GROUP_RANK"),
    )
    nodes: dict[Hashable, list[int]] = {}
    for member, node in enumerate(gather_objects(here)):
        nodes.setdefault(tuple(node), []).append(member)
    return [tuple(members) for members in nodes.values()]


def _cached(key: Hashable, make: Callable[[], Any]) -> Any:
    """The result of `make`, kept for as long as the default group exists; None for one process."""
    global _cache_group
    if not is_distributed():
        return None
    if _cache_group is not dist.group.WORLD:
        _cache.clear()
        _cache_group = dist.group.WORLD
    if key not in _cache:
        _cache[key] = make()
    return _cache[key]
