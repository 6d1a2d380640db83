"""Freezing: stages of the backbone that do not train, for a while or at all.

A frozen stage keeps its weights, and its batch norms keep their statistics. What never trains has
no gradients. What begins to train later has them from the first step, since DDP takes the
parameters that it finds at the start; they are left out until then, so that the optimizer skips
these parameters, with weight decay and momentum.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from common.data.stream import Stream
from common.errors import Refused
from common.training.batch_norm import StepBatchNorm
from common.training.parts import stages


@dataclass
class Stage:
    """A frozen stage, or the stem."""

    name: str
    parameters: list[nn.Parameter]
    batch_norms: list[StepBatchNorm]


def freeze(config: Any, model: nn.Module) -> None:
    """Freeze what `--freeze_stages` says, after `batch_norm.convert` and before the optimizer is built.

    With `--unfreeze_epochs` it is only noted: `Freezing` does it, step by step. Raises `Refused` if
    that many stages are not known, or nothing would be left to train.
    """
    if config.freeze_stages == "0":
        if config.unfreeze_epochs:
            raise Refused(
                "--unfreeze_epochs: nothing is frozen; add --freeze_stages, such as "
                "--freeze_stages all"
            )
        return
    found, title = (
        stages(model),
        config.model if hasattr(model, "pretrained_cfg") else type(model).__name__,
    )
    last = len(found) - 1
    if config.freeze_stages != "all" and not last:
        told = (
            f"--freeze_stages {config.freeze_stages}: {title} does not say which parameters form "
            "a stage"
        )
        raise Refused(
            f"{told}; give it a method group_matcher() as timm's models have, or take "
            "--freeze_stages all"
        )
    frozen = int({"stem": 0, "all": last}.get(config.freeze_stages, config.freeze_stages))
    if frozen > last:
        raise Refused(
            f"--freeze_stages {frozen}: {title} has {last} stages here; take at most {last}, or all"
        )
    names = (
        ["stem", *(f"stage {number}" for number in range(1, last + 1))] if last else ["backbone"]
    )
    layers = [layer for layer in model.modules() if isinstance(layer, StepBatchNorm)]
    model.frozen_stages, model.stage_count = [], last
    for name, tensors in zip(names[: frozen + 1], found, strict=False):
        ids = set(map(id, tensors))
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        norms = [layer for layer in layers if id(layer.running_mean) in ids]
        model.frozen_stages.append(Stage(name, parameters, norms))
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


class Freezing:
    """Freezes stages of `model` as a pure function of the step."""

    def __init__(self, config: Any, model: nn.Module, stream: Stream) -> None:
        self._model, self._frozen = model, getattr(model, "frozen_stages", [])
        # The first step in which stages train, counted from 0.
        self._parts: list[tuple[int, list[Stage]]] = []
        self._modes = {layer: layer.mode for stage in self._frozen for layer in stage.batch_norms}
        self._left_out: list[nn.Parameter] | None = None  # not known before the first step
        epochs = config.unfreeze_epochs.split(",") if config.unfreeze_epochs else []
        # The stem with the first stage.
        units = [self._frozen[:2], *([stage] for stage in self._frozen[2:])][::-1]
        if len(epochs) > len(units):
            told = (
                f"--unfreeze_epochs {config.unfreeze_epochs}: {len(epochs)} epochs for "
                f"{len(units)} frozen stages"
            )
            raise Refused(f"{told}; give at most {len(units)}")
        for place, epoch in enumerate(epochs):
            low, high = (len(units) * end // len(epochs) for end in (place, place + 1))
            part = [stage for unit in units[low:high][::-1] for stage in unit]
            self._parts.append((stream.steps(float(epoch)), part))

    def begin(self, step: int) -> None:
        """Freeze and unfreeze what `step` needs, before its first forward pass."""
        frozen = [stage for first, part in self._parts if step < first for stage in part]
        parameters = [parameter for stage in frozen for parameter in stage.parameters]
        if self._left_out is None or len(parameters) != len(self._left_out):
            self._left_out = parameters
            still = {layer for stage in frozen for layer in stage.batch_norms}
            for layer, mode in self._modes.items():
                layer.mode = "frozen" if layer in still else mode

    def leave_out_gradients(self) -> None:
        """Drop the gradients of stages that are frozen in this step, before anything looks at them."""
        for parameter in self._left_out or ():
            parameter.grad = None

    def describe(self) -> dict[str, str]:
        """A row of the start table."""
        if not self._frozen:
            return {}
        count = self._model.stage_count
        frozen = sum(parameter.numel() for stage in self._frozen for parameter in stage.parameters)
        share = frozen / sum(parameter.numel() for parameter in self._model.parameters())
        layers = sum(len(stage.batch_norms) for stage in self._frozen)
        share = min(share, 0.99)  # a head that trains is not rounded away
        text = (
            _joined(self._frozen)
            + f" of {count}" * bool(count)
            + f", {share:.0%} of the parameters"
        )
        text += f", {layers} batch norms with their statistics" * bool(layers)
        later = [f"{_joined(part)} from step {first + 1:,}" for first, part in self._parts]
        return {"frozen": text + f"; train later: {', '.join(later)}" * bool(later)}


def _joined(stages: list[Stage]) -> str:
    return stages[0].name if len(stages) == 1 else f"{stages[0].name} to {stages[-1].name}"
