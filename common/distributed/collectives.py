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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save

from common.errors import Refused

_LAST_WORK_S = 0.1  # time for threads of gloo to finish
_MAX_LISTED = 3  # in a message: many ranks often fail for the same reason

_timeout: timedelta | None = None  # of the groups that this module makes
_cache: dict[Hashable, Any] = {}
_cache_group: dist.ProcessGroup | None = None


def is_distributed() -> bool:
    """True if a process group exists. No communication."""
    return dist.is_initialized()


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of collectives over the groups that this module makes (default: torch's).

    No communication.
    """
    global _timeout
    _timeout = timeout


def count_collectives() -> int:
    """Number of collectives that this process has started, including those still queued on a device.

    All ranks start the same collectives in the same order, so a rank that has started fewer keeps
    the others waiting. No communication; may be called from any thread.
    """
    default_group = dist.group.WORLD if is_distributed() else None
    groups = [default_group]
    if _cache_group is default_group:
        groups.extend(_cache.values())
    total = 0
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return total


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
    if not is_distributed():
        return [(0,)]
    return _cached("nodes", _find_nodes)


def barrier() -> None:
    """Return when every rank has called it."""
    if is_distributed():
        dist.barrier(group=host_group())


def gather_objects(item: Any) -> list[Any]:
    """The objects of all ranks, in rank order, on every rank.

    Objects must be JSON; a tuple arrives as a list.

    gather_objects("a" | "b") -> ["a", "b"] | ["a", "b"]
    """
    return [json.loads(data) for data in _gather_bytes(json.dumps(item).encode())]


def gather_to_main(arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]] | None:
    """The arrays of all ranks, in rank order, on rank 0; None on the others.

    Elements of object arrays must be bytes.

    gather_to_main([[1]] | [[2, 3]]) -> [[[1]], [[2, 3]]] | None
    """
    if not is_distributed():
        return [list(arrays)]
    gathered = _gather_bytes(_pack(arrays), to_main=True)
    return [_unpack(data) for data in gathered] if is_main() else None


def all_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over the ranks, as a new tensor on the same device.

    It does not wait for the device.
    """
    total = values.clone()
    if is_distributed():
        dist.all_reduce(total)
    return total


def broadcast_object(item: Any, source: int = 0) -> Any:
    """The object of rank `source`, sent as JSON, on every rank; the arguments of other ranks are ignored."""
    is_source = rank() == source
    data = _to_tensor(json.dumps(item if is_source else None).encode())
    if is_distributed():
        size = _gather_sizes(data)[source]
        if not is_source:
            data = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(data, source, group=host_group())
    return json.loads(data.numpy().tobytes())


def reduce_dict(values: Mapping[str, float | torch.Tensor], op: str = "sum") -> dict[str, float]:
    """Reduce scalars by name over the ranks in float64; op is "sum", "mean", "max" or "min".

    NaN on a rank gives NaN. "mean" averages over ranks; for a mean over samples, reduce sums and
    counts. A device tensor makes the call wait for the device. Raises ValueError on every rank if
    the names differ between ranks; the message has them.

    reduce_dict({"loss": 1} | {"loss": 2}) -> {"loss": 3.0} | {"loss": 3.0}
    """
    values_by_rank = gather_objects({name: float(value) for name, value in values.items()})
    names = values_by_rank[0].keys()
    for rank, rank_values in enumerate(values_by_rank):
        difference = sorted(rank_values.keys() ^ names)
        if difference:
            raise ValueError(
                f"reduce_dict: only one of rank 0 and rank {rank} has {', '.join(difference)}"
            )
    reduction = getattr(np, op)
    reduced = {}
    for name in names:
        reduced[name] = float(reduction([rank_values[name] for rank_values in values_by_rank]))
    return reduced


def reduce_counts(counts: torch.Tensor) -> torch.Tensor:
    """The exact sum of an int64 tensor over the ranks, as a new tensor on the same device.

    It is sent from host memory. Raises TypeError if the tensor is not int64: a float sum of counts
    is not exact.
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
    """A gloo group of all ranks, for data of the host; None for one process.

    The first call is a collective.
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


def check_same_on_all_ranks(name: str, value: Any) -> Any:
    """`value`, after checking that every rank has the same.

    Else raises `Refused` on every rank, with `name`, ranks and values.
    """
    gathered = gather_objects((value, socket.gethostname()))
    expected, main_host = gathered[0]
    different = []
    for rank, (actual, host) in enumerate(gathered):
        if actual != expected:
            different.append(f"{actual} on rank {rank} ({host})")
    if different:
        main = f"{expected} on rank 0 ({main_host})"
        raise Refused(f"{name} differs between ranks: {main}, {', '.join(different[:_MAX_LISTED])}")
    return value


def is_lost_peer(error: BaseException) -> bool:
    """True if `error` was raised by a collective because another process was lost. No communication."""
    if isinstance(error, dist.DistError):
        return True
    # Gloo raises a plain RuntimeError that begins with the path of its source file.
    return isinstance(error, RuntimeError) and "gloo/transport" in str(error)


@contextmanager
def all_or_none(action: str) -> Iterator[None]:
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
        _raise_if_any_failed(action, error)
        raise
    _raise_if_any_failed(action)


@contextmanager
def main_process_first(action: str) -> Iterator[None]:
    """The first rank of each node runs the block before the others: download once, then read.

        with main_process_first("downloading"):
            path = download(url)

    Failures spread as in `all_or_none`: if a first rank raises, the others raise `Refused` instead
    of entering; if another one raises, so do the first ranks at the block's end.
    """
    is_first = is_local_main()
    if not is_first:
        _raise_if_any_failed(action)
    with all_or_none(action):
        yield
    if is_first:
        _raise_if_any_failed(action)


class _Failure(NamedTuple):
    """What a rank tells the others of its exception."""

    is_refusal: bool
    kind: str
    text: str


def _raise_if_any_failed(action: str, error: BaseException | None = None) -> None:
    """Return if no rank has an error, or if the caller raises its own; else raise `Refused`."""
    if not is_distributed():
        return
    num_failed = torch.tensor(int(error is not None))
    dist.all_reduce(num_failed, group=host_group())
    if not num_failed:
        return
    failure = None
    if error is not None:
        text = " ".join(str(error).split())
        failure = _Failure(isinstance(error, Refused), type(error).__name__, text)
    all_refused = True
    texts = []
    messages = []
    for rank, fields in enumerate(gather_objects(failure)):
        if fields is not None:
            failure = _Failure(*fields)
            all_refused &= failure.is_refusal
            texts.append(failure.text)
            messages.append(f"rank {rank}: while {action}: {failure.kind}: {failure.text}")
    if all_refused:
        raise Refused("; ".join(dict.fromkeys(texts))) from error
    if error is None:
        raise Refused(join_first(messages))


def join_first(texts: list[str], separator: str = "; ") -> str:
    """The first of `texts` for a message, and the number of the others. No communication."""
    listed = texts[:_MAX_LISTED]
    if len(texts) > _MAX_LISTED:
        listed.append(f"and {len(texts) - _MAX_LISTED} more")
    return separator.join(listed)


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _gather_bytes(data: bytes, to_main: bool = False) -> list[bytes]:
    """What each rank sends, in rank order; with `to_main` nothing on ranks but rank 0."""
    if not is_distributed():
        return [data]
    sent = _to_tensor(data)
    sizes = _gather_sizes(sent)
    sent = torch.nn.functional.pad(sent, (0, max(sizes) - len(sent)))
    received = []
    if is_main() or not to_main:
        received = [torch.empty_like(sent) for _ in sizes]
    if to_main:
        dist.gather(sent, received if is_main() else None, dst=0, group=host_group())
    else:
        dist.all_gather(received, sent, group=host_group())
    return [padded[:size].numpy().tobytes() for padded, size in zip(received, sizes, strict=False)]


def _gather_sizes(data: torch.Tensor) -> list[int]:
    """The number of bytes that each rank sends."""
    sizes = torch.zeros(world_size(), dtype=torch.int64)
    sizes[rank()] = len(data)
    return reduce_counts(sizes).tolist()


def _pack(arrays: Sequence[np.ndarray]) -> bytes:
    """Arrays as safetensors.

    An object array becomes two arrays, the lengths and the joined bytes of its elements.
    """
    tensors = {}
    for index, array in enumerate(arrays):
        if array.dtype == object:
            tensors[f"{index} lengths"] = np.array([len(item) for item in array], np.int64)
            array = np.frombuffer(b"".join(array), np.uint8)
        tensors[str(index)] = np.ascontiguousarray(array)
    return save(tensors)


def _unpack(data: bytes) -> list[np.ndarray]:
    """The arrays that `_pack` was given."""
    tensors = load(data)
    num_arrays = len([name for name in tensors if name.isdecimal()])
    arrays = []
    for index in range(num_arrays):
        array = tensors[str(index)]
        lengths = tensors.get(f"{index} lengths")
        if lengths is not None:
            array = _split_bytes(array.tobytes(), lengths)
        arrays.append(array)
    return arrays


def _split_bytes(joined: bytes, lengths: np.ndarray) -> np.ndarray:
    """An object array of bytes, each of its length."""
    items = []
    start = 0
    for length in lengths.tolist():
        items.append(joined[start : start + length])
        start += length
    # With None, numpy keeps the bytes objects.
    return np.array(items + [None], object)[:-1]


def _node() -> tuple[int, ...]:
    """The ranks of this node, ascending."""
    return next(members for members in nodes() if rank() in members)


def _find_nodes() -> list[tuple[int, ...]]:
    boot_id = Path("/proc/sys/kernel/random/boot_id")  # cloned machines may have the same host name
    node = (
        socket.gethostname(),
        boot_id.read_text() if boot_id.exists() else "",
        os.environ.get("GROUP_RANK"),
    )
    ranks_by_node: dict[Hashable, list[int]] = {}
    for member, member_node in enumerate(gather_objects(node)):
        ranks_by_node.setdefault(tuple(member_node), []).append(member)
    return list(map(tuple, ranks_by_node.values()))


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
