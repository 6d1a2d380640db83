"""Reduction of gradients over ranks while the backward still computes others.

Parameters are divided into buckets, in their reverse order, and a bucket whose gradients are
all there is all-reduced as a group. When the backward has made all gradients, it waits for
the last bucket before it returns, so whatever comes next sees
reduced gradients: clipping, a gradient scaler, a log.

Gradients that did not come (a branch not taken, a backward not called) are waited for until
`finish`. A rank without the gradient supplies zeros. If no rank has it, it stays None, as
with one process. Sparse gradients become dense ones.
"""

import contextlib
import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from compat.horovod import engine
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.functions import allgather_object, check_same
from compat.horovod.operations import Average, Sum, grouped_allreduce_async, synchronize
from compat.horovod.process_sets import ProcessSet

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # as DDP has: a small one first, so that sending starts early
_numbers = itertools.count()  # of the optimizers of this process


@dataclass
class Options:
    """What a DistributedOptimizer was asked for. The ranks have to agree on it."""

    op: int
    compression: Any
    passes: int  # backward passes per step
    predivide: float
    process_set: ProcessSet

    def reduction(self) -> dict[str, Any]:
        """Arguments of `grouped_allreduce_async`. All of an average is divided before the sum: 16 bits overflow soon."""
        if self.op != Average:
            return {"op": self.op, "process_set": self.process_set}
        size = self.process_set.size()
        before, after = (1 / size, 1.0) if self.predivide == 1.0 else (1 / self.predivide, self.predivide / size)
        return {"op": Sum, "prescale_factor": before, "postscale_factor": after, "process_set": self.process_set}


@dataclass
class Plan:
    """How gradients are reduced: the same on all ranks, as long as `key` stays."""

    key: tuple
    buckets: list[list[int]]  # numbers of parameters

    def __post_init__(self) -> None:
        self.bucket_of = {index: number for number, bucket in enumerate(self.buckets) for index in bucket}


@dataclass
class Progress:
    """How far a step is."""

    passes: list[int]  # backward passes of each parameter
    has_begun: bool = False
    trained: int = 0  # number of gradients to come
    versions: dict[int, int] = field(default_factory=dict)  # of the gradients that are ready
    missing: dict[int, int] = field(default_factory=dict)  # by bucket: gradients that it waits for
    sent: dict[int, tuple[Any, list[Any]]] = field(default_factory=dict)  # by bucket: handle, contexts of compression
    is_reduced: bool = False  # True when nothing is left to do
    is_used: bool = False  # True after somebody has asked for the result


class GradientReduction:
    """Reduces the gradients of named parameters. `finish` ends the reduction, and `reset` begins the next step."""

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
        process_set = self.options.process_set
        return engine.current().size > 1 and process_set.included() and process_set.size() > 1

    def reset(self) -> None:
        """Forget the step that has begun, once its buckets in flight have come back: their names are used again."""
        if self.plan and self.plan.key[0] is engine.current():
            for handle, _ in self.progress.sent.values():
                with contextlib.suppress(HorovodInternalError):
                    synchronize(handle)
        self.progress = Progress([0] * len(self.parameters))

    def finish(self) -> None:
        """Reduce the gradients, for somebody who uses them now. A collective of the process set."""
        if self.is_active and not self.progress.is_reduced:
            self._reduce()
        self.progress.is_used = True

    # --- in the backward

    @torch.no_grad()
    def _on_gradient(self, index: int) -> None:
        """The gradient of a parameter was computed, or added to what was there."""
        if not self.is_active:
            return
        if self.progress.is_used:
            self.reset()
        progress, grad = self.progress, self.parameters[index].grad
        if progress.is_reduced or progress.passes[index] == self.options.passes:
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
            progress.trained = sum(parameter.requires_grad for parameter in self.parameters)
            self._check_plan()
        progress.passes[index] += 1
        if progress.passes[index] < self.options.passes:
            return
        progress.versions[index] = grad._version
        if self.plan and (number := self.plan.bucket_of.get(index)) is not None:
            progress.missing[number] = progress.missing.get(number, len(self.plan.buckets[number])) - 1
            if not progress.missing[number]:
                self._send(self.plan, number)
        if len(progress.versions) == progress.trained:
            Variable._execution_engine.queue_callback(self._at_end)

    def _at_end(self) -> None:
        """The end of the backward pass that has computed the last gradient."""
        if self.progress.has_begun and not self.progress.is_reduced:
            self._reduce()

    def _send(self, plan: Plan, number: int) -> None:
        """Begin to reduce a bucket. Its last tensor says which gradients this rank has."""
        bucket, options = plan.buckets[number], self.options
        name = f"DistributedOptimizer.{self.number}.{number}"
        grads = [self.parameters[index].grad for index in bucket]
        given = [torch.zeros_like(self.parameters[i]) if g is None else g for i, g in zip(bucket, grads, strict=True)]
        pairs = [options.compression.compress(grad.to_dense() if grad.is_sparse else grad) for grad in given]
        tensors = [tensor for tensor, _ in pairs]
        has = torch.ones(len(grads), dtype=tensors[0].dtype, device=tensors[0].device)
        for place, grad in enumerate(grads):
            if grad is None:
                has[place] = 0
        handle = grouped_allreduce_async([*tensors, has], name=name, **options.reduction())
        self.progress.sent[number] = handle, [context for _, context in pairs]

    # --- at the end of a step

    @torch.no_grad()
    def _reduce(self) -> None:
        """Send what is not sent yet, and wait for all of it."""
        try:
            self._check_unchanged()
            self._check_plan()
            if self.plan is None:
                self.plan = self._agreed_plan()
            for number in range(len(self.plan.buckets)):
                if number not in self.progress.sent:
                    self._send(self.plan, number)
            for number in range(len(self.plan.buckets)):
                self._collect(self.plan, number)
        except BaseException:
            self.reset()
            raise
        self.progress.is_reduced = True

    def _check_unchanged(self) -> None:
        """Raise if a gradient is not what the backward has left: that was sent, and the change would be lost."""
        for index, version in self.progress.versions.items():
            grad = self.parameters[index].grad
            if grad is None or grad._version != version:
                raise RuntimeError(
                    f"the gradient of {self.names[index]} was changed before all gradients were reduced: call "
                    "optimizer.synchronize() before gradients are clipped, unscaled or reset"
                )

    def _collect(self, plan: Plan, number: int) -> None:
        """Wait for a bucket and hand out its gradients."""
        handle, contexts = self.progress.sent[number]
        *tensors, present = synchronize(handle)
        for place, (index, tensor, context) in enumerate(zip(plan.buckets[number], tensors, contexts, strict=True)):
            parameter = self.parameters[index]
            grad = self.options.compression.decompress(tensor, context)
            if parameter.grad is None and self.options.op in (Average, Sum) and not present[place]:
                continue
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.empty_like(parameter).copy_(grad)
            else:
                parameter.grad.copy_(grad)

    # --- the plan

    def _check_plan(self) -> None:
        """Drop the plan if it is of another world, or parameters were frozen, thawed, moved or converted since."""
        if self.plan and self.plan.key != self._key():
            self.plan = None

    def _key(self) -> tuple:
        described = ((parameter.requires_grad, parameter.dtype, parameter.device) for parameter in self.parameters)
        return engine.current(), *described

    def _agreed_plan(self) -> Plan:
        """The plan for the parameters that are trained now, in the reverse order of the first rank's. A collective.

        Raises:
            HorovodInternalError: on all ranks, if they disagree about options, names, shapes,
                types or devices.
        """
        options = self.options
        trained = {
            self.names[index]: index for index, parameter in enumerate(self.parameters) if parameter.requires_grad
        }
        parameters = {name: self.parameters[index] for name, index in trained.items()}
        described = {
            "compression": getattr(options.compression, "__name__", type(options.compression).__name__),
            "op": options.op,
            "backward_passes_per_step": options.passes,
            "gradient_predivide_factor": options.predivide,
            "parameter": {name: f"{[*one.shape]} {one.dtype} {one.device.type}" for name, one in parameters.items()},
        }
        of_ranks = allgather_object(described, "DistributedOptimizer", options.process_set)
        check_same(of_ranks, "DistributedOptimizer: options or parameters")
        buckets: list[list[int]] = []
        open_ones: dict[Any, list[int]] = {}  # by kind, which all of a bucket are of
        sizes: dict[Any, int] = {}
        for name in reversed(of_ranks[0]["parameter"]):
            index, parameter = trained[name], parameters[name]
            kind = parameter.dtype, parameter.device
            if kind not in open_ones:
                open_ones[kind], sizes[kind] = [], 0
                buckets.append(open_ones[kind])
            open_ones[kind].append(index)
            sizes[kind] += parameter.nbytes
            if sizes[kind] >= (_FIRST_BUCKET_BYTES if open_ones[kind] is buckets[0] else _BUCKET_BYTES):
                del open_ones[kind]
        return Plan(self._key(), buckets)
