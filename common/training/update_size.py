"""What a step does to the weights: their norm, that of their change, and each part's learning rate.

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
from common.training.parts import group_parameters


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
        self._model = model
        self._optimizers = optimizers
        self._parameters = list(model.parameters())
        # Parameter groups by the name of their rate, once rates are set.
        self._groups: dict[str, list[dict]] | None = None
        self._weights: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []  # of `_weights`, before the step

    @torch.no_grad()
    def start(self) -> None:
        """Copy the weights that have a gradient, which the step trains.

        Called before the optimizers' steps.
        """
        if not self._copies:
            for weight in self._parameters:
                if weight.grad is not None:
                    self._weights.append(weight)
                    self._copies.append(_copy_weight(weight.detach()))

    @torch.no_grad()
    def finish(self) -> Update:
        """Measure the step since `start`, without norms if that was not called. Frees the copy."""
        copies = self._copies
        weights = self._weights
        self._copies = []
        self._weights = []
        if not copies:
            return Update(self._get_rates())
        before = []
        local_before = []
        local_after = []
        for copy, weight in zip(copies, weights, strict=True):
            tensor = _load_copy(copy, weight)
            before.append(tensor)
            local_before.append(get_local_tensor(tensor))
            local_after.append(get_local_tensor(weight))
        weight_norm = get_total_norm(before)
        torch._foreach_sub_(local_before, local_after)  # in place: `before` is the change now
        return Update(self._get_rates(), torch.stack([weight_norm, get_total_norm(before)]))

    def get_max_rate(self) -> float:
        """The highest learning rate that a group of the optimizers has now."""
        return _get_max_rate(self._get_param_groups())

    def _get_param_groups(self) -> list[dict]:
        groups = []
        for optimizer in self._optimizers:
            groups += optimizer.param_groups
        return groups

    def _get_rates(self) -> dict[str, float]:
        """`lr_backbone`, `lr_head`, ...: the highest learning rate in each part.

        Empty if all rates are the same.
        """
        if self._groups is None:
            self._groups = self._name_groups()
        return {name: _get_max_rate(groups) for name, groups in self._groups.items()}

    def _name_groups(self) -> dict[str, list[dict]]:
        """The parameter groups of each part, by the name of its rate."""
        groups = [group for group in self._get_param_groups() if group["params"]]
        if len({group.get("lr_scale", group["lr"]) for group in groups}) < 2:
            return {}
        part_by_id: dict[int, str] = {}
        with suppress(Refused):  # a module that does not say which part is its head
            for part, weights in group_parameters(self._model).items():
                for weight in weights:
                    part_by_id[id(weight)] = part
        groups_by_name: dict[str, list[dict]] = {}
        for group in groups:
            parts = dict.fromkeys(part_by_id.get(id(weight), "max") for weight in group["params"])
            for part in parts:
                groups_by_name.setdefault(f"lr_{part}", []).append(group)
        return groups_by_name


def _get_max_rate(groups: list[dict]) -> float:
    return max(float(group["lr"]) for group in groups)


def _copy_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy on the device; of a weight in shards, a copy of this rank's shard on the host."""
    if not isinstance(weight, DTensor):
        return weight.clone()
    shard = get_local_tensor(weight)
    host = torch.empty_like(shard, device="cpu", pin_memory=devices.has_streams(shard.device))
    return host.copy_(shard, non_blocking=True)


def _load_copy(copy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The copy on the device of `weight`. Gradients are gone by now, so there is room."""
    if not isinstance(weight, DTensor):
        return copy
    return from_local(copy.to(weight.device, non_blocking=True), weight)
