"""Reduction of gradients over ranks while the backward still computes others.

Gradients are copied into flat buckets, laid out in the reverse order of the parameters, and a bucket that is full is
all-reduced. When the backward has made all gradients, it waits for the last bucket before it returns, so whatever comes next
sees reduced gradients: clipping, a gradient scaler, a log.

Gradients that did not come (a branch not taken, a backward not called) are waited for until `synchronize`. A rank without
the gradient supplies zeros. If no rank has it, it stays None, as with one process.

What a bucket can't hold is reduced by name after the others: sparse gradients, and those of a compression of the user's own
or of another operation than average and sum.
"""

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from compat.horovod import engine
from compat.horovod.compression import Compression
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.functions import allgather_object
from compat.horovod.operations import Average, Sum, allreduce_async_, sparse_allreduce_async, synchronize
from compat.horovod.process_sets import ProcessSet

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # those of DDP: a small one first, so that sending starts early
_ALIGNMENT = 16  # elements
_numbers = itertools.count()  # of the optimizers of this process


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
class Bucket:
    """A flat tensor that holds the gradients of several parameters, each laid out in memory as its parameter is."""

    name: str
    flat: Tensor  # all gradients, and then `present`
    present: Tensor  # [parameters], how many ranks have each gradient: the sum of ones and zeros
    views: dict[int, Tensor]  # by number of the parameter: the gradient's memory
    filled: dict[int, bool] = field(default_factory=dict)  # by number: whether this rank has the gradient
    handle: int | None = None

    def fill(self, index: int, grad: Tensor | None, scale: float) -> None:
        """Copy a gradient, or zeros if there is none, into the bucket."""
        self.filled[index] = grad is not None
        if grad is None:
            self.views[index].zero_()
        else:
            torch.mul(grad.to_dense() if grad.is_sparse else grad, scale, out=self.views[index])

    def send(self, process_set: ProcessSet) -> None:
        """Begin the all-reduce."""
        self.present.fill_(1)
        for place, index in enumerate(self.views):
            if not self.filled[index]:
                self.present[place] = 0
        self.handle = allreduce_async_(self.flat, name=self.name, op=Sum, process_set=process_set)


@dataclass
class Plan:
    """How gradients are reduced: the same on all ranks of `world`, as long as the parameters' `key` stays."""

    world: engine.Engine
    key: tuple
    buckets: list[Bucket]
    by_name: list[int]  # parameters that no bucket can hold, in the order in which they are reduced
    sparse_dims: dict[int, int]  # of parameters with sparse gradients on any rank

    def __post_init__(self) -> None:
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.views}
        self.trained = len(self.bucket_of) + len(self.by_name)


@dataclass
class Progress:
    """How far a step is."""

    passes: list[int]  # backward passes of each parameter
    has_begun: bool = False
    versions: dict[int, int] = field(default_factory=dict)  # of the gradients that are ready, later of the reduced ones
    reduced: dict[int, Tensor | None] | None = None  # the result, when nothing is left to do
    is_used: bool = False  # by somebody


class GradientReduction:
    """Reduces the gradients of named parameters. `synchronize` ends a step."""

    def __init__(self, options: Options) -> None:
        self.options, self.number = options, next(_numbers)
        self.parameters: list[Tensor] = []
        self.names: list[str] = []
        self.plan: Plan | None = None
        self.progress = Progress([])

    def add(self, names: Iterable[str], parameters: Iterable[Tensor]) -> None:
        """Take care of these parameters too, also of frozen ones, which may be thawed."""
        for name, parameter in zip(names, parameters, strict=True):
            self._hook(parameter, len(self.parameters))
            self.parameters.append(parameter)
            self.names.append(name)
        self.reset()
        self.plan = None

    def _hook(self, parameter: Tensor, index: int) -> None:
        own = weakref.ref(self)  # the parameters may live longer than the optimizer

        def on_gradient(_: Tensor) -> None:
            reduction = own()
            if reduction is not None:
                reduction._on_gradient(index)

        if parameter.is_floating_point() or parameter.is_complex():
            needs = parameter.requires_grad
            parameter.requires_grad_()  # torch hooks no frozen parameter
            parameter.register_post_accumulate_grad_hook(on_gradient)
            parameter.requires_grad_(needs)

    @property
    def is_active(self) -> bool:
        """True if there is anything to reduce: several ranks, of which this is one."""
        if engine.current().size == 1:
            return False
        return self.options.process_set.included() and self.options.process_set.size() > 1

    @property
    def is_unused(self) -> bool:
        """True if gradients were computed that nothing has used. What was changed since counts as used."""
        progress = self.progress
        if progress.reduced is None or progress.is_used:
            return progress.has_begun and not progress.is_used
        return all(
            self.parameters[index].grad is grad and (grad is None or grad._version == progress.versions[index])
            for index, grad in progress.reduced.items()
        )

    def reset(self) -> None:
        """Forget the step that has begun, once its buckets in flight have come back, for they are filled again."""
        plan = self.plan
        for bucket in plan.buckets if plan else ():
            if plan and bucket.handle is not None and plan.world is engine.current():
                with contextlib.suppress(HorovodInternalError):
                    synchronize(bucket.handle)
            bucket.filled, bucket.handle = {}, None
        self.progress = Progress([0] * len(self.parameters))

    def synchronize(self) -> None:
        """End the step: on return, gradients are those of all ranks. A collective of the process set."""
        self.finish()
        self.reset()

    def finish(self) -> None:
        """Reduce the gradients for somebody who uses them before the step ends, or instead of it. A collective."""
        if self.is_active and self.progress.reduced is None:
            self._reduce()
        self.progress.is_used = True

    # --- in the backward

    @torch.no_grad()
    def _on_gradient(self, index: int) -> None:
        """The gradient of a parameter was computed, or added to what was there."""
        if not self.is_active:
            return
        if self._was_thrown_away(index):
            self.reset()
        progress, grad = self.progress, self.parameters[index].grad
        if progress.reduced is not None or progress.passes[index] == self.options.passes:
            raise AssertionError(
                f"the gradient of {self.names[index]} was computed more than backward_passes_per_step = {self.options.passes} "
                "times before step() or synchronize(): increase backward_passes_per_step to accumulate gradients"
            )
        if grad is None or grad.requires_grad:
            raise AssertionError(
                f"the gradient of {self.names[index]} has a graph (create_graph=True): it can't be reduced"
            )
        if not progress.has_begun:
            progress.has_begun = True
            self._check_plan()
        progress.passes[index] += 1
        if progress.passes[index] < self.options.passes:
            return
        progress.versions[index] = grad._version
        if self.plan:
            self._fill(self.plan, index)
            trained = self.plan.trained
        else:
            trained = sum(parameter.requires_grad for parameter in self.parameters)
        if len(progress.versions) == trained:
            Variable._execution_engine.queue_callback(self._at_end)

    def _at_end(self) -> None:
        """The end of the backward pass that has computed the last gradient."""
        if self.progress.reduced is None and self.progress.has_begun:
            self._reduce()

    def _was_thrown_away(self, index: int) -> bool:
        """True if the last step's gradient was reset without a step, as by `model.zero_grad()`."""
        progress, grad = self.progress, self.parameters[index].grad
        if progress.reduced is None or grad is None:
            return False
        # The backward that has just added to it counts one version.
        return grad is not progress.reduced.get(index) or grad._version > progress.versions[index] + 1

    def _key(self) -> tuple:
        return tuple((parameter.requires_grad, parameter.dtype, parameter.device) for parameter in self.parameters)

    def _check_plan(self) -> None:
        """Drop the plan if it is of another world, or parameters were frozen, thawed, moved or converted since."""
        if self.plan and (self.plan.world is not engine.current() or self.plan.key != self._key()):
            self.plan = None

    def _fill(self, plan: Plan, index: int) -> None:
        """Copy a gradient to its bucket, if it is not there, and send the bucket if it is full."""
        bucket = plan.bucket_of.get(index)
        if bucket is None or index in bucket.filled:
            return
        bucket.fill(index, self.parameters[index].grad, self.options.scales[0])
        if len(bucket.filled) == len(bucket.views):
            bucket.send(self.options.process_set)

    # --- at the end of a step

    @torch.no_grad()
    def _reduce(self) -> None:
        """Send what is not sent yet, and wait for all of it."""
        reduced: dict[int, Tensor | None] = {}
        try:
            self._check_unchanged()
            self._check_plan()
            if self.plan is None:
                self.plan = self._agreed_plan()
            for index in self.plan.bucket_of:
                self._fill(self.plan, index)
            for bucket in self.plan.buckets:
                self._collect(self.plan, bucket, reduced)
            self._reduce_by_name(self.plan, reduced)
        except BaseException:
            self.reset()
            raise
        self.progress.versions = {index: grad._version for index, grad in reduced.items() if grad is not None}
        self.progress.reduced = reduced

    def _check_unchanged(self) -> None:
        """Raise if a gradient is not what the backward has left: the buckets hold that, and the change would be lost."""
        for index, version in self.progress.versions.items():
            grad = self.parameters[index].grad
            if grad is None or grad._version != version:
                raise RuntimeError(
                    f"the gradient of {self.names[index]} was changed before all gradients were reduced: call "
                    "optimizer.synchronize() before gradients are clipped, unscaled or reset"
                )

    def _collect(self, plan: Plan, bucket: Bucket, reduced: dict[int, Tensor | None]) -> None:
        """Wait for a bucket and hand out its gradients."""
        assert bucket.handle is not None
        synchronize(bucket.handle)
        if (scale := self.options.scales[1]) != 1.0:
            bucket.flat.mul_(scale)
        for place, (index, view) in enumerate(bucket.views.items()):
            parameter = self.parameters[index]
            if not bucket.filled[index] and not bucket.present[place]:  # only a rank that lacks a gradient has to look
                reduced[index] = None
                continue
            if index in plan.sparse_dims:
                parameter.grad = view.to(parameter.dtype).to_sparse(plan.sparse_dims[index])
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(view)
            else:
                parameter.grad.copy_(view)
            reduced[index] = parameter.grad

    def _reduce_by_name(self, plan: Plan, reduced: dict[int, Tensor | None]) -> None:
        """Reduce what is in no bucket. A gradient that no rank has becomes zeros."""
        options = self.options
        handles: dict[int, tuple[Any, Any]] = {}
        scale = options.predivide if options.op == Average else 1.0
        for index in plan.by_name:
            parameter, name = self.parameters[index], self.names[index]
            grad = parameter.grad
            if grad is None:
                grad = torch.zeros_like(parameter)
            if index in plan.sparse_dims:
                grad = grad if grad.is_sparse else grad.to_sparse(plan.sparse_dims[index])
                handles[index] = sparse_allreduce_async(grad, name, options.op, options.process_set), None
                continue
            compressed, context = options.compression.compress(grad)
            handle = allreduce_async_(
                compressed,
                name=name,
                op=options.op,
                prescale_factor=1 / scale,
                postscale_factor=scale,
                process_set=options.process_set,
            )
            handles[index] = handle, context
        for index, (handle, context) in handles.items():
            result = synchronize(handle)
            if index not in plan.sparse_dims:
                result = options.compression.decompress(result, context)
            self.parameters[index].grad = reduced[index] = result

    # --- the plan

    def _agreed_plan(self) -> Plan:
        """The plan for the parameters that are trained now, in the reverse order of the first rank's. A collective.

        Raises:
            HorovodInternalError: on all ranks, if they disagree about options, names, shapes, types or devices.
        """
        options = self.options
        trained = {
            self.names[index]: index for index, parameter in enumerate(self.parameters) if parameter.requires_grad
        }
        groups: Any = options.groups
        if isinstance(groups, list):
            name_of = {id(self.parameters[index]): name for name, index in trained.items()}
            groups = [[name_of[id(tensor)] for tensor in group if id(tensor) in name_of] for group in groups]
        parameters = {name: self.parameters[index] for name, index in trained.items()}
        own = {
            "compression": getattr(options.compression, "__name__", type(options.compression).__name__),
            "groups": groups,
            "options": [options.op, options.passes, options.predivide, options.sparse_as_dense],
            "parameters": {
                name: [*map(str, parameter.shape), str(parameter.dtype), parameter.device.type]
                for name, parameter in parameters.items()
            },
            "sparse": {
                name: parameter.grad.sparse_dim()
                for name, parameter in parameters.items()
                if parameter.grad is not None and parameter.grad.is_sparse
            },
        }
        of_ranks = allgather_object(own, "DistributedOptimizer", options.process_set)
        _check_agreement(of_ranks)
        order = [trained[name] for name in reversed(of_ranks[0]["parameters"])]
        sparse_dims = {trained[name]: dim for theirs in of_ranks for name, dim in theirs["sparse"].items()}
        by_name = [
            index
            for index in order
            if options.travelling(self.parameters[index].dtype) is None
            or (index in sparse_dims and not options.sparse_as_dense)
        ]
        bucketed = [index for index in order if index not in {*by_name}]
        parts = _parts(bucketed, self.parameters, options, trained, groups)
        buckets = [
            self._bucket(f"DistributedOptimizer.{self.number}.{place}", part) for place, part in enumerate(parts)
        ]
        return Plan(engine.current(), self._key(), buckets, by_name, sparse_dims)

    def _bucket(self, name: str, part: Sequence[int]) -> Bucket:
        parameters = [self.parameters[index] for index in part]
        lengths = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in parameters]
        *starts, end = itertools.accumulate(lengths, initial=0)
        dtype = self.options.travelling(parameters[0].dtype)
        flat = torch.zeros(end + len(part), dtype=dtype, device=parameters[0].device)
        views = {
            index: flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride(), start)
            for index, parameter, start in zip(part, parameters, starts, strict=True)
        }
        return Bucket(name, flat, flat[end:], views)


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
    """The parameters of each bucket. One bucket has one type and device."""
    if isinstance(groups, list):
        group_of = {index_of[name]: number for number, group in enumerate(groups) for name in group}
    elif groups:
        group_of = {index: place * groups // len(order) for place, index in enumerate(order)}
    else:
        group_of = dict.fromkeys(order, -1)
    parts: list[list[int]] = []
    open_parts: dict[Any, tuple[list[int], int]] = {}  # with the bytes that are in them
    for index in order:
        dtype = options.travelling(parameters[index].dtype)
        kind = (group_of.get(index, f"alone {index}"), dtype, parameters[index].device)
        if kind not in open_parts:
            parts.append([])
        part, filled = open_parts.get(kind, (parts[-1], 0))
        part.append(index)
        filled += parameters[index].numel() * torch.empty(0, dtype=dtype).element_size()
        open_parts[kind] = part, filled
        if groups is None and filled >= (_FIRST_BUCKET_BYTES if part is parts[0] else _BUCKET_BYTES):
            del open_parts[kind]
    return parts
