"""Freezing: stages of the backbone that do not train, for a while or at all.

A frozen stage keeps its weights, and its batch norms keep their statistics. What never trains has
no gradients. What begins to train later has them from the first step, since DDP takes the
parameters that it finds at the start; they are left out until then, so that the optimizer skips
these parameters, with weight decay and momentum.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from common.data.stream import Stream
from common.errors import Refused
from common.training.batch_norm import StepBatchNorm
from common.training.parts import get_stages


@dataclass
class Stage:
    """A frozen stage, or the stem."""

    name: str
    parameters: list[nn.Parameter]
    batch_norms: list[StepBatchNorm]


def freeze_stages(config: Any, model: nn.Module) -> None:
    """Freeze the stages that `--freeze_stages` names.

    Called after `batch_norm.convert_batch_norm` and before the optimizer is built. With
    `--unfreeze_epochs` the stages are only noted: `Freezing` freezes them, step by step. Raises
    `Refused` if that many stages are not known, or nothing would be left to train.
    """
    if config.freeze_stages == "0":
        if config.unfreeze_epochs:
            raise Refused(
                "--unfreeze_epochs: nothing is frozen; add --freeze_stages, such as "
                "--freeze_stages all"
            )
        return
    title = config.model if hasattr(model, "pretrained_cfg") else type(model).__name__
    tensors_by_stage = get_stages(model)
    model.num_stages = len(tensors_by_stage) - 1  # without the stem
    num_frozen = _count_frozen_stages(config.freeze_stages, model.num_stages, title)
    model.frozen_stages = _build_stages(model, tensors_by_stage[: num_frozen + 1])
    if not config.unfreeze_epochs:
        for stage in model.frozen_stages:
            for parameter in stage.parameters:
                parameter.requires_grad_(False)
            for layer in stage.batch_norms:
                layer.mode = "frozen"
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise Refused(
            f"--freeze_stages {config.freeze_stages} leaves {title} no parameter to train; freeze "
            "less"
        )


def _count_frozen_stages(flag: str, num_stages: int, title: str) -> int:
    """How many stages, without the stem, the value of `--freeze_stages` freezes."""
    if flag == "all":
        return num_stages
    if not num_stages:
        raise Refused(
            f"--freeze_stages {flag}: {title} does not say which parameters form a stage; give it "
            "a method group_matcher() as timm's models have, or take --freeze_stages all"
        )
    num_frozen = 0 if flag == "stem" else int(flag)
    if num_frozen > num_stages:
        raise Refused(
            f"--freeze_stages {num_frozen}: {title} has {num_stages} stages here; take at most "
            f"{num_stages}, or all"
        )
    return num_frozen


def _build_stages(model: nn.Module, tensors_by_stage: list[list[Tensor]]) -> list[Stage]:
    layers = [layer for layer in model.modules() if isinstance(layer, StepBatchNorm)]
    stages = []
    for i, tensors in enumerate(tensors_by_stage):
        name = "backbone"
        if model.num_stages:
            name = f"stage {i}" if i else "stem"
        tensor_ids = {id(tensor) for tensor in tensors}
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        batch_norms = [layer for layer in layers if id(layer.running_mean) in tensor_ids]
        stages.append(Stage(name, parameters, batch_norms))
    return stages


class Freezing:
    """Freezes stages of `model` as a pure function of the step."""

    def __init__(self, config: Any, model: nn.Module, stream: Stream) -> None:
        self._model = model
        self._stages: list[Stage] = getattr(model, "frozen_stages", [])
        # (first step in which they train, counted from 0; stages).
        self._thaws: list[tuple[int, list[Stage]]] = []
        self._modes: dict[StepBatchNorm, str] = {}
        for stage in self._stages:
            for layer in stage.batch_norms:
                self._modes[layer] = layer.mode
        self._frozen_parameters: list[nn.Parameter] | None = None  # set by the first step
        epochs = config.unfreeze_epochs.split(",") if config.unfreeze_epochs else []
        # The last stage trains first; the stem trains with the first stage.
        units = [[stage] for stage in reversed(self._stages[2:])]
        units.append(self._stages[:2])
        if len(epochs) > len(units):
            raise Refused(
                f"--unfreeze_epochs {config.unfreeze_epochs}: {len(epochs)} epochs for "
                f"{len(units)} frozen stages; give at most {len(units)}"
            )
        for i, epoch in enumerate(epochs):
            start = len(units) * i // len(epochs)
            end = len(units) * (i + 1) // len(epochs)
            stages: list[Stage] = []
            for unit in reversed(units[start:end]):
                stages += unit
            self._thaws.append((stream.count_steps(float(epoch)), stages))

    def start_step(self, step: int) -> None:
        """Freeze and unfreeze what `step` needs, before its first forward pass."""
        parameters: list[nn.Parameter] = []
        batch_norms: set[StepBatchNorm] = set()
        for first_step, stages in self._thaws:
            if step >= first_step:
                continue
            for stage in stages:
                parameters += stage.parameters
                batch_norms.update(stage.batch_norms)
        if self._frozen_parameters is None or len(parameters) != len(self._frozen_parameters):
            self._frozen_parameters = parameters
            for layer, mode in self._modes.items():
                layer.mode = "frozen" if layer in batch_norms else mode

    def drop_gradients(self) -> None:
        """Drop the gradients of stages that are frozen in this step, before anything uses them."""
        for parameter in self._frozen_parameters or ():
            parameter.grad = None

    def describe(self) -> dict[str, str]:
        """A row of the start table."""
        if not self._stages:
            return {}
        num_frozen = 0
        num_layers = 0
        for stage in self._stages:
            for parameter in stage.parameters:
                num_frozen += parameter.numel()
            num_layers += len(stage.batch_norms)
        num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        share = min(num_frozen / num_parameters, 0.99)  # a head that trains is not rounded away
        text = _format_stages(self._stages)
        if self._model.num_stages:
            text += f" of {self._model.num_stages}"
        text += f", {share:.0%} of the parameters"
        if num_layers:
            text += f", {num_layers} batch norms with their statistics"
        thaws = []
        for first_step, stages in self._thaws:
            thaws.append(f"{_format_stages(stages)} from step {first_step + 1:,}")
        if thaws:
            text += f"; train later: {', '.join(thaws)}"
        return {"frozen": text}


def _format_stages(stages: list[Stage]) -> str:
    return stages[0].name if len(stages) == 1 else f"{stages[0].name} to {stages[-1].name}"
