"""Reduction of gradients over ranks while the backward still computes others.

Gradients are copied into flat buckets as they become ready, and full buckets are all-reduced in one fixed order, which the
ranks agree on once, in the first step. Later steps negotiate nothing. When the backward has made all gradients, it waits for
the last bucket before it returns, so whatever comes next sees reduced gradients: clipping, a gradient scaler, a log.

Gradients that did not come (a branch not taken, a backward not called) are waited for until `synchronize`. A rank without
the gradient supplies zeros. If no rank has it, it stays None, as with one process.

What a bucket can't hold is reduced by name after the others: sparse gradients, and those of a compression of the user's own
or of another operation than average and sum.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from compat.horovod import engine
from compat.horovod.buckets import Bucket, Options, Plan, agreed_plan
from compat.horovod.operations import Average, allreduce_async_, sparse_allreduce_async, synchronize


@dataclass
class Progress:
    """How far a step is."""

    passes: list[int]  # backward passes of each parameter
    has_begun: bool = False
    ready: list[int] = field(default_factory=list)  # parameters whose gradients are, in their order
    versions: dict[int, int] = field(default_factory=dict)  # of these gradients, later of the reduced ones
    filled: set[int] = field(default_factory=set)  # parameters whose gradients are in buckets
    sent: int = 0  # buckets
    reduced: dict[int, Tensor | None] | None = None  # the result, when nothing is left to do
    is_used: bool = False  # which the versions don't always show


class GradientReduction:
    """Reduces the gradients of named parameters. `synchronize` ends a step."""

    def __init__(self, options: Options) -> None:
        self.options = options
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
        self.plan = None
        self.reset()

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
        """Whether there is anything to reduce: several ranks, of which this is one."""
        if engine.current().size == 1:
            return False
        return self.options.process_set.included() and self.options.process_set.size() > 1

    @property
    def is_unused(self) -> bool:
        """Whether gradients were computed that nothing has used. What was changed since counts as used."""
        progress = self.progress
        if progress.reduced is None or progress.is_used:
            return progress.has_begun and not progress.is_used
        return all(
            self.parameters[index].grad is grad and (grad is None or grad._version == progress.versions[index])
            for index, grad in progress.reduced.items()
        )

    def reset(self) -> None:
        """Forget the step that has begun. No communication."""
        if self.plan:
            for bucket in self.plan.buckets:
                bucket.reset()
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
        progress.ready.append(index)
        progress.versions[index] = grad._version
        if self.plan:
            if index in self.plan.slots:
                self._fill(index)
                self._send(self.plan)
            trained = len(self.plan.slots) + len(self.plan.by_name)
        else:
            trained = sum(parameter.requires_grad for parameter in self.parameters)
        if len(progress.ready) == trained:
            Variable._execution_engine.queue_callback(self._at_end)

    def _at_end(self) -> None:
        """The end of the backward pass that has computed the last gradient."""
        if self.progress.reduced is None and self.progress.has_begun:
            self._reduce()

    def _was_thrown_away(self, index: int) -> bool:
        """Whether the last step's gradient was reset without a step, as by `model.zero_grad()`."""
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

    def _fill(self, index: int) -> None:
        if self.plan and index not in self.progress.filled:
            bucket, slot = self.plan.slots[index]
            bucket.fill(slot, self.parameters[index].grad, self.options.scales[0])
            self.progress.filled.add(index)

    def _send(self, plan: Plan) -> None:
        """Send the buckets that are full, in their order."""
        set_id = self.options.process_set.process_set_id
        assert set_id is not None  # it was checked when the plan was agreed
        while self.progress.sent < len(plan.buckets) and plan.buckets[self.progress.sent].pending == 0:
            plan.buckets[self.progress.sent].send(plan.world, set_id)
            self.progress.sent += 1

    # --- at the end of a step

    @torch.no_grad()
    def _reduce(self) -> None:
        """Send what is not sent yet, and wait for all of it."""
        reduced: dict[int, Tensor | None] = {}
        try:
            self._check_unchanged()
            self._check_plan()
            if self.plan is None:
                self.plan = agreed_plan(self.names, self.parameters, self.options, self.progress.ready, self._key())
            for index in self.plan.slots:
                self._fill(index)
            self._send(self.plan)
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
        for index in self.progress.ready:
            grad = self.parameters[index].grad
            if grad is None or grad._version != self.progress.versions[index]:
                raise RuntimeError(
                    f"the gradient of {self.names[index]} was changed before all gradients were reduced: call "
                    "optimizer.synchronize() before gradients are clipped, unscaled or reset"
                )

    def _collect(self, plan: Plan, bucket: Bucket, reduced: dict[int, Tensor | None]) -> None:
        """Wait for a bucket and hand out its gradients."""
        assert bucket.work
        bucket.work.wait()
        if (scale := self.options.scales[1]) != 1.0:
            bucket.flat.mul_(scale)
        for place, slot in enumerate(bucket.slots):
            parameter = self.parameters[slot.index]
            if not slot.is_present and not bucket.present[place]:  # only a rank that lacks a gradient has to look
                reduced[slot.index] = None
                continue
            if slot.index in plan.sparse_dims:
                parameter.grad = slot.view.to(parameter.dtype).to_sparse(plan.sparse_dims[slot.index])
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(slot.view)
            else:
                parameter.grad.copy_(slot.view)
            reduced[slot.index] = parameter.grad

    def _reduce_by_name(self, plan: Plan, reduced: dict[int, Tensor | None]) -> None:
        """Reduce what is in no bucket, by negotiated collectives. A gradient that no rank has becomes zeros."""
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
            result = handle() if callable(handle) else synchronize(handle)
            if index not in plan.sparse_dims:
                result = options.compression.decompress(result, context)
            self.parameters[index].grad = reduced[index] = result
