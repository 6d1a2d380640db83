"""Collectives on torch.distributed groups: what runs once the ranks agree. NCCL for CUDA tensors, gloo for CPU tensors.

All functions are called on every rank of the group, in one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compat.horovod.requests import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM, Request

_REDUCE = {
    SUM: dist.ReduceOp.SUM,
    AVERAGE: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}
_PATIENCE = timedelta(
    days=7
)  # with a rank that does something else, such as evaluating alone: Horovod has no limit either
_HALF = (torch.float16, torch.bfloat16)
_SHORT = (torch.uint8, torch.int8, torch.int16)
REDUCIBLE = (*_SHORT, torch.int32, torch.int64, *_HALF, torch.float32, torch.float64)


@dataclass(frozen=True)
class Group:
    """A process set: its ranks in the world, and its process group, None if this process is not in the set."""

    ranks: list[int]
    process_group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        """This process's place in the set."""
        return dist.get_rank(self.process_group)


def backend() -> str:
    """The backends of torch.distributed for each kind of device."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def make_group(ranks: list[int]) -> Group:
    """A new process set. Called on all ranks of the world, also those outside of the set."""
    process_group: Any = dist.new_group(ranks, backend=backend(), timeout=_PATIENCE)
    return Group(ranks, process_group if dist.get_rank() in ranks else None)


def end_group(group: Group) -> None:
    """End the process group of a set that has nothing in flight."""
    if group.process_group is not None:
        dist.destroy_process_group(group.process_group)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def zeros(request: Request, device: torch.device) -> list[Tensor]:
    """What a rank that has joined supplies."""
    pairs = zip(request.shapes, request.dtypes, strict=True)
    return [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in pairs]


def run(
    request: Request,
    inputs: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    splits: Sequence[Sequence[int]],
    group: Group,
    owned: bool,
) -> list[list[Any]]:
    """The outputs of each operation for its inputs. Several operations are all-reduces, which travel together.

    `shapes` and `splits` are those of all ranks. If the inputs are `owned`, an all-reduce may overwrite and return them.
    """
    [tensors, *_] = inputs
    if request.kind == "allreduce":
        reduced = iter(all_reduce([tensor for part in inputs for tensor in part], request, group, owned))
        return [[next(reduced) for _ in part] for part in inputs]
    if request.kind == "broadcast":
        return [[broadcast(tensor, request.root, group) for tensor in tensors]]
    if request.kind == "allgather":
        of_tensors = zip(*shapes, strict=True)  # one entry per tensor, each with one shape per rank
        return [[gather(tensor, of_ranks, group) for tensor, of_ranks in zip(tensors, of_tensors, strict=True)]]
    if request.kind == "alltoall":
        output, received = all_to_all(tensors[0], splits, group)
        return [[(output, torch.tensor(received, dtype=torch.int32))]]
    return [[reduce_scatter(tensor, request, group) for tensor in tensors]]


def all_reduce(tensors: Sequence[Tensor], request: Request, group: Group, owned: bool = False) -> list[Tensor]:
    """The reduction of each tensor. Tensors of one type travel together."""
    results = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        if owned and len(places) == 1 and tensors[places[0]].is_contiguous() and request.op != ADASUM:
            _all_reduce_(tensors[places[0]].view(-1), request, group)
            continue
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        lengths = [tensors[place].numel() for place in places]
        if request.op == ADASUM:  # its factors are those of a tensor
            pieces = [_adasum(piece, request, group) for piece in flat.split(lengths)]
        else:
            _all_reduce_(flat, request, group)
            pieces = [*flat.split(lengths)]
        for place, piece in zip(places, pieces, strict=True):
            own = piece if len(places) == 1 else piece.clone()
            results[place] = own.view(tensors[place].shape)
    return results


def _all_reduce_(flat: Tensor, request: Request, group: Group) -> None:
    """Reduce a contiguous tensor in place."""
    wide = flat.int() if flat.dtype in _SHORT else flat  # an average must not overflow, and gloo has no int16
    _scale_(wide, request.prescale)
    if wide.numel():
        dist.all_reduce(wide, _REDUCE[request.op], group.process_group)
    if request.op == AVERAGE:
        wide.div_(len(group.ranks), rounding_mode=None if wide.is_floating_point() else "trunc")
    _scale_(wide, request.postscale)
    if wide is not flat:
        flat.copy_(wide)


def _scale_(tensor: Tensor, factor: float) -> None:
    if factor != 1.0:
        scaled = tensor * factor if tensor.is_floating_point() else (tensor.double() * factor).trunc()
        tensor.copy_(scaled)


def _adasum(tensor: Tensor, request: Request, group: Group) -> Tensor:
    """Adaptive sum (arXiv 2006.02924) over pairs of ranks, then pairs of pairs.

    Orthogonal gradients add up, equal ones are averaged.
    """
    work = tensor.clone()
    _scale_(work, request.prescale)
    gathered = gather(work, [[len(work)]] * len(group.ranks), group).view(len(group.ranks), -1)
    parts = [*(gathered.float() if tensor.dtype in _HALF else gathered)]
    while len(parts) > 1:
        parts = [_adaptive_sum(first, second) for first, second in zip(parts[::2], parts[1::2], strict=True)]
    result = parts[0].to(tensor.dtype)
    _scale_(result, request.postscale)
    return result


def _adaptive_sum(first: Tensor, second: Tensor) -> Tensor:
    product, tiny = first @ second, torch.finfo(first.dtype).tiny
    share = [1 - product / (2 * (part @ part).clamp(min=tiny)) for part in (first, second)]
    return share[0] * first + share[1] * second


def gather(tensor: Tensor, shapes: Sequence[Sequence[int]], group: Group) -> Tensor:
    """All ranks' tensors, one after the other along the first dimension, in which `shapes`, those of all ranks, may differ."""
    rows = [shape[0] for shape in shapes]
    result = tensor.new_empty(sum(rows), *shapes[0][1:])
    parts = [_bytes(part) for part in result.split(rows)]
    if result.numel() == 0:
        pass
    elif len({*rows}) == 1:
        dist.all_gather(parts, _bytes(tensor.contiguous()), group.process_group)
    else:
        parts[group.rank].copy_(_bytes(tensor.contiguous()))
        works = [
            dist.broadcast(part, rank, group.process_group, async_op=True)
            for part, rank in zip(parts, group.ranks, strict=True)
            if len(part)
        ]
        for work in filter(None, works):
            work.wait()
    return result


def broadcast(tensor: Tensor, root: int, group: Group) -> Tensor:
    """The tensor of rank `root` of the world, in new memory."""
    result = tensor.clone(memory_format=torch.contiguous_format)
    if result.numel():
        dist.broadcast(_bytes(result), root, group.process_group)
    return result


def all_to_all(tensor: Tensor, splits: Sequence[Sequence[int]], group: Group) -> tuple[Tensor, list[int]]:
    """Rows that the ranks have for this one, in their order, and how many each had. `splits` are those of all ranks."""
    own = group.rank
    received = [row[own] for row in splits]
    result = tensor.new_empty(sum(received), *tensor.shape[1:])
    row_bytes = tensor.element_size() * tensor.shape[1:].numel()
    if any(map(sum, splits)):
        into = [count * row_bytes for count in received]
        out = [count * row_bytes for count in splits[own]]
        dist.all_to_all_single(_bytes(result), _bytes(tensor.contiguous()), into, out, group.process_group)
    return result, received


def reduce_scatter(tensor: Tensor, request: Request, group: Group) -> Tensor:
    """This rank's rows of the reduction. The first ranks have one row more if the rows don't divide."""
    quotient, rest = divmod(len(tensor), len(group.ranks))
    rows = [quotient + (place < rest) for place in range(len(group.ranks))]
    if tensor.is_cuda:
        wide = tensor.int() if tensor.dtype in _SHORT else tensor.clone(memory_format=torch.contiguous_format)
        _scale_(wide, request.prescale)
        chunks = [chunk.contiguous() for chunk in wide.split(rows)]
        result = torch.empty_like(chunks[group.rank])
        if tensor.numel():
            dist.reduce_scatter(result, chunks, _REDUCE[request.op], group.process_group)
        if request.op == AVERAGE:
            result.div_(len(rows), rounding_mode=None if result.is_floating_point() else "trunc")
        _scale_(result, request.postscale)
        return result.to(tensor.dtype)
    [whole] = all_reduce([tensor], request, group)  # what gloo's own does, too
    return whole.split(rows)[group.rank].clone()


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: every type can be moved so, and gloo does not know them all."""
    return tensor.view(-1).view(torch.uint8)
