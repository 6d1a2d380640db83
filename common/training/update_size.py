"""What a step does to the weights: their norm, the norm of their change, and the learning rate of each part.

It is computed only for steps that are logged, on the device, and nothing waits for it. In between
there is no copy of the weights. The copy of shards lies on the host during the step, as their
devices have no memory to spare.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.distributed import devices
from common.distributed.sharding import from_local, get_local_tensor, get_total_norm
from common.errors import Refused
from common.training.parts import parts


@dataclass(frozen=True)
class Update:
    """An optimizer step as rows show it."""

    # Learning rates by name, if there are several.
    rates: dict[str, float] = field(default_factory=dict)
    # [2], on the device: of the weights before the step, and of their change.
    norms: torch.Tensor | None = None


class UpdateSize:
    """Measures steps of `optimizers`, which train parameters of `model`."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers, self._parameters = (
            model,
            optimizers,
            list(model.parameters()),
        )
        # By the name of their rate, once rates are set.
        self._groups: dict[str, list[dict]] | None = None
        self._weights: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the weights that have a gradient, which the step trains. Called before the
        optimizers' steps.
        """
        if not self._before:
            self._weights = [weight for weight in self._parameters if weight.grad is not None]
            self._before = [_copy(weight.detach()) for weight in self._weights]

    @torch.no_grad()
    def end(self) -> Update:
        """The step that was made since `begin`; without norms if that was not called. Frees the copy."""
        before, weights, self._before, self._weights = self._before, self._weights, [], []
        if not before:
            return Update(self._rates())
        before = [_back(copy, weight) for copy, weight in zip(before, weights, strict=True)]
        size = get_total_norm(before)
        torch._foreach_sub_([*map(get_local_tensor, before)], [*map(get_local_tensor, weights)])
        return Update(self._rates(), torch.stack([size, get_total_norm(before)]))

    def highest_rate(self) -> float:
        """The highest learning rate that a group of the optimizers has now."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return max(float(group["lr"]) for group in groups)

    def _rates(self) -> dict[str, float]:
        """`lr_backbone`, `lr_head`, ...: the highest learning rate in each part; {} if all are the same."""
        if self._groups is None:
            self._groups = self._groups_by_name()
        return {
            name: max(float(group["lr"]) for group in groups)
            for name, groups in self._groups.items()
        }

    def _groups_by_name(self) -> dict[str, list[dict]]:
        groups = [
            group
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if group["params"]
        ]
        if len({group.get("lr_scale", group["lr"]) for group in groups}) < 2:
            return {}
        part_of: dict[int, str] = {}
        with suppress(Refused):  # a module that does not say which part is its head
            part_of = {id(weight): part for part, of in parts(self._model).items() for weight in of}
        found: dict[str, list[dict]] = {}
        for group in groups:
            for name in dict.fromkeys(
                f"lr_{part_of.get(id(weight), 'max')}" for weight in group["params"]
            ):
                found.setdefault(name, []).append(group)
        return found


def _copy(weight: torch.Tensor) -> torch.Tensor:
    if not isinstance(weight, DTensor):
        return weight.clone()
    shard = get_local_tensor(weight)
    host = torch.empty_like(shard, device="cpu", pin_memory=devices.has_streams(shard.device))
    return host.copy_(shard, non_blocking=True)


def _back(copy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The copy on the device of `weight`. Gradients are gone by now, so there is room."""
    return (
        from_local(copy.to(weight.device, non_blocking=True), weight)
        if isinstance(weight, DTensor)
        else copy
    )
