"""State of a training run, independent of the layout.

It consists of tensors by name and plain numbers: the model, its moving average, the optimizer and
the loss scaler. It has no state of random generators and no data position, since both are pure
functions of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.distributed import sharding
from common.errors import Refused

Tensors = dict[str, torch.Tensor]
_NAMED = 5  # differing keys that an error names
_FILES = ("model", "optimizer", "ema")


@dataclass
class TrainingState:
    """The state that a checkpoint saves. `model` is the plain module, not its DDP wrapper.

    Several optimizers must not share parameters. Raises `Refused` if one has a parameter that is
    not the model's.
    """

    model: torch.nn.Module
    # Empty if only the model is needed.
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
    ema: torch.nn.Module | None = None
    scaler: Any = None  # torch.amp.GradScaler under fp16

    def __post_init__(self):
        self._optimizers = (
            [self.optimizer]
            if isinstance(self.optimizer, torch.optim.Optimizer)
            else [*self.optimizer]
        )
        for optimizer in self._optimizers:
            self._optimizer_names(optimizer)
        self._left_out = _find_left_out(self.model)

    def exported(self, tensors: Tensors | None = None) -> torch.nn.Module | None:
        """The module that is exported: the moving average if there is one, else the model; with
        `tensors`, if given.

        Of a sharded one, a whole copy in the main process's host memory, and None on the others: a
        collective without `tensors`.
        """
        module = self.model if self.ema is None else self.ema
        if sharding.is_sharded(module):
            tensors = tensors or sharding.gather_full_tensors(module.state_dict())
            return sharding.build_unsharded(module, tensors) if tensors else None
        if tensors:
            module.load_state_dict(tensors)
        return module

    def tensors(self) -> dict[str, Tensors]:
        """The tensors to save, by file and name; not copies, and in shards if the model is sharded."""
        files = {"model": self.model.state_dict(), "optimizer": self._optimizer_tensors()}
        if self.ema is not None:
            files["ema"] = self.ema.state_dict()
        return files | self._left_out

    def numbers(self) -> dict:
        """The part that is saved as JSON: numbers of the optimizer and of the loss scaler."""
        kept = {
            f"{name}/{key}": value
            for name, values in self._optimizer_states()
            for key, value in values.items()
            if not isinstance(value, torch.Tensor)
        }
        # LAMB and Adan keep their step count in the parameter groups.
        group_steps = [int(group["step"]) if "step" in group else None for group in self._groups()]
        scaler = self.scaler.state_dict() if self.scaler else None
        return {"optimizer": kept, "group_steps": group_steps, "scaler": scaler}

    def check(self, shapes: dict[str, dict[str, tuple[int, ...]]], where: str) -> None:
        """Raise `Refused` if the tensors with these `shapes` are of another model; the message has
        the differences.

        Changes nothing. `where` names the checkpoint.
        """
        for file, tensors in self.tensors().items():
            if file == "optimizer":
                continue
            mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            theirs = shapes.get(file, {})
            differing = [
                f"{name} ({theirs.get(name, 'missing')} there, {mine.get(name, 'missing')} here)"
                for name in sorted(mine.keys() | theirs.keys())
                if mine.get(name) != theirs.get(name)
            ]
            if differing:
                more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
                raise Refused(f"{where} is of another model: {', '.join(differing[:_NAMED])}{more}")

    def load(self, files: dict[str, Tensors], numbers: dict) -> None:
        """Load the content of a checkpoint that `check` has accepted.

        Raises KeyError or ValueError, before any weight is changed, if it does not fit the optimizer.
        """
        scaler = numbers["scaler"]
        parameters = dict(self.model.named_parameters())
        states: dict[str, dict[str, Any]] = {}
        for path, value in (files["optimizer"] | numbers["optimizer"]).items():
            name, _, key = path.rpartition("/")
            if isinstance(value, torch.Tensor) and value.shape == parameters[name].shape:
                # Fused optimizers rely on the parameter's memory layout (channels_last).
                value = sharding.shard_like(value, parameters[name])
                value = torch.empty_like(
                    parameters[name], dtype=value.dtype, device=value.device
                ).copy_(value)
            states.setdefault(name, {})[key] = value
        currents = [optimizer.state_dict() for optimizer in self._optimizers]
        groups = [group for current in currents for group in current["param_groups"]]
        for group, steps in zip(groups, numbers["group_steps"], strict=True):
            if steps is not None:
                group["step"] = steps
        for optimizer, current in zip(self._optimizers, currents, strict=True):
            names = self._optimizer_names(optimizer)
            current["state"] = {
                index: states.pop(name) for index, name in names.items() if name in states
            }
        if states:
            raise KeyError(next(iter(states)))
        for optimizer, current in zip(self._optimizers, currents, strict=True):
            optimizer.load_state_dict(current)
        sharding.load_full_tensors(self.model, files["model"])
        if self.ema is not None:
            sharding.load_full_tensors(self.ema, files["ema"])
        for file, parameters_of_file in self._left_out.items():
            for name, parameter in parameters_of_file.items():
                weight = parameter.detach()
                weight.copy_(sharding.shard_like(files[file][name], weight))
        if self.scaler and scaler:
            self.scaler.load_state_dict(scaler)

    def _groups(self) -> list[dict]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _optimizer_names(self, optimizer: torch.optim.Optimizer) -> dict[int, str]:
        """Index of a parameter in the optimizer's state dict -> its name in the model. Raises
        `Refused` if one has none.
        """
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        others = [list(parameter.shape) for parameter in parameters if id(parameter) not in names]
        if others:
            raise Refused(
                f"the optimizer has a parameter of shape {others[0]} that the model has not, so "
                "that no checkpoint, moving average or export would have it: make it the model's "
                "before the optimizer is built, as in model.scale = torch.nn.Parameter(...)"
            )
        return {index: names[id(parameter)] for index, parameter in enumerate(parameters)}

    def _optimizer_states(self):
        for optimizer in self._optimizers:
            names = self._optimizer_names(optimizer)
            yield from (
                (names[index], values) for index, values in optimizer.state_dict()["state"].items()
            )

    def _optimizer_tensors(self) -> Tensors:
        return {
            f"{name}/{key}": value
            for name, values in self._optimizer_states()
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        }


def _find_left_out(model: torch.nn.Module) -> dict[str, Tensors]:
    """The parameters to train that the model's `state_dict` leaves out, because no export has them,
    by module and name.

    A checkpoint has a file of each such module.
    """
    saved = model.state_dict().keys()
    files: dict[str, Tensors] = {}
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and path not in saved:
            module, _, name = path.rpartition(".")
            if not module or module in _FILES:
                raise Refused(
                    f"{path} is trained, but not in the model's state_dict: it needs a file of "
                    "its own in checkpoints, so keep it in a module with another name than "
                    f"{', '.join(_FILES)}"
                )
            files.setdefault(module, {})[name] = parameter
    return files
