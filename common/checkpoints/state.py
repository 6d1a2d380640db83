"""State of a training run, independent of the layout.

It consists of tensors by name and plain numbers: the model, its moving average, the optimizer and
the loss scaler. It has no state of random generators and no data position, since both are pure
functions of the step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.distributed import sharding
from common.errors import Refused

Tensors = dict[str, torch.Tensor]
_MAX_DIFFERENCES = 5  # in the message of an error
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
        if isinstance(self.optimizer, torch.optim.Optimizer):
            self._optimizers = [self.optimizer]
        else:
            self._optimizers = list(self.optimizer)
        for optimizer in self._optimizers:
            self._get_parameter_names(optimizer)
        self._left_out = _find_left_out(self.model)

    def get_exported_model(self, tensors: Tensors | None = None) -> torch.nn.Module | None:
        """The module that is exported: the moving average if there is one, else the model.

        With `tensors` it has these. Of a sharded one, it is a whole copy in the main process's host
        memory, and None on the others: a collective without `tensors`.
        """
        module = self.model if self.ema is None else self.ema
        if sharding.is_sharded(module):
            if not tensors:
                tensors = sharding.gather_full_tensors(module.state_dict())
            return sharding.build_unsharded(module, tensors) if tensors else None
        if tensors:
            module.load_state_dict(tensors)
        return module

    def get_tensors(self) -> dict[str, Tensors]:
        """The tensors to save, by file and name; not copies, and in shards if the model is sharded."""
        state = self._iterate_optimizer_state()
        tensors = {path: value for path, value in state if isinstance(value, torch.Tensor)}
        files = {"model": self.model.state_dict(), "optimizer": tensors}
        if self.ema is not None:
            files["ema"] = self.ema.state_dict()
        return files | self._left_out

    def get_values(self) -> dict:
        """What is saved as JSON: plain values of the optimizer and of the loss scaler."""
        state = self._iterate_optimizer_state()
        values = {path: value for path, value in state if not isinstance(value, torch.Tensor)}
        # LAMB and Adan keep their step count in the parameter groups.
        group_steps: list[int | None] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                step = int(group["step"]) if "step" in group else None
                group_steps.append(step)
        scaler = self.scaler.state_dict() if self.scaler else None
        return {"optimizer": values, "group_steps": group_steps, "scaler": scaler}

    def check(self, shapes: dict[str, dict[str, tuple[int, ...]]], source: str) -> None:
        """Raise `Refused` if the tensors with these `shapes` are of another model.

        The message has the differences, and names the checkpoint by `source`. Changes nothing.
        """
        for file, tensors in self.get_tensors().items():
            if file == "optimizer":
                continue
            model_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            checkpoint_shapes = shapes.get(file, {})
            differences = []
            for name in sorted(model_shapes.keys() | checkpoint_shapes.keys()):
                model_shape = model_shapes.get(name, "missing")
                checkpoint_shape = checkpoint_shapes.get(name, "missing")
                if model_shape != checkpoint_shape:
                    differences.append(f"{name} ({checkpoint_shape} there, {model_shape} here)")
            if differences:
                text = ", ".join(differences[:_MAX_DIFFERENCES])
                if len(differences) > _MAX_DIFFERENCES:
                    text += f" and {len(differences) - _MAX_DIFFERENCES} more"
                raise Refused(f"{source} is of another model: {text}")

    def load(self, files: dict[str, Tensors], values: dict) -> None:
        """Load the content of a checkpoint that `check` has accepted.

        `values` are those of `get_values`. Raises KeyError or ValueError, before any weight is
        changed, if the content does not fit the optimizer.
        """
        scaler_state = values["scaler"]
        self._load_optimizers(files["optimizer"] | values["optimizer"], values["group_steps"])
        sharding.load_full_tensors(self.model, files["model"])
        if self.ema is not None:
            sharding.load_full_tensors(self.ema, files["ema"])
        for file, parameters in self._left_out.items():
            for name, parameter in parameters.items():
                weight = parameter.detach()
                weight.copy_(sharding.shard_like(files[file][name], weight))
        if self.scaler and scaler_state:
            self.scaler.load_state_dict(scaler_state)

    def _load_optimizers(self, values: dict[str, Any], group_steps: list[int | None]) -> None:
        """Load the state of the optimizers from `values`, by "parameter/key"."""
        parameters = dict(self.model.named_parameters())
        states: dict[str, dict[str, Any]] = {}  # by parameter
        for path, value in values.items():
            name, _, key = path.rpartition("/")
            if isinstance(value, torch.Tensor) and value.shape == parameters[name].shape:
                value = _lay_out_like(value, parameters[name])
            states.setdefault(name, {})[key] = value
        state_dicts = [optimizer.state_dict() for optimizer in self._optimizers]
        groups = []
        for state_dict in state_dicts:
            groups += state_dict["param_groups"]
        for group, step in zip(groups, group_steps, strict=True):
            if step is not None:
                group["step"] = step
        for optimizer, state_dict in zip(self._optimizers, state_dicts, strict=True):
            state_dict["state"] = {}
            for index, name in self._get_parameter_names(optimizer).items():
                if name in states:
                    state_dict["state"][index] = states.pop(name)
        if states:
            raise KeyError(next(iter(states)))
        for optimizer, state_dict in zip(self._optimizers, state_dicts, strict=True):
            optimizer.load_state_dict(state_dict)

    def _get_parameter_names(self, optimizer: torch.optim.Optimizer) -> dict[int, str]:
        """Index of a parameter in the optimizer's state dict -> its name in the model.

        Raises `Refused` if one has none.
        """
        name_by_id = {id(parameter): name for name, parameter in self.model.named_parameters()}
        names: list[str] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in name_by_id:
                    raise Refused(
                        f"the optimizer has a parameter of shape {list(parameter.shape)} that the "
                        "model has not, so that no checkpoint, moving average or export would have "
                        "it: make it the model's before the optimizer is built, as in "
                        "model.scale = torch.nn.Parameter(...)"
                    )
                names.append(name_by_id[id(parameter)])
        return dict(enumerate(names))

    def _iterate_optimizer_state(self) -> Iterator[tuple[str, Any]]:
        """("parameter/key", value) of all optimizers."""
        for optimizer in self._optimizers:
            names = self._get_parameter_names(optimizer)
            for index, values in optimizer.state_dict()["state"].items():
                for key, value in values.items():
                    yield f"{names[index]}/{key}", value


def _lay_out_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`value` in the shards and in the memory layout of `parameter`.

    Fused optimizers rely on the layout (channels_last).
    """
    value = sharding.shard_like(value, parameter)
    copy = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
    return copy.copy_(value)


def _find_left_out(model: torch.nn.Module) -> dict[str, Tensors]:
    """The parameters to train that the model's `state_dict` leaves out, by module and name.

    No export has them. A checkpoint has a file of each such module.
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
