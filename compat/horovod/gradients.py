"""Collective operations that can be differentiated. Their gradients are those of Horovod, which a script's loss counts on:

| operation | gradient of this rank's tensor |
| --- | --- |
| allreduce | the gradients, reduced like the tensor: averaged for Average, summed for Sum, with the same factors |
| allgather | this rank's rows of the ranks' average gradient |
| broadcast | on the root, the ranks' average gradient; zero elsewhere |
| alltoall | each row's gradient, sent back |
| reducescatter | all rows' gradients, gathered; for Sum times the number of ranks |

Min, Max, Product and Adasum have none: their backward raises NotImplementedError.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from compat.horovod import engine, operations
from compat.horovod.compression import Compression
from compat.horovod.operations import synchronize
from compat.horovod.process_sets import ProcessSet, global_process_set
from compat.horovod.requests import AVERAGE, SUM

__all__ = """allreduce grouped_allreduce allgather grouped_allgather broadcast alltoall reducescatter
grouped_reducescatter""".split()


class _Allreduce(Function):
    @staticmethod
    def forward(ctx: Any, options: tuple, name: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        return tuple(synchronize(operations.grouped_allreduce_async(tensors, None, name, *options)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        if ctx.options[0] not in (AVERAGE, SUM):
            raise NotImplementedError("allreduce has a gradient for op=hvd.Average and hvd.Sum only")
        return None, None, *synchronize(operations.grouped_allreduce_async(gradients, None, None, *ctx.options))


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, process_set: ProcessSet, name: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        handle = operations.grouped_allgather_async(tensors, name, process_set)
        operation, results = engine.current().handles[handle], synchronize(handle)
        ctx.process_set, own = process_set, process_set.rank()
        of_tensors = zip(*operation.shapes, strict=True)  # one entry per tensor, each with one shape per rank
        ctx.rows = [(sum(shape[0] for shape in shapes[:own]), shapes[own][0]) for shapes in of_tensors]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        averaged = synchronize(operations.grouped_allreduce_async(gradients, process_set=ctx.process_set))
        return None, None, *(whole.narrow(0, *rows) for whole, rows in zip(averaged, ctx.rows, strict=True))


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(operations.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        averaged = synchronize(operations.allreduce_async(gradient, process_set=ctx.process_set))
        is_root = engine.current().rank == ctx.root_rank
        return averaged if is_root else torch.zeros_like(averaged), None, None, None


class _Alltoall(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        output, received = synchronize(operations.alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple:
        back, _ = synchronize(operations.alltoall_async(gradient, ctx.received, None, ctx.process_set))
        return back, None, None, None


class _Reducescatter(Function):
    @staticmethod
    def forward(ctx: Any, options: tuple, name: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        return tuple(synchronize(operations.grouped_reducescatter_async(tensors, name, *options)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        op, process_set, prescale, postscale = ctx.options
        factor = prescale * postscale * (process_set.size() if op == SUM else 1)
        scaled = [gradient * factor for gradient in gradients]
        return None, None, *synchronize(operations.grouped_allgather_async(scaled, None, process_set))


def _compressed(
    function: Any, tensors: Sequence[Tensor], name: str | None, compression: Any, options: tuple
) -> list[Tensor]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = function.apply(options, name, *(small for small, _ in pairs))
    return [compression.decompress(small, context) for small, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors as one operation."""
    options = (operations.reduction(op, average), prescale_factor, postscale_factor, process_set)
    return _compressed(_Allreduce, tensors, name, compression, options)


@operations.like(grouped_allreduce)
def allreduce(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Reduce a tensor over the ranks, see `allreduce_async`; `compression` makes smaller what is sent."""
    return grouped_allreduce([tensor], *args, **options)[0]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension, in which alone they may differ."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors as one operation."""
    return [*_Allgather.apply(process_set, name, *tensors)]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """A copy of the tensor of rank `root_rank` of the world, also with a process set."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows to every rank, see `alltoall_async`. Returns the received rows; with `splits` also how many came from each."""
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    if splits is None:
        return output
    return output, received.to(splits) if isinstance(splits, Tensor) else received


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors as one operation."""
    return _compressed(_Reducescatter, tensors, name, compression, (op, process_set, prescale_factor, postscale_factor))


@operations.like(grouped_reducescatter)
def reducescatter(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Reduce a tensor, and return this rank's rows of the result, see `reducescatter_async`."""
    return grouped_reducescatter([tensor], *args, **options)[0]
