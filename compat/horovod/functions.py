"""Broadcasts of parameters, optimizer states and objects, and the gathering of objects.

Objects are restored by a reader that runs no code of theirs, and so builds only known types:
see `serialization`. They may arrive over a network from anybody who reaches the port; Horovod
unpickles what it gets.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from compat.horovod import serialization
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.operations import allgather_async, broadcast_async_
from compat.horovod.process_sets import ProcessSet, global_process_set
from compat.horovod.world import rank


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[torch.Tensor | tuple[str, torch.Tensor | None]],
    root_rank: int,
) -> None:
    """Copy a state dict, `named_parameters()` or `parameters()` from one rank to all, in place.

    Values that are None are left out. A collective.

    Raises:
        ValueError: for a value that is no tensor, or something else than tensors with or
            without names.
        HorovodInternalError: on all ranks, if these have other names, shapes or types of
            tensors.
    """
    if isinstance(params, Mapping):
        params = params.items()
    elif not isinstance(params, Iterable) or isinstance(params, (str, bytes, torch.Tensor)):
        raise ValueError(
            f"broadcast_parameters takes a dict or a list of tensors, got {type(params).__name__}"
        )
    tensors: dict[str, torch.Tensor] = {}
    descriptions = {}
    for i, item in enumerate(params):
        name, value = item if isinstance(item, tuple) else (str(i), item)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"broadcast_parameters: {name} is no tensor but {type(value).__name__}: use "
                "broadcast_object"
            )
        tensors[name] = value
        descriptions[name] = f"{list(value.shape)} {value.dtype}"
    check_same(descriptions, "broadcast_parameters: names, shapes or types of tensors")
    handles = []
    for name, tensor in tensors.items():
        handles.append(broadcast_async_(tensor, root_rank, f"broadcast_parameters.{name}"))
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001
) -> None:
    """Give all ranks one rank's optimizer state and options (rate, momentum, ...). A collective.

    No step is made for it: the state may still be empty on some ranks or all, as after a
    checkpoint was loaded on the root only. If the root has none, missing gradients become
    zeros, which scripts for Horovod count on. `model` is not needed.

    Raises:
        HorovodInternalError: on all ranks, if the optimizers differ in class, groups or
            shapes of parameters.
    """
    groups = optimizer.param_groups
    parameters: list[torch.Tensor] = []
    options = []
    descriptions = {}
    for i, group in enumerate(groups):
        parameters += group["params"]
        options.append({name: value for name, value in group.items() if name != "params"})
        shapes = [list(parameter.shape) for parameter in group["params"]]
        descriptions[f"group {i}"] = str(shapes)
    descriptions["class"] = type(optimizer).__name__
    check_same(descriptions, "broadcast_optimizer_state: the optimizer's class, groups and shapes")
    states = [optimizer.state.get(parameter) for parameter in parameters]
    states, options = broadcast_object((states, options), root_rank, "optimizer_state")
    if not any(states) and not isinstance(optimizer, torch.optim.SparseAdam):
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    if rank() == root_rank:
        return
    optimizer.state.clear()
    for parameter, state in zip(parameters, states, strict=True):
        if state is not None:
            optimizer.state[parameter] = state
    for group, root_options in zip(groups, options, strict=True):
        group_parameters = group["params"]
        group.clear()
        group.update(params=group_parameters, **root_options)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank `root_rank`, on all ranks of the process set. A collective.

    Tensors of a GPU arrive on each rank's current GPU. Which types an object may hold: see
    `serialization`.

    Raises:
        TypeError: on the root, if the object holds another type. The others fail when it ends.
        ValueError: if the root is not in the process set.
    """
    if process_set.ranks is None or root_rank not in process_set.ranks:
        raise ValueError(f"root rank {root_rank} is not in {process_set}")
    is_root = rank() == root_rank
    received = allgather_object(obj if is_root else None, name or "broadcast_object", process_set)
    return obj if is_root else received[process_set.ranks.index(root_rank)]


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in their order. A collective. Types: see `serialization`.

    Raises:
        TypeError: on the rank whose object holds another type. The others fail when it ends.
    """
    data = torch.frombuffer(bytearray(serialization.dumps(obj, "the object")), dtype=torch.uint8)
    handle = allgather_async(data, name or "allgather_object", process_set)
    gathered = handle.wait()
    lengths = [length for ((length,),) in handle.shapes]
    return [serialization.loads(data.numpy().tobytes()) for data in gathered.split(lengths)]


def check_same(
    values: Mapping[str, str], title: str, process_set: ProcessSet = global_process_set
) -> dict[str, str]:
    """Check that all ranks have the same values; returns rank 0's, whose order counts.

    HorovodInternalError names the first difference, on all ranks.
    """
    values_by_rank = allgather_object(values, title, process_set)
    expected = values_by_rank[0]
    for other_rank, actual in enumerate(values_by_rank):
        for key in list(expected) + list(actual):
            if expected.get(key) != actual.get(key):
                raise HorovodInternalError(
                    f"{title} differ: {key}: {expected.get(key)} and {actual.get(key)} on ranks 0 "
                    f"and {other_rank}"
                )
    return expected
