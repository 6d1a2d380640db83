"""Observer: sees what a run does, for tools, tests and benchmarks, without a change of its recipe."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from common.data.loader import DeviceBatch
from common.run.step_reports import StepReport
from common.training.step import Samples

if TYPE_CHECKING:
    from common.run.run import Run


class Observer:
    """`Run(config, observer)` calls these methods on every rank; here they do nothing.

    An exception that one of them raises ends the run as any other does, so all ranks must raise it
    in the same step.
    """

    def on_prepare(
        self,
        model: torch.nn.Module,
        train_set: Samples,
        compute_losses: Callable[[torch.nn.Module, DeviceBatch], torch.Tensor],
    ) -> None:
        """`Run.prepare` was called with these; the model is not wrapped yet."""

    def on_micro_batch(self, step: int, batch: DeviceBatch) -> None:
        """A micro-batch of `step` is on the device, before its forward pass. The first step is 1."""

    def on_end_step(self, run: "Run", step: int) -> None:
        """This rank has made `step` of `run`. Its evaluation and checkpoint, if they are due, come next."""

    def on_report(self, report: StepReport) -> None:
        """The result of a step over all ranks is recorded, up to two steps after the step itself."""
