"""DistributedOptimizer: an optimizer whose gradients are reduced over the ranks before each step."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from compat.horovod.compression import Compression
from compat.horovod.operations import Average, Sum
from compat.horovod.process_sets import ProcessSet, global_process_set
from compat.horovod.reduction import GradientReduction


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,  # noqa: ARG001
    groups: int | list[list[Tensor]] | None = None,  # noqa: ARG001
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the same class, options and state, whose `step` uses the gradients of all ranks.

    All-reduces run during the backward. `step`, `GradScaler.step` or `synchronize` waits for
    them, with zeros for gradients that are missing: call `synchronize` before you clip or unscale
    gradients. Ranks make optimizers and steps in the same order.

        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    Args:
        named_parameters: names of all parameters, the same on all ranks; by default numbers.
        compression: `Compression.none`, `Compression.fp16`, or a class like these.
        backward_passes_per_step: gradients of so many backwards are added up first.
        op: Average or Sum.
        gradient_predivide_factor: divides gradients before the sum, and size / factor after it.
        num_groups, groups: no effect; gradients travel in buckets.
        sparse_as_dense: sparse gradients travel dense, in buckets, too; needed if a parameter's
            gradient is sparse on some ranks and missing on others from the first step on.
        process_set: ranks whose gradients are reduced; on others gradients stay as they are.

    Raises:
        ValueError: for names that are missing or used twice, and for options that exclude
            each other.
        NotImplementedError: for other operations.
        HorovodInternalError: on all ranks, if names, shapes or options differ.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(
            f"gradient_predivide_factor {gradient_predivide_factor} needs op Average, got {op}"
        )
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}, must be > 0")
    if op not in (Average, Sum):
        raise NotImplementedError(
            "DistributedOptimizer takes op=hvd.Average, with the learning rate for it, or hvd.Sum"
        )
    names = _list_names(optimizer, named_parameters)
    wrapped_class = type(optimizer)
    bases = (_DistributedOptimizer, wrapped_class)
    namespace = {"__module__": wrapped_class.__module__, "__doc__": wrapped_class.__doc__}
    wrapped: Any = object.__new__(type(wrapped_class.__name__, bases, namespace))
    # Options, state and hooks are the wrapped optimizer's; `step` there is what a scheduler has put
    # around its own step.
    attributes = dict(vars(optimizer))
    attributes.pop("step", None)
    wrapped.__dict__.update(attributes)
    wrapped._is_synchronized = False
    wrapped._synchronizes = True
    wrapped._reduction = GradientReduction(
        op=op,
        compression=compression,
        num_passes=backward_passes_per_step,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
    )
    wrapped._reduction.add(names.values(), names)
    wrapped._parameter_names = names  # scripts read it
    return wrapped


class _DistributedOptimizer(torch.optim.Optimizer):
    """What comes before the class of the wrapped optimizer."""

    _reduction: GradientReduction
    _is_synchronized: bool
    _synchronizes: bool

    def synchronize(self) -> None:
        """Finish the reduction of gradients. All ranks of the process set call it."""
        self._reduction.finish()
        self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this context `step` does not synchronize: after `synchronize()`."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Synchronize and step. The gradients of a closure are synchronized in it."""
        if closure is None:
            self._finish()
            return super().step(**options)  # type: ignore[call-arg]

        def synchronized_closure() -> Any:
            loss = closure()
            self._finish()
            return loss

        return super().step(synchronized_closure, **options)

    step.hooked = True  # type: ignore[attr-defined]  # torch's hooks run in the wrapped class's step, once

    def _finish(self) -> None:
        """Start the next step, after this one's gradients have been reduced if they have to be."""
        if self._synchronizes and self._is_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(): gradients are not reduced twice",
                stacklevel=3,
            )
        if self._synchronizes:
            self._reduction.finish()
        self._reduction.reset()
        self._is_synchronized = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by `GradScaler.step` before it looks at gradients, which have to be reduced by then."""
        if self._synchronizes:
            self._reduction.finish()
        return self.__dict__.get("_step_supports_amp_scaling", False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients.

        Raises:
            AssertionError: if gradients were computed that no step has used, since that loses
                them on all ranks.
        """
        if self._reduction.has_started:
            raise AssertionError(
                "optimizer.zero_grad() after loss.backward(), but before optimizer.step() or "
                "optimizer.synchronize(), throws reduced gradients away"
            )
        self._reduction.reset()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and state; a step that has begun is forgotten."""
        self._reduction.reset()
        self._is_synchronized = False
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, the same on all ranks. Their gradients are reduced too."""
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        names = _number_parameters(len(self.param_groups) - 1, len(parameters))
        self._reduction.add(names, parameters)


def _number_parameters(group_index: int, num_parameters: int) -> list[str]:
    return [f"allreduce.noname.{group_index}.{i}" for i in range(num_parameters)]


def _list_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """List the name of each parameter of the optimizer, in its order."""
    numbered: dict[Tensor, str] = {}
    for group_index, group in enumerate(optimizer.param_groups):
        names = _number_parameters(group_index, len(group["params"]))
        numbered |= zip(group["params"], names, strict=True)
    if named_parameters is None:
        return numbered
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be pairs (name, parameter), such as model.named_parameters()"
        )
    counts = Counter(name for name, _ in pairs)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(duplicates)}"
        )
    named = {parameter: name for name, parameter in pairs}
    missing = [name for parameter, name in numbered.items() if parameter not in named]
    if missing:
        raise ValueError(
            f"named_parameters was specified, but {len(missing)} parameters of the optimizer were "
            f"not named: {', '.join(missing)} (group and place)"
        )
    return {parameter: named[parameter] for parameter in numbered}
