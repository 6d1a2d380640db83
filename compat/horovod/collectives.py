"""Collectives on torch.distributed groups: what runs once the ranks agree.

CUDA tensors travel over NCCL, CPU tensors over gloo. All functions are called on every rank of the
group, in one order.
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
        """This process's rank in the set."""
        return dist.get_rank(self.process_group)


def get_backend() -> str:
    """The backends of torch.distributed for each kind of device."""
    if devices.get_device_type() == "cuda" and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def get_timeout() -> timedelta:
    """How long a rank that does not answer is waited for."""
    return timedelta(seconds=float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", 300)))


def make_group(ranks: list[int]) -> Group | None:
    """Make a new process set, None outside of it. Called on all ranks of the world."""
    process_group: Any = dist.new_group(ranks, backend=get_backend(), timeout=get_timeout())
    return Group(ranks, process_group) if dist.get_rank() in ranks else None


def gather(tensor: Tensor, group: Group) -> list[Tensor]:
    """Gather the tensors of all ranks, which have the same shape."""
    tensors = [torch.empty_like(tensor) for _ in group.ranks]
    dist.all_gather(tensors, tensor, group.process_group)
    return tensors


def create_zeros(request: Request, device: torch.device) -> list[Tensor]:
    """Create the tensors that a rank supplies that has joined."""
    tensors = []
    for shape, dtype in zip(request.shapes, request.dtypes, strict=True):
        tensors.append(torch.zeros(shape, dtype=getattr(torch, dtype), device=device))
    return tensors


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
    outputs: list[Any] = []
    if request.kind == "allgather":
        for i, tensor in enumerate(tensors):
            num_rows = [rank_shapes[i][0] for rank_shapes in shapes]
            outputs.append(_all_gather(tensor, num_rows, group))
        return outputs
    if request.kind == "alltoall":
        return [_all_to_all(tensors[0], splits, group)]
    # reducescatter, as gloo does it: the first ranks get one row more if they don't divide.
    for reduced in _all_reduce(tensors, request, group):
        chunks = reduced.tensor_split(len(group.ranks))
        outputs.append(chunks[group.rank].clone())
    return outputs


def _all_reduce(tensors: Sequence[Tensor], request: Request, group: Group) -> list[Tensor]:
    """Reduce each tensor. Tensors of one type travel together."""
    indices_by_dtype: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices_by_dtype.setdefault(tensor.dtype, []).append(i)
    results = list(tensors)
    for indices in indices_by_dtype.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in indices])
        lengths = [tensors[i].numel() for i in indices]
        chunks = _all_reduce_flat(flat, request, group).split(lengths)
        for i, chunk in zip(indices, chunks, strict=True):
            # .data: with a version of its own.
            results[i] = chunk.data.view(tensors[i].shape)
    return results


def _all_reduce_flat(flat: Tensor, request: Request, group: Group) -> Tensor:
    # An average must not overflow, and gloo has no int16.
    wide = flat.int() if flat.dtype in _SHORT else flat
    wide = _scale(wide, request.prescale)
    if wide.numel():
        dist.all_reduce(wide, _REDUCE[request.op], group.process_group)
    if request.op == AVERAGE:
        wide.div_(len(group.ranks), rounding_mode=None if wide.is_floating_point() else "trunc")
    return _scale(wide, request.postscale).to(flat.dtype)


def _scale(tensor: Tensor, factor: float) -> Tensor:
    """Multiply the tensor by the factor, perhaps in place. Integers are rounded towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point():
        return tensor.mul_(factor)
    return (tensor.double() * factor).trunc().to(tensor.dtype)


def _all_gather(tensor: Tensor, num_rows: Sequence[int], group: Group) -> Tensor:
    """Concatenate the tensors of all ranks, which have so many rows."""
    result = tensor.new_empty(sum(num_rows), *tensor.shape[1:])
    if result.numel() == 0:
        return result
    chunks = [_view_bytes(chunk) for chunk in result.split(list(num_rows))]
    data = _view_bytes(tensor.contiguous())
    if len(set(num_rows)) == 1:
        dist.all_gather(chunks, data, group.process_group)
        return result
    chunks[group.rank].copy_(data)
    for chunk, rank in zip(chunks, group.ranks, strict=True):
        if len(chunk):
            dist.broadcast(chunk, rank, group.process_group)
    return result


def _broadcast(tensor: Tensor, root: int, group: Group) -> Tensor:
    """The tensor of rank `root` of the world."""
    result = tensor.clone(memory_format=torch.contiguous_format)
    if result.numel():
        dist.broadcast(_view_bytes(result), root, group.process_group)
    return result


def _all_to_all(
    tensor: Tensor, splits: Sequence[Sequence[int]], group: Group
) -> tuple[Tensor, Tensor]:
    """The ranks' rows for this one, in their order, and how many each had."""
    num_received = [rank_splits[group.rank] for rank_splits in splits]
    result = tensor.new_empty(sum(num_received), *tensor.shape[1:])
    row_bytes = tensor.element_size() * tensor.shape[1:].numel()
    if any(map(sum, splits)):
        output_bytes = [num_rows * row_bytes for num_rows in num_received]
        input_bytes = [num_rows * row_bytes for num_rows in splits[group.rank]]
        dist.all_to_all_single(
            _view_bytes(result),
            _view_bytes(tensor.contiguous()),
            output_bytes,
            input_bytes,
            group.process_group,
        )
    return result, torch.tensor(num_received, dtype=torch.int32)


def _view_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: gloo does not know all types."""
    return tensor.view(-1).view(torch.uint8)
