"""Reduction of gradients over ranks while the backward still computes others.

Parameters are divided into buckets, in their reverse order, and a bucket whose gradients are
all there is all-reduced as a group. Gradients that did not come (a branch not taken, a backward
not called) are waited for until `finish`, and are zeros then, as in Horovod. A sparse gradient
is an empty tensor in its bucket, and is reduced by name after it, once all ranks have agreed about
the bucket's shapes; so ranks that differ in what is sparse get an error. With `sparse_as_dense`
it travels dense, and is sparse again afterwards.
"""

import contextlib
import itertools
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compat.horovod import engine
from compat.horovod.engine import Operation
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.functions import check_same
from compat.horovod.operations import DEFAULTS, Average, Sum, sparse_allreduce_async, start
from compat.horovod.process_sets import ProcessSet

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # as DDP has
_numbers = itertools.count()  # of the optimizers of this process


@dataclass(eq=False)
class GradientReduction:
    """Reduces gradients of named parameters. `finish` ends a reduction, `reset` begins a step.

    `passes` backward passes are added up. An average is divided by `predivide` before the sum.
    """

    op: int
    compression: Any
    passes: int
    predivide: float
    process_set: ProcessSet
    sparse_as_dense: bool

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        self.parameters: list[Tensor] = []
        self.names: list[str] = []
        self.order: list[int] = []  # of parameters in buckets, the same on all ranks
        self.sparse_dims: dict[int, int] = {}  # of parameters that have had a sparse gradient
        # By bucket: handle, contexts of compression.
        self.sent: dict[int, tuple[Operation, list[Any]]] = {}
        self.reset()

    def add(self, names: Iterable[str], parameters: Iterable[Tensor]) -> None:
        """Take care of these parameters, also of frozen ones, which may be thawed. A collective.

        Raises:
            HorovodInternalError: on all ranks, if they disagree about options, names, shapes,
                types or devices.
        """
        for name, parameter in zip(names, parameters, strict=True):
            self._hook(parameter, len(self.parameters))
            self.parameters.append(parameter)
            self.names.append(name)
        self.reset()
        self.order = [*range(len(self.names))]
        if self.is_active:
            described = {
                "compression": getattr(
                    self.compression, "__name__", type(self.compression).__name__
                ),
                "op": f"{self.op}",
                "backward_passes_per_step": f"{self.passes}",
                "gradient_predivide_factor": f"{self.predivide}",
            }
            tensors = {
                name: f"{[*parameter.shape]} {parameter.dtype} {parameter.device.type}"
                for name, parameter in zip(self.names, self.parameters, strict=True)
            }
            title = f"DistributedOptimizer {self.number}: options or parameters"
            first, *_ = check_same(described | tensors, title, self.process_set)
            self.order = [self.names.index(name) for name in first if name in tensors]

    def _hook(self, parameter: Tensor, index: int) -> None:
        own = weakref.ref(self)  # the parameters may live longer than the optimizer

        def on_gradient(_: Tensor) -> None:
            reduction = own()
            if reduction is not None and reduction.is_active:
                reduction._on_gradient(index)

        if parameter.is_floating_point() or parameter.is_complex():
            needs = parameter.requires_grad
            parameter.requires_grad_()  # torch hooks no frozen parameter
            parameter.register_post_accumulate_grad_hook(on_gradient)
            parameter.requires_grad_(needs)

    @property
    def is_active(self) -> bool:
        """True if there is anything to reduce: several ranks, of which this is one."""
        return (
            engine.current().size > 1
            and self.process_set.included()
            and self.process_set.size() > 1
        )

    @property
    def has_begun(self) -> bool:
        """True if gradients were computed that are not reduced yet."""
        return bool(self.buckets) and not self.is_reduced

    def reset(self) -> None:
        """Forget the step that has begun, once its buckets in flight, whose names return, are back."""
        for handle, _ in self.sent.values():
            with contextlib.suppress(HorovodInternalError):
                handle.wait()
        self.sent = {}
        self.passed = [0] * len(self.parameters)  # backward passes of each parameter in this step
        self.versions: dict[int, int] = {}  # of the gradients that are ready
        self.buckets: list[list[int]] = []  # numbers of parameters
        self.bucket_of: dict[int, int] = {}
        self.is_reduced = False

    @torch.no_grad()
    def finish(self) -> None:
        """Send the buckets that are not sent yet, and wait for all. A collective of the process set."""
        if not self.is_active or self.is_reduced:
            return
        try:
            self._begin()
            for index, version in self.versions.items():
                grad = self.parameters[index].grad
                if grad is None or grad._version != version:
                    raise RuntimeError(
                        f"the gradient of {self.names[index]} was changed before all gradients "
                        "were reduced: call optimizer.synchronize() before gradients are "
                        "clipped, unscaled or reset"
                    )
            for number in range(len(self.buckets)):
                if number not in self.sent:
                    self._send(number)
            sparse = {}
            for number, (handle, contexts) in self.sent.items():
                for index, tensor, context in zip(
                    self.buckets[number], handle.wait(), contexts, strict=True
                ):
                    parameter = self.parameters[index]
                    reduced = self.compression.decompress(tensor, context)
                    grad = parameter.grad
                    assert grad is not None  # `_send` has filled what was missing
                    if not grad.is_sparse:
                        grad.copy_(reduced)
                    elif self.sparse_as_dense:
                        parameter.grad = reduced.to_sparse(grad.sparse_dim())
                    else:
                        name = f"DistributedOptimizer.{self.number}.{self.names[index]}"
                        sparse[parameter] = sparse_allreduce_async(
                            grad, name, self.op, self.process_set
                        )
            for parameter, wait in sparse.items():
                parameter.grad = wait()
        except BaseException:
            self.reset()
            raise
        self.is_reduced = True

    @torch.no_grad()
    def _on_gradient(self, index: int) -> None:
        """The gradient of a parameter was computed, or added to what was there."""
        if self.is_reduced:
            self.reset()
        self._begin()
        name, grad = self.names[index], self.parameters[index].grad
        if self.passed[index] == self.passes:
            raise AssertionError(
                f"the gradient of {name} was computed more than backward_passes_per_step = "
                f"{self.passes} times before step() or synchronize(): increase "
                "backward_passes_per_step to accumulate gradients"
            )
        if grad is None or grad.requires_grad:
            raise AssertionError(
                f"the gradient of {name} has a graph (create_graph=True): it can't be reduced"
            )
        if index not in self.bucket_of:
            raise AssertionError(
                f"{name} was frozen when the step began: thaw it before the first backward of a "
                "step"
            )
        self.passed[index] += 1
        if self.passed[index] == self.passes:
            self.versions[index] = grad._version
            number = self.bucket_of[index]
            if all(other in self.versions for other in self.buckets[number]):
                self._send(number)

    def _begin(self) -> None:
        """Divide the parameters that are trained in this step into buckets, unless the step has begun."""
        if self.buckets:
            return
        open_ones: dict[Any, list[int]] = {}  # by kind, which all of a bucket are of
        sizes: dict[Any, int] = {}
        for index in reversed(self.order):
            parameter = self.parameters[index]
            if not parameter.requires_grad:
                continue
            kind = parameter.dtype, parameter.device
            if kind not in open_ones:
                open_ones[kind], sizes[kind] = [], 0
                self.buckets.append(open_ones[kind])
            open_ones[kind].append(index)
            sizes[kind] += parameter.nbytes
            if sizes[kind] >= (_FIRST_BUCKET_BYTES if len(self.buckets) == 1 else _BUCKET_BYTES):
                del open_ones[kind]
        self.bucket_of = {
            index: number for number, bucket in enumerate(self.buckets) for index in bucket
        }

    def _send(self, number: int) -> None:
        """Begin to reduce a bucket."""
        bucket, size = self.buckets[number], self.process_set.size()
        pairs = [self.compression.compress(self._tensor_to_send(index)) for index in bucket]
        options = DEFAULTS | {
            "name": f"DistributedOptimizer.{self.number}.{number}",
            "label": zlib.crc32(" ".join(self.names[index] for index in bucket).encode()),
            "op": Sum,
            "process_set": self.process_set,
        }
        if self.op == Average:  # by default divided before the sum: 16 bits overflow soon
            before = size if self.predivide == 1.0 else self.predivide
            options |= {"prescale_factor": 1 / before, "postscale_factor": before / size}
        handle = start("allreduce", [tensor for tensor, _ in pairs], options, grouped=True)
        self.sent[number] = handle, [context for _, context in pairs]

    def _tensor_to_send(self, index: int) -> Tensor:
        """The gradient, which becomes zeros if it is missing; an empty tensor if it is sparse and
        travels by name.
        """
        parameter = self.parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            if index in self.sparse_dims:
                parameter.grad = parameter.grad.to_sparse(self.sparse_dims[index])
        if not parameter.grad.is_sparse:
            return parameter.grad
        self.sparse_dims[index] = parameter.grad.sparse_dim()
        return parameter.grad.to_dense() if self.sparse_as_dense else parameter.new_empty(0)
