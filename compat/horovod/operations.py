"""Collective operations of the Horovod API on torch tensors.

A name identifies a tensor across ranks; without one, the calls of a kind are counted. Ranks may call in different orders
as long as they don't wait for each other. All functions take a `process_set`, by default all ranks. They raise ValueError for
what is wrong on this rank alone, such as a name that is in flight, and HorovodInternalError on all ranks if they disagree.

`*_async` functions return a handle for `poll` and `synchronize`. A trailing underscore means in place.
Functions without either can be differentiated, see gradients.py.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compat.horovod import engine
from compat.horovod.collectives import REDUCIBLE
from compat.horovod.process_sets import ProcessSet, global_process_set
from compat.horovod.requests import ADASUM, AVERAGE, JOIN, MAX, MIN, PRODUCT, SUM

__all__ = """Average Sum Adasum Min Max Product allreduce_async allreduce_async_ allreduce_ grouped_allreduce_async
grouped_allreduce_async_ grouped_allreduce_ sparse_allreduce_async allgather_async grouped_allgather_async broadcast_async
broadcast_async_ broadcast_ alltoall_async reducescatter_async grouped_reducescatter_async poll synchronize join
barrier""".split()

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT


def like(model: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function that takes `*options` have the parameters of another one, after its first."""

    def with_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
        first = next(iter(inspect.signature(function).parameters.values()))
        rest = [each for each in inspect.signature(model).parameters.values() if each.kind != each.VAR_KEYWORD][1:]
        signature = inspect.Signature([first, *rest], return_annotation=inspect.signature(function).return_annotation)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return with_parameters


def reduction(op: int | None, average: bool | None) -> int:
    """The reduction that `op`, or the deprecated `average`, asks for; by default the average."""
    if op is not None and average is not None:
        raise ValueError("give op or average, not both: average is deprecated")
    if average is not None:
        warnings.warn("average is deprecated: give op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=5)
        return AVERAGE if average else SUM
    if op is None:
        return AVERAGE
    if op not in range(PRODUCT + 1):
        raise ValueError(f"op={op!r} is none of hvd.Average, Sum, Adasum, Min, Max and Product")
    return op


def _check_types(tensors: Sequence[Tensor], op: int, process_set: ProcessSet) -> None:
    if not tensors:
        raise ValueError("a group has at least one tensor")
    for tensor in tensors:
        if tensor.dtype not in REDUCIBLE or (op == ADASUM and not tensor.is_floating_point()):
            raise ValueError(f"tensors of type {tensor.dtype} can't be reduced{' by Adasum' * (op == ADASUM)}")
        if tensor.is_sparse:
            raise ValueError("sparse tensors are reduced by sparse_allreduce_async")
    if op == ADASUM:
        if process_set.process_set_id != global_process_set.process_set_id:
            raise NotImplementedError("Adasum works on all ranks, not on a process set")
        if (size := process_set.size()) & (size - 1):
            raise NotImplementedError(f"Adasum needs a number of ranks that is a power of 2, not {size}")


def _submit(kind: str, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, **options: Any) -> int:
    return engine.current().submit(kind, tensors, name=name, set_id=process_set.process_set_id, **options)


# --- allreduce


def _allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **how: bool,
) -> int:
    op = reduction(op, average)
    _check_types(tensors, op, process_set)
    scales = {"prescale": prescale_factor, "postscale": postscale_factor}
    return _submit("allreduce", tensors, name, process_set, op=op, **scales, **how)


@like(_allreduce)
def allreduce_async(tensor: Tensor, *args: Any, **options: Any) -> int:
    """Reduce a tensor over the ranks; all have the same shape and type. The result is a new tensor.

    `op` is Average by default. The tensor is multiplied by `prescale_factor` before and by `postscale_factor` after the
    reduction; integers are rounded towards zero, also their average. A rank that has joined supplies zeros to sums and
    averages, and counts in the average.
    """
    return _allreduce([tensor], *args, **options)


@like(_allreduce)
def allreduce_async_(tensor: Tensor, *args: Any, **options: Any) -> int:
    """`allreduce_async` in place."""
    return _allreduce([tensor], *args, **options, in_place=True)


@like(_allreduce)
def allreduce_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Reduce a tensor in place, and return it."""
    return synchronize(_allreduce([tensor], *args, **options, in_place=True))


@like(_allreduce)
def grouped_allreduce_async(tensors: Sequence[Tensor], *args: Any, **options: Any) -> int:
    """`allreduce_async` of several tensors as one operation; the result is a list."""
    return _allreduce(tensors, *args, **options, grouped=True)


@like(_allreduce)
def grouped_allreduce_async_(tensors: Sequence[Tensor], *args: Any, **options: Any) -> int:
    """`grouped_allreduce_async` in place."""
    return _allreduce(tensors, *args, **options, in_place=True, grouped=True)


@like(_allreduce)
def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """Reduce several tensors in place as one operation, and return them."""
    return synchronize(_allreduce(tensors, *args, **options, in_place=True, grouped=True))


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Sum or average sparse tensors. Call the handle, or give it to `synchronize`, for the result: sparse, not coalesced."""
    if op not in (AVERAGE, SUM):
        raise NotImplementedError("sparse tensors can be summed and averaged only")
    indices = allgather_async(tensor._indices().t(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def handle() -> Tensor:
        places, total = synchronize(indices).t(), synchronize(values)
        total = total / process_set.size() if op == AVERAGE else total
        return torch.sparse_coo_tensor(places, total.to(tensor.dtype), tensor.shape)

    return handle


# --- allgather, broadcast, alltoall, reducescatter


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Concatenate the ranks' tensors along the first dimension, in which alone they may differ."""
    return _submit("allgather", [tensor], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """`allgather_async` of several tensors as one operation; the result is a list."""
    return _submit("allgather", tensors, name, process_set, grouped=True)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Send the tensor of rank `root_rank` of the world, also with a process set, to all; the result is a new tensor."""
    return _submit("broadcast", [tensor], name, process_set, root=root_rank)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """`broadcast_async` in place."""
    return _submit("broadcast", [tensor], name, process_set, root=root_rank, in_place=True)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite the tensor with that of rank `root_rank`, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Send rows to every rank: `splits[i]` to the i-th, by default equally many.

    The result is the pair (received rows in the order of ranks, number of rows from each rank as int32).
    """
    if tensor.dim() == 0:
        raise ValueError("alltoall: a tensor of no dimensions has no rows")
    return _submit("alltoall", [tensor], name, process_set, splits=_row_counts(len(tensor), splits, process_set))


def _row_counts(rows: int, splits: Tensor | Sequence[int] | None, process_set: ProcessSet) -> list[int]:
    """Rows for each rank. A wrong number is this rank's own mistake, so it raises ValueError here."""
    size = process_set.size()
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall: {rows} rows can't be split equally among {size} ranks: give splits")
        return [rows // size] * size
    counts = splits.tolist() if isinstance(splits, Tensor) else [*splits]
    if not all(isinstance(count, int | np.integer) and not isinstance(count, bool) for count in counts):
        raise ValueError(f"alltoall: splits {counts} are not whole numbers")
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(f"alltoall: splits {counts} are not {size} counts of rows that sum up to {rows}")
    return [int(count) for count in counts]


def _reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **how: bool,
) -> int:
    if op not in (AVERAGE, SUM):
        raise NotImplementedError("reducescatter takes op=hvd.Average or hvd.Sum")
    _check_types(tensors, op, process_set)
    scales = {"prescale": prescale_factor, "postscale": postscale_factor}
    return _submit("reducescatter", tensors, name, process_set, op=op, **scales, **how)


@like(_reducescatter)
def reducescatter_async(tensor: Tensor, *args: Any, **options: Any) -> int:
    """Reduce by Average or Sum, and give each rank its rows of the result: the first ranks one more if they don't divide."""
    return _reducescatter([tensor], *args, **options)


@like(_reducescatter)
def grouped_reducescatter_async(tensors: Sequence[Tensor], *args: Any, **options: Any) -> int:
    """`reducescatter_async` of several tensors as one operation; the result is a list."""
    return _reducescatter(tensors, *args, **options, grouped=True)


# --- handles, join, barrier


def poll(handle: int) -> bool:
    """Whether the operation has ended, so that `synchronize` returns at once. Raises ValueError for an unknown handle."""
    return engine.current().poll(handle)


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for an operation, and return its result; None if the handle was synchronized already.

    Raises HorovodInternalError if the operation failed.
    """
    return handle() if callable(handle) else engine.current().synchronize(handle)


def join(device: int = -1) -> int:
    """Tell the others that this rank has no more data, and wait until all ranks have joined; returns the last one's rank.

    Meanwhile this rank supplies zeros to their allreduces, on GPU `device` if they reduce there (by default this
    process's current one). Other operations of all ranks fail while ranks have joined.
    """
    running = engine.current()
    if torch.cuda.is_available():
        running.join_device = torch.device("cuda", device if device >= 0 else torch.cuda.current_device())
    return running.call("join", name=JOIN)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called it."""
    engine.current().call("barrier", set_id=process_set.process_set_id)
