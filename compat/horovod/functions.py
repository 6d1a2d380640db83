"""Broadcasts of parameters, optimizer states and objects, and the gathering of objects.

Objects are restored by a reader that runs no code of theirs, and so builds only known types:
see `serialization`. They may arrive over a network from anybody who reaches the port; Horovod
unpickles what it gets.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from compat.horovod import serialization
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.operations import allgather_async, broadcast_async_, synchronize
from compat.horovod.process_sets import ProcessSet, global_process_set
from compat.horovod.world import rank


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[torch.Tensor | tuple[str, torch.Tensor | None]], root_rank: int
) -> None:
    """Copy tensors from one rank to all, in place: a state dict, `named_parameters()` or `parameters()`.

    Values that are None are left out. A collective.

    Raises:
        ValueError: for a value that is no tensor, or something else than tensors with or
            without names.
        HorovodInternalError: on all ranks, if these have other names, shapes or types of
            tensors.
    """
    if isinstance(params, Mapping):
        entries = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        entries = [item if isinstance(item, tuple) else (str(number), item) for number, item in enumerate(params)]
    else:
        raise ValueError(f"broadcast_parameters takes a dict or a list of tensors, got {type(params).__name__}")
    tensors = {name: value for name, value in entries if value is not None}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"broadcast_parameters: {name} is no tensor but {type(value).__name__}: use broadcast_object"
            )
    described = {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
    check_same(allgather_object(described), "broadcast_parameters: names, shapes or types of tensors")
    handles = [broadcast_async_(tensor, root_rank, f"broadcast_parameters.{name}") for name, tensor in tensors.items()]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001
) -> None:
    """Give all ranks the optimizer state and the options (rate, momentum, ...) of one rank. A collective.

    No step is made for it: the state may still be empty on some ranks or all, as after a
    checkpoint was loaded on the root only. Where it was empty, gradients that are None become
    zeros, as in Horovod. `model` is not needed.

    Raises:
        HorovodInternalError: on all ranks, if the optimizers differ in class, groups or
            shapes of parameters.
    """
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    described = [type(optimizer).__name__, *([list(one.shape) for one in group["params"]] for group in groups)]
    check_same(allgather_object(described), "broadcast_optimizer_state: the optimizer's class, groups and shapes")
    if not optimizer.state:  # as in Horovod, which makes the state by a step of zeros
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    state = [optimizer.state.get(parameter) for parameter in parameters]
    options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    is_root = rank() == root_rank
    state, options = broadcast_object((state, options) if is_root else None, root_rank, "optimizer_state")
    if is_root:
        return
    optimizer.state.clear()
    optimizer.state.update(
        {parameter: own for parameter, own in zip(parameters, state, strict=True) if own is not None}
    )
    for group, theirs in zip(groups, options, strict=True):
        kept = group["params"]
        group.clear()
        group.update(params=kept, **theirs)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of rank `root_rank`, on all ranks of the process set; the others' arguments are ignored. A collective.

    Tensors of a GPU arrive on each rank's current GPU. Which types an object may hold: see
    `serialization`.

    Raises:
        TypeError: on all ranks, if the object holds another type.
        ValueError: if the root is not in the process set.
    """
    if process_set.ranks is None or root_rank not in process_set.ranks:
        raise ValueError(f"root rank {root_rank} is not in {process_set}")
    is_root = rank() == root_rank
    received = allgather_object(obj if is_root else None, name or "broadcast_object", process_set)
    return obj if is_root else received[process_set.ranks.index(root_rank)]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks of the process set, in the order of ranks. A collective. Types: see `serialization`.

    Raises:
        TypeError: on all ranks, if an object holds another type.
    """
    name = name or "allgather_object"
    data = _packed(obj, rank())
    sizes = synchronize(allgather_async(torch.tensor([len(data)]), f"{name}.sizes", process_set))
    gathered = synchronize(allgather_async(data, f"{name}.data", process_set))
    return [_unpacked(part) for part in gathered.split(sizes.tolist())]


def _packed(obj: Any, sender: int) -> torch.Tensor:
    """The object in bytes, [bytes] uint8; or the error that all ranks raise, marked by the first byte."""
    try:
        data = b"\0" + serialization.dumps(obj, f"the object of rank {sender}")
    except TypeError as error:
        data = b"\1" + str(error).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    content = data.numpy().tobytes()
    if content[0]:
        raise TypeError(content[1:].decode())
    return serialization.loads(content[1:])


def check_same(of_ranks: Sequence[Any], title: str) -> None:
    """Raise HorovodInternalError unless all ranks have the same. To be called on all of them."""
    for other, theirs in enumerate(of_ranks):
        if theirs != of_ranks[0]:
            raise HorovodInternalError(f"{title} differ: {_difference(of_ranks[0], theirs)} on ranks 0 and {other}")


def _difference(first: Any, second: Any) -> str:
    """The first entries of two nested values that differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        key = next(key for key in [*first, *second] if first.get(key) != second.get(key))
        return f"{key}: {_difference(first.get(key), second.get(key))}"
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        for one, other in zip(first, second, strict=False):
            if one != other:
                return _difference(one, other)
        return f"{len(first)} and {len(second)} entries"
    return f"{first} and {second}"
