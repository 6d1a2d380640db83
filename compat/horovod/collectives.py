"""Collectives on torch.distributed groups: what runs once the ranks agree. NCCL for CUDA tensors,
gloo for CPU tensors.

All functions are called on every rank of the group, in one order.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import devices
from compat.horovod.requests import AVERAGE, MAX, MIN, PRODUCT, SUM, Request

_REDUCE = {
    SUM: dist.ReduceOp.SUM,
    AVERAGE: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}
_SHORT = (torch.uint8, torch.int8, torch.int16)
_WIDE = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCIBLE = _SHORT + _WIDE


@dataclass(frozen=True)
class Group:
    """A process set that this process is in: its ranks in the world, and its process group."""

    ranks: list[int]
    process_group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This process's place in the set."""
        return dist.get_rank(self.process_group)


def backend() -> str:
    """The backends of torch.distributed for each kind of device."""
    return (
        "cpu:gloo,cuda:nccl"
        if devices.get_device_type() == "cuda" and dist.is_nccl_available()
        else "gloo"
    )


def patience() -> timedelta:
    """How long a rank that does not answer is waited for."""
    return timedelta(seconds=float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", 300)))


def make_group(ranks: list[int]) -> Group | None:
    """A new process set, None outside of it. Called on all ranks of the world."""
    process_group: Any = dist.new_group(ranks, backend=backend(), timeout=patience())
    return Group(ranks, process_group) if dist.get_rank() in ranks else None


def gather(own: Tensor, group: Group) -> list[Tensor]:
    """The tensors of all ranks, which have the same shape."""
    parts = [torch.empty_like(own) for _ in group.ranks]
    dist.all_gather(parts, own, group.process_group)
    return parts


def zeros(request: Request, device: torch.device) -> list[Tensor]:
    """The tensors that a rank supplies that has joined."""
    pairs = zip(request.shapes, request.dtypes, strict=True)
    return [
        torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in pairs
    ]


def run(
    request: Request,
    tensors: Sequence[Tensor],
    shapes: Sequence[Sequence[Sequence[int]]],
    splits: Sequence[Sequence[int]],
    group: Group,
) -> list[Any]:
    """The output for each tensor, in new memory. `shapes` and `splits` have an entry per rank."""
    if request.kind == "allreduce":
        return _all_reduce(tensors, request, group)
    if request.kind == "broadcast":
        return [_broadcast(tensor, request.root, group) for tensor in tensors]
    if request.kind == "allgather":
        of_tensors = zip(*shapes, strict=True)  # one entry per tensor, each with one shape per rank
        pairs = zip(tensors, of_tensors, strict=True)
        return [
            _gather(tensor, [shape[0] for shape in of_ranks], group) for tensor, of_ranks in pairs
        ]
    if request.kind == "alltoall":
        return [_all_to_all(tensors[0], splits, group)]
    # reducescatter, as gloo does it: the first ranks get one row more if they don't divide.
    pieces = [
        whole.tensor_split(len(group.ranks)) for whole in _all_reduce(tensors, request, group)
    ]
    return [of_ranks[group.rank].clone() for of_ranks in pieces]


def _all_reduce(tensors: Sequence[Tensor], request: Request, group: Group) -> list[Tensor]:
    """The reduction of each tensor. Tensors of one type travel together."""
    results = [*tensors]
    for dtype in {tensor.dtype: None for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        lengths = [tensors[place].numel() for place in places]
        for place, piece in zip(places, _reduced(flat, request, group).split(lengths), strict=True):
            # .data: with a version of its own.
            results[place] = piece.data.view(tensors[place].shape)
    return results


def _reduced(flat: Tensor, request: Request, group: Group) -> Tensor:
    # An average must not overflow, and gloo has no int16.
    wide = flat.int() if flat.dtype in _SHORT else flat
    wide = _scaled(wide, request.prescale)
    if wide.numel():
        dist.all_reduce(wide, _REDUCE[request.op], group.process_group)
    if request.op == AVERAGE:
        wide.div_(len(group.ranks), rounding_mode=None if wide.is_floating_point() else "trunc")
    return _scaled(wide, request.postscale).to(flat.dtype)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """The tensor times the factor, perhaps in place. Integers are rounded towards zero."""
    if factor == 1.0:
        return tensor
    return (
        tensor.mul_(factor)
        if tensor.is_floating_point()
        else (tensor.double() * factor).trunc().to(tensor.dtype)
    )


def _gather(tensor: Tensor, rows: Sequence[int], group: Group) -> Tensor:
    """All ranks' tensors, one after the other; they have so many rows."""
    result = tensor.new_empty(sum(rows), *tensor.shape[1:])
    parts = [_bytes(part) for part in result.split([*rows])]
    if result.numel() == 0:
        return result
    if len({*rows}) == 1:
        dist.all_gather(parts, _bytes(tensor.contiguous()), group.process_group)
        return result
    parts[group.rank].copy_(_bytes(tensor.contiguous()))
    for part, rank in zip(parts, group.ranks, strict=True):
        if len(part):
            dist.broadcast(part, rank, group.process_group)
    return result


def _broadcast(tensor: Tensor, root: int, group: Group) -> Tensor:
    """The tensor of rank `root` of the world."""
    result = tensor.clone(memory_format=torch.contiguous_format)
    if result.numel():
        dist.broadcast(_bytes(result), root, group.process_group)
    return result


def _all_to_all(
    tensor: Tensor, splits: Sequence[Sequence[int]], group: Group
) -> tuple[Tensor, Tensor]:
    """The ranks' rows for this one, in their order, and how many each had."""
    received = [row[group.rank] for row in splits]
    result = tensor.new_empty(sum(received), *tensor.shape[1:])
    row_bytes = tensor.element_size() * tensor.shape[1:].numel()
    if any(map(sum, splits)):
        into = [count * row_bytes for count in received]
        out = [count * row_bytes for count in splits[group.rank]]
        dist.all_to_all_single(
            _bytes(result), _bytes(tensor.contiguous()), into, out, group.process_group
        )
    return result, torch.tensor(received, dtype=torch.int32)


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: gloo does not know all types."""
    return tensor.view(-1).view(torch.uint8)
