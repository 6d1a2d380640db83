"""Collective operations of the Horovod API on torch tensors.

A name identifies a tensor across ranks; without one, the calls of a kind are counted. Ranks
may call in different orders as long as they don't wait for each other. All functions take a
`process_set`, by default all ranks. They raise ValueError for a mistake of this rank
alone, such as a name that is in flight, and HorovodInternalError on all ranks if they
disagree.

Each kind comes in forms. `*_async` functions return a handle for `poll` and `synchronize`. A
trailing underscore means in place. `grouped_*` functions take and return several tensors, as
one operation. Functions that are neither asynchronous nor in place can be differentiated, with
Horovod's gradients, which a script's loss counts on: an allreduce reduces them like the tensor, an
allgather or a broadcast averages them, an alltoall sends them back, and a reducescatter gathers
them, for Sum times the number of ranks. Min, Max and Product have none: their backward raises
NotImplementedError.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from common.distributed import devices
from compat.horovod import engine
from compat.horovod.collectives import REDUCIBLE
from compat.horovod.compression import Compression
from compat.horovod.engine import Operation
from compat.horovod.process_sets import ProcessSet, global_process_set
from compat.horovod.requests import ADASUM, AVERAGE, JOIN, MAX, MIN, PRODUCT, SUM

Average = AVERAGE
Sum = SUM
Adasum = ADASUM
Min = MIN
Max = MAX
Product = PRODUCT
Options = Mapping[str, Any]  # the arguments of a collective, besides its tensors
DEFAULTS: dict[str, Any] = {
    "average": None,
    "name": None,
    "label": 0,
    "compression": Compression.none,
    "op": None,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "splits": None,
    "process_set": global_process_set,
}


def start(
    kind: str,
    tensors: Sequence[Tensor],
    options: Options,
    *,
    in_place: bool = False,
    grouped: bool = False,
) -> Operation:
    """Request a collective."""
    fields = _FIELDS[kind](tensors, options)
    fields |= {"name": options["name"], "set_id": options["process_set"].process_set_id}
    return engine.current().submit(kind, tensors, in_place=in_place, grouped=grouped, **fields)


# --- what each kind requests


def _list_allreduce_fields(tensors: Sequence[Tensor], options: Options) -> dict[str, Any]:
    op = options["op"]
    if op is not None and options["average"] is not None:
        raise ValueError("give op or average, not both: average is deprecated")
    if options["average"] is not None:
        warnings.warn(
            "average is deprecated: give op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=4,
        )
        op = AVERAGE if options["average"] else SUM
    if op is None:
        op = AVERAGE
    if op == ADASUM:
        raise NotImplementedError(
            "Adasum is not there: take op=hvd.Average, and the learning rate for it"
        )
    if op not in range(PRODUCT + 1):
        raise ValueError(f"op={op!r} is none of hvd.Average, Sum, Min, Max and Product")
    if not tensors:
        raise ValueError("a group has at least one tensor")
    for tensor in tensors:
        if tensor.dtype not in REDUCIBLE:
            raise ValueError(f"tensors of type {tensor.dtype} can't be reduced")
        if tensor.is_sparse:
            raise ValueError("sparse tensors are reduced by sparse_allreduce_async")
    return {
        "op": op,
        "label": options["label"],
        "prescale": options["prescale_factor"],
        "postscale": options["postscale_factor"],
    }


def _list_reducescatter_fields(tensors: Sequence[Tensor], options: Options) -> dict[str, Any]:
    if options["op"] not in (None, AVERAGE, SUM):
        raise NotImplementedError("reducescatter takes op=hvd.Average or hvd.Sum")
    return _list_allreduce_fields(tensors, options)


def _list_alltoall_fields(tensors: Sequence[Tensor], options: Options) -> dict[str, Any]:
    """Rows for each rank. A wrong number is this rank's own mistake: ValueError."""
    num_rows = len(tensors[0])
    num_ranks = options["process_set"].size()
    splits = options["splits"]
    if splits is None:
        if num_rows % num_ranks:
            raise ValueError(
                f"alltoall: {num_rows} rows can't be split equally among {num_ranks} ranks: give "
                "splits"
            )
        return {"splits": [num_rows // num_ranks] * num_ranks}
    counts = torch.as_tensor(splits)
    is_valid = not counts.is_floating_point() and len(counts) == num_ranks
    if not is_valid or counts.min() < 0 or counts.sum() != num_rows:
        raise ValueError(
            f"alltoall: splits {splits} are not {num_ranks} whole numbers of rows that sum up to "
            f"{num_rows}"
        )
    return {"splits": counts.tolist()}


_FIELDS: dict[str, Callable[[Sequence[Tensor], Options], dict[str, Any]]] = {
    "allreduce": _list_allreduce_fields,
    "allgather": lambda tensors, options: {},
    "broadcast": lambda tensors, options: {"root": options["root_rank"]},
    "alltoall": _list_alltoall_fields,
    "reducescatter": _list_reducescatter_fields,
}


# --- gradients


class _Differentiable(Function):
    """A collective of several tensors that waits for its results."""

    @staticmethod
    def forward(ctx: Any, kind: str, options: Options, *tensors: Tensor) -> tuple[Tensor, ...]:
        operation = start(kind, tensors, options, grouped=True)
        results = operation.wait()
        ctx.kind = kind
        ctx.options = {**options, "name": None}
        ctx.shapes = operation.shapes
        if kind != "alltoall":
            return tuple(results)
        [(output, received)] = results
        ctx.options["splits"] = received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        options = ctx.options
        if ctx.kind == "allreduce":
            if options["op"] not in (None, AVERAGE, SUM):
                raise NotImplementedError(
                    "allreduce has a gradient for op=hvd.Average and hvd.Sum only"
                )
            return None, None, *_wait_for("allreduce", gradients, options)
        if ctx.kind == "alltoall":
            [(input_gradient, _)] = _wait_for("alltoall", gradients[:1], options)
            return None, None, input_gradient
        process_set = options["process_set"]
        average = DEFAULTS | {"process_set": process_set}
        if ctx.kind == "reducescatter":
            factor = options["prescale_factor"] * options["postscale_factor"]
            if options["op"] == SUM:
                factor *= process_set.size()
            scaled = [gradient * factor for gradient in gradients]
            return None, None, *_wait_for("allgather", scaled, average)
        input_gradients = _wait_for("allreduce", gradients, average)
        if ctx.kind == "allgather":
            # This rank's rows of each tensor.
            for i, gradient in enumerate(input_gradients):
                num_rows = [rank_shapes[i][0] for rank_shapes in ctx.shapes]
                input_gradients[i] = gradient.split(num_rows)[process_set.rank()]
        elif engine.current().rank != options["root_rank"]:
            input_gradients = [torch.zeros_like(gradient) for gradient in input_gradients]
        return None, None, *input_gradients


def _wait_for(kind: str, tensors: Sequence[Tensor], options: Options) -> list[Any]:
    return start(kind, tensors, options, grouped=True).wait()


# --- the forms of each kind

_PARAMETERS = {  # after the tensor, in Horovod's order
    "allreduce": "average name op prescale_factor postscale_factor process_set",
    "allgather": "name process_set",
    "broadcast": "root_rank name process_set",
    "alltoall": "splits name process_set",
    "reducescatter": "name op process_set prescale_factor postscale_factor",
}
_TEXTS = {
    "allreduce": """Reduce tensors over the ranks; all have the same shapes and types.

    `op` is Average by default. Tensors are multiplied by `prescale_factor` before and by
    `postscale_factor` after the reduction; integers are rounded towards zero, also their average. A
    rank that has joined supplies zeros to sums and averages, and counts in the average.
    `compression` makes the sent tensors smaller.""",
    "allgather": "Concatenate the ranks' tensors along the first dimension, in which alone they may differ.",
    "broadcast": "Send the tensor of rank `root_rank` of the world, also with a process set, to all.",
    "reducescatter": """Reduce tensors by Average or Sum, and give each rank its rows of the result.

    The first ranks get one row more if they don't divide.""",
    "alltoall": """Send rows to every rank: `splits[i]` to the i-th, by default equally many.

    Returns the received rows in the order of ranks; with `splits`, and from a handle, also how many
    came from each.""",
}


def _make_form(
    kind: str, *, grouped: bool = False, in_place: bool = False, wait: bool = True
) -> Any:
    """Make a public function."""
    names = ["tensors" if grouped else "tensor"]
    names += _PARAMETERS[kind].split()
    if wait and not in_place and "op" in names:
        names.insert(names.index("op"), "compression")
    parameters = []
    for name in names:
        default = DEFAULTS.get(name, Parameter.empty)
        parameters.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default))
    signature = Signature(parameters)

    def form(*args: Any, **kwargs: Any) -> Any:
        options = DEFAULTS | signature.bind(*args, **kwargs).arguments
        tensors = options.pop(names[0])
        tensors = list(tensors) if grouped else [tensors]
        if in_place or not wait:
            handle = start(kind, tensors, options, in_place=in_place, grouped=grouped)
            return handle.wait() if wait else handle
        return _run_differentiable(kind, tensors, options, grouped)

    form.__signature__ = signature  # type: ignore[attr-defined]
    form.__doc__ = _TEXTS[kind]
    return form


def _run_differentiable(
    kind: str, tensors: Sequence[Tensor], options: dict[str, Any], grouped: bool
) -> Any:
    compressor = options["compression"]
    splits = options["splits"]
    compressed = []
    contexts = []
    for tensor in tensors:
        small, context = compressor.compress(tensor)
        compressed.append(small)
        contexts.append(context)
    outputs = _Differentiable.apply(kind, options, *compressed)
    results = []
    for output, context in zip(outputs, contexts, strict=False):  # alltoall has a second output
        results.append(compressor.decompress(output, context))
    if splits is not None:
        received = outputs[1]
        if isinstance(splits, Tensor):
            received = received.to(splits)
        return results[0], received
    return results if grouped else results[0]


allreduce = _make_form("allreduce")
allreduce_ = _make_form("allreduce", in_place=True)
allreduce_async = _make_form("allreduce", wait=False)
allreduce_async_ = _make_form("allreduce", in_place=True, wait=False)
grouped_allreduce = _make_form("allreduce", grouped=True)
grouped_allreduce_ = _make_form("allreduce", grouped=True, in_place=True)
grouped_allreduce_async = _make_form("allreduce", grouped=True, wait=False)
grouped_allreduce_async_ = _make_form("allreduce", grouped=True, in_place=True, wait=False)
allgather = _make_form("allgather")
allgather_async = _make_form("allgather", wait=False)
grouped_allgather = _make_form("allgather", grouped=True)
grouped_allgather_async = _make_form("allgather", grouped=True, wait=False)
broadcast = _make_form("broadcast")
broadcast_ = _make_form("broadcast", in_place=True)
broadcast_async = _make_form("broadcast", wait=False)
broadcast_async_ = _make_form("broadcast", in_place=True, wait=False)
alltoall = _make_form("alltoall")
alltoall_async = _make_form("alltoall", wait=False)
reducescatter = _make_form("reducescatter")
reducescatter_async = _make_form("reducescatter", wait=False)
grouped_reducescatter = _make_form("reducescatter", grouped=True)
grouped_reducescatter_async = _make_form("reducescatter", grouped=True, wait=False)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Average or Sum of sparse tensors of one shape, by an allgather of their indices and values.

    Call the returned function to wait for the result, which is sparse and not coalesced.
    """
    if op not in (AVERAGE, SUM):
        raise NotImplementedError("sparse tensors take op=hvd.Average or hvd.Sum")
    options = {"name": name, "process_set": process_set}
    operation = start("allgather", [tensor._indices().t(), tensor._values()], options, grouped=True)

    def wait() -> Tensor:
        indices, values = operation.wait()
        if op == AVERAGE:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True)

    return wait


# --- handles, join, barrier


def poll(handle: Operation) -> bool:
    """True if the operation has ended, so that `synchronize` returns at once."""
    return handle.poll()


def synchronize(handle: Operation) -> Any:
    """Wait for an operation; returns its result. Raises HorovodInternalError if it failed."""
    return handle.wait()


def join(device: int = -1) -> int:
    """Announce that this rank has no more data, and wait for all ranks; returns the last one to join.

    Meanwhile this rank supplies zeros to their allreduces, on GPU `device` if they reduce
    there (by default this process's current one). Other operations of all ranks fail while
    ranks have joined.
    """
    running = engine.current()
    if devices.get_device_type() == "cuda":
        if device < 0:
            device = torch.accelerator.current_device_index()
        running.join_device = torch.device("cuda", device)
    return running.call("join", name=JOIN)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called it."""
    engine.current().call("barrier", set_id=process_set.process_set_id)


_FORMS = [
    name for name in globals() if name.removeprefix("grouped_").startswith(tuple(_PARAMETERS))
]
__all__ = (
    "Average Sum Adasum Min Max Product poll synchronize join barrier sparse_allreduce_async"
).split()
__all__ += _FORMS
for _form_name in _FORMS:
    globals()[_form_name].__name__ = _form_name
