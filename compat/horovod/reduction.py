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

# As DDP has.
_FIRST_BUCKET_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20
_optimizer_ids = itertools.count()  # of this process


@dataclass(eq=False)
class GradientReduction:
    """Reduces gradients of named parameters. `finish` ends a reduction, `reset` begins a step.

    `num_passes` backward passes are added up. An average is divided by `predivide` before the sum.
    """

    op: int
    compression: Any
    num_passes: int
    predivide: float
    process_set: ProcessSet
    sparse_as_dense: bool

    def __post_init__(self) -> None:
        self.optimizer_id = next(_optimizer_ids)
        self.parameters: list[Tensor] = []
        self.names: list[str] = []
        self.order: list[int] = []  # of parameters in buckets, the same on all ranks
        self.sparse_dims: dict[int, int] = {}  # of parameters that have had a sparse gradient
        # By bucket: handle, contexts of compression.
        self.sent: dict[int, tuple[Operation, list[Any]]] = {}
        self.reset()

    def add(self, names: Iterable[str], parameters: Iterable[Tensor]) -> None:
        """Reduce these parameters, too, also frozen ones, which may be thawed. A collective.

        Raises:
            HorovodInternalError: on all ranks, if they disagree about options, names, shapes,
                types or devices.
        """
        for name, parameter in zip(names, parameters, strict=True):
            self._hook(parameter, len(self.parameters))
            self.parameters.append(parameter)
            self.names.append(name)
        self.reset()
        self.order = list(range(len(self.names)))
        if self.is_active:
            self.order = self._agree_on_order()

    def _agree_on_order(self) -> list[int]:
        """Check that all ranks have the same options and parameters; returns the order of rank 0."""
        compression = getattr(self.compression, "__name__", type(self.compression).__name__)
        options = {
            "compression": compression,
            "op": f"{self.op}",
            "backward_passes_per_step": f"{self.num_passes}",
            "gradient_predivide_factor": f"{self.predivide}",
        }
        tensors = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            shape = list(parameter.shape)
            tensors[name] = f"{shape} {parameter.dtype} {parameter.device.type}"
        title = f"DistributedOptimizer {self.optimizer_id}: options or parameters"
        names = check_same(options | tensors, title, self.process_set)
        return [self.names.index(name) for name in names if name in tensors]

    def _hook(self, parameter: Tensor, index: int) -> None:
        reduction_ref = weakref.ref(self)  # the parameters may live longer than the optimizer

        def on_gradient(_: Tensor) -> None:
            reduction = reduction_ref()
            if reduction is not None and reduction.is_active:
                reduction._on_gradient(index)

        if parameter.is_floating_point() or parameter.is_complex():
            requires_grad = parameter.requires_grad
            parameter.requires_grad_()  # torch hooks no frozen parameter
            parameter.register_post_accumulate_grad_hook(on_gradient)
            parameter.requires_grad_(requires_grad)

    @property
    def is_active(self) -> bool:
        """True if there is anything to reduce: several ranks, of which this is one."""
        if engine.current().size == 1 or not self.process_set.included():
            return False
        return self.process_set.size() > 1

    @property
    def has_started(self) -> bool:
        """True if gradients were computed that are not reduced yet."""
        return bool(self.buckets) and not self.is_reduced

    def reset(self) -> None:
        """Forget the step that has started, once its buckets in flight, whose names return, are back."""
        for handle, _ in self.sent.values():
            with contextlib.suppress(HorovodInternalError):
                handle.wait()
        self.sent = {}
        # Backward passes of each parameter in this step.
        self.pass_counts = [0] * len(self.parameters)
        self.versions: dict[int, int] = {}  # of the gradients that are ready
        self.buckets: list[list[int]] = []  # indices of parameters
        self.bucket_by_parameter: dict[int, int] = {}
        self.is_reduced = False

    @torch.no_grad()
    def finish(self) -> None:
        """Send the buckets that are not sent yet, and wait for all. A collective of the process set."""
        if not self.is_active or self.is_reduced:
            return
        try:
            self._divide_into_buckets()
            self._check_unchanged()
            for bucket in range(len(self.buckets)):
                if bucket not in self.sent:
                    self._send(bucket)
            self._receive()
        except BaseException:
            self.reset()
            raise
        self.is_reduced = True

    def _check_unchanged(self) -> None:
        """Raise RuntimeError if the script has changed a gradient that was ready."""
        for index, version in self.versions.items():
            grad = self.parameters[index].grad
            if grad is None or grad._version != version:
                raise RuntimeError(
                    f"the gradient of {self.names[index]} was changed before all gradients were "
                    "reduced: call optimizer.synchronize() before gradients are clipped, unscaled "
                    "or reset"
                )

    def _receive(self) -> None:
        """Wait for all buckets, and put the reduced gradients into the parameters."""
        sparse_results = {}
        for bucket, (handle, contexts) in self.sent.items():
            results = zip(self.buckets[bucket], handle.wait(), contexts, strict=True)
            for index, tensor, context in results:
                parameter = self.parameters[index]
                reduced = self.compression.decompress(tensor, context)
                grad = parameter.grad
                assert grad is not None  # `_send` has filled what was missing
                if not grad.is_sparse:
                    grad.copy_(reduced)
                elif self.sparse_as_dense:
                    parameter.grad = reduced.to_sparse(grad.sparse_dim())
                else:
                    name = f"DistributedOptimizer.{self.optimizer_id}.{self.names[index]}"
                    sparse_results[parameter] = sparse_allreduce_async(
                        grad, name, self.op, self.process_set
                    )
        for parameter, wait in sparse_results.items():
            parameter.grad = wait()

    @torch.no_grad()
    def _on_gradient(self, index: int) -> None:
        """The gradient of a parameter was computed, or added to what was there."""
        if self.is_reduced:
            self.reset()
        self._divide_into_buckets()
        name = self.names[index]
        grad = self.parameters[index].grad
        if self.pass_counts[index] == self.num_passes:
            raise AssertionError(
                f"the gradient of {name} was computed more than backward_passes_per_step = "
                f"{self.num_passes} times before step() or synchronize(): increase "
                "backward_passes_per_step to accumulate gradients"
            )
        if grad is None or grad.requires_grad:
            raise AssertionError(
                f"the gradient of {name} has a graph (create_graph=True): it can't be reduced"
            )
        if index not in self.bucket_by_parameter:
            raise AssertionError(
                f"{name} was frozen when the step began: thaw it before the first backward of a "
                "step"
            )
        self.pass_counts[index] += 1
        if self.pass_counts[index] == self.num_passes:
            self.versions[index] = grad._version
            bucket = self.bucket_by_parameter[index]
            if all(member in self.versions for member in self.buckets[bucket]):
                self._send(bucket)

    def _divide_into_buckets(self) -> None:
        """Divide the parameters that are trained in this step into buckets, unless the step has started."""
        if self.buckets:
            return
        open_buckets: dict[Any, list[int]] = {}  # by kind, which all of a bucket are of
        sizes: dict[Any, int] = {}
        for index in reversed(self.order):
            parameter = self.parameters[index]
            if not parameter.requires_grad:
                continue
            kind = parameter.dtype, parameter.device
            if kind not in open_buckets:
                open_buckets[kind] = []
                sizes[kind] = 0
                self.buckets.append(open_buckets[kind])
            open_buckets[kind].append(index)
            sizes[kind] += parameter.nbytes
            limit = _FIRST_BUCKET_BYTES if len(self.buckets) == 1 else _BUCKET_BYTES
            if sizes[kind] >= limit:
                del open_buckets[kind]
        for bucket, indices in enumerate(self.buckets):
            self.bucket_by_parameter |= dict.fromkeys(indices, bucket)

    def _send(self, bucket: int) -> None:
        """Start to reduce a bucket."""
        indices = self.buckets[bucket]
        tensors = []
        contexts = []
        for index in indices:
            tensor, context = self.compression.compress(self._prepare_tensor(index))
            tensors.append(tensor)
            contexts.append(context)
        names = " ".join(self.names[index] for index in indices)
        options = DEFAULTS | {
            "name": f"DistributedOptimizer.{self.optimizer_id}.{bucket}",
            "label": zlib.crc32(names.encode()),
            "op": Sum,
            "process_set": self.process_set,
        }
        if self.op == Average:  # by default divided before the sum: 16 bits overflow soon
            size = self.process_set.size()
            divisor = size if self.predivide == 1.0 else self.predivide
            options |= {"prescale_factor": 1 / divisor, "postscale_factor": divisor / size}
        self.sent[bucket] = start("allreduce", tensors, options, grouped=True), contexts

    def _prepare_tensor(self, index: int) -> Tensor:
        """Prepare the gradient to send, which becomes zeros if it is missing.

        A sparse gradient that travels by name is an empty tensor here.
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
