"""Buckets: flat tensors in which gradients travel, and the plan of them that all ranks share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compat.horovod import engine
from compat.horovod.compression import Compression
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.functions import allgather_object
from compat.horovod.operations import Average, Sum
from compat.horovod.process_sets import ProcessSet

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # those of DDP: a small one first, so that sending starts early
_ALIGNMENT = 16  # elements


@dataclass
class Options:
    """What a DistributedOptimizer was asked for. The ranks have to agree on it."""

    op: int
    compression: Any
    passes: int  # backward passes per step
    predivide: float
    groups: int | list[list[Tensor]] | None
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def scales(self) -> tuple[float, float]:
        """Factors before and after the sum. Without `predivide` all of an average is before: the copy applies it."""
        if self.op != Average:
            return 1.0, 1.0
        size = self.process_set.size()
        return (1 / size, 1.0) if self.predivide == 1.0 else (1 / self.predivide, self.predivide / size)

    def travelling(self, dtype: torch.dtype) -> torch.dtype | None:
        """The type in which gradients of this type travel in buckets; None if they can't."""
        if self.op not in (Average, Sum) or self.compression not in (Compression.none, Compression.fp16):
            return None
        return torch.float16 if self.compression is Compression.fp16 and dtype.is_floating_point else dtype


@dataclass
class Slot:
    """A parameter's place in a bucket."""

    index: int
    view: Tensor  # the gradient's memory in the bucket
    is_present: bool = False  # in this step, on this rank


@dataclass
class Bucket:
    flat: Tensor  # all gradients, and then `present`
    present: Tensor  # [slots], how many ranks have each gradient: the sum of ones and zeros
    slots: list[Slot]
    pending: int
    work: engine.OrderedWork | None = None

    def fill(self, slot: Slot, grad: Tensor | None, scale: float) -> None:
        """Copy a gradient, or zeros if there is none, into the bucket."""
        slot.is_present = grad is not None
        if grad is None:
            slot.view.zero_()
        else:
            torch.mul(grad.to_dense() if grad.is_sparse else grad, scale, out=slot.view)
        self.pending -= 1

    def send(self, world: engine.Engine, set_id: int) -> None:
        """Begin the all-reduce."""
        self.present.fill_(1)
        for place, slot in enumerate(self.slots):
            if not slot.is_present:
                self.present[place] = 0
        self.work = world.ordered_allreduce(self.flat, set_id)

    def reset(self) -> None:
        self.pending, self.work = len(self.slots), None


@dataclass
class Plan:
    """How gradients are reduced: the same on all ranks of `world`, as long as the parameters' `key` stays."""

    world: engine.Engine
    key: tuple
    buckets: list[Bucket]
    slots: dict[int, tuple[Bucket, Slot]]  # by index of the parameter
    by_name: list[int]  # parameters that no bucket can hold, in the order in which they are reduced
    sparse_dims: dict[int, int]  # of parameters with sparse gradients on any rank


def agreed_plan(
    names: Sequence[str], parameters: Sequence[Tensor], options: Options, ready: Sequence[int], key: tuple
) -> Plan:
    """The plan for the parameters that are trained now, in the order in which rank 0's gradients were `ready`. A collective.

    Raises:
        HorovodInternalError: on all ranks, if they disagree about options, names, shapes, types or devices.
    """
    trained = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
    grads = {index: parameters[index].grad for index in trained}
    groups: Any = options.groups
    if isinstance(groups, list):
        name_of = {id(parameters[index]): names[index] for index in trained}
        groups = [[name_of[id(tensor)] for tensor in group if id(tensor) in name_of] for group in groups]
    own = {
        "compression": getattr(options.compression, "__name__", type(options.compression).__name__),
        "groups": groups,
        "options": [options.op, options.passes, options.predivide, options.sparse_as_dense],
        "parameters": {
            names[index]: [
                *map(str, parameters[index].shape),
                str(parameters[index].dtype),
                parameters[index].device.type,
            ]
            for index in trained
        },
        "ready": [names[index] for index in ready],
        "sparse": {
            names[index]: grad.sparse_dim() for index, grad in grads.items() if grad is not None and grad.is_sparse
        },
    }
    of_ranks = allgather_object(own, "DistributedOptimizer", options.process_set)
    _check_agreement(of_ranks)
    index_of = {names[index]: index for index in trained}
    model = of_ranks[0]
    order = [index_of[name] for name in dict.fromkeys([*model["ready"], *reversed(model["parameters"])])]
    sparse_dims = {index_of[name]: dim for theirs in of_ranks for name, dim in theirs["sparse"].items()}
    by_name = [
        index
        for index in order
        if options.travelling(parameters[index].dtype) is None or (index in sparse_dims and not options.sparse_as_dense)
    ]
    bucketed = [index for index in order if index not in {*by_name}]
    buckets = [_bucket(part, parameters, options) for part in _parts(bucketed, parameters, options, index_of, groups)]
    slots = {slot.index: (bucket, slot) for bucket in buckets for slot in bucket.slots}
    return Plan(engine.current(), key, buckets, slots, by_name, sparse_dims)


def _check_agreement(of_ranks: list[dict[str, Any]]) -> None:
    first = of_ranks[0]
    for other, theirs in enumerate(of_ranks):
        for what in ("compression", "groups", "options", "parameters"):
            one, two = first[what], theirs[what]
            if one == two:
                continue
            if what == "parameters":
                name = next(name for name in [*one, *two] if one.get(name) != two.get(name))
                what, one, two = f"parameter {name}", one.get(name), two.get(name)
            elif what == "options":
                what = "options (op, backward_passes_per_step, gradient_predivide_factor, sparse_as_dense)"
            raise HorovodInternalError(
                f"DistributedOptimizer: mismatched {what}: {one} on the first rank of the process set, {two} on number {other}"
            )


def _parts(
    order: Sequence[int], parameters: Sequence[Tensor], options: Options, index_of: dict[str, int], groups: Any
) -> list[list[int]]:
    """The parameters of each bucket. One bucket has one type and device; buckets are sent in this order."""
    if isinstance(groups, list):
        listed = [[index_of[name] for name in group] for group in groups]
        group_of = {index: number for number, group in enumerate(listed) for index in group}
    elif groups:
        group_of = {index: place * groups // len(order) for place, index in enumerate(order)}
    else:
        group_of = dict.fromkeys(order, -1)
    open_parts: dict[Any, list[int]] = {}
    parts: list[list[int]] = []
    filled: dict[int, int] = {}  # bytes, by identity of the part
    for index in order:
        parameter = parameters[index]
        dtype = options.travelling(parameter.dtype)
        kind = (group_of.get(index, f"alone {index}"), dtype, parameter.device)
        part = open_parts.get(kind)
        if part is None:
            part = open_parts[kind] = []
            parts.append(part)
        part.append(index)
        filled[id(part)] = filled.get(id(part), 0) + parameter.numel() * torch.empty(0, dtype=dtype).element_size()
        if groups is None and filled[id(part)] >= (FIRST_BUCKET_BYTES if part is parts[0] else BUCKET_BYTES):
            del open_parts[kind]
    place = {index: number for number, index in enumerate(order)}
    return sorted(parts, key=lambda part: place[part[-1]])  # the first that is full goes first


def _bucket(part: Sequence[int], parameters: Sequence[Tensor], options: Options) -> Bucket:
    """A bucket whose gradients are laid out in memory as their parameters are."""
    starts, end = [], 0
    for index in part:
        starts.append(end)
        end += -(-parameters[index].numel() // _ALIGNMENT) * _ALIGNMENT
    first = parameters[part[0]]
    flat = torch.zeros(end + len(part), dtype=options.travelling(first.dtype), device=first.device)
    slots = []
    for index, start in zip(part, starts, strict=True):
        strides = torch.empty_like(parameters[index], device="meta").stride()
        view = flat.as_strided(parameters[index].shape, strides, start)
        slots.append(Slot(index, view))
    return Bucket(flat, flat[end:], slots, pending=len(slots))
