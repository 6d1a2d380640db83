"""Batch plan: how a global batch is spread over processes and micro-steps."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from common.errors import Refused

Integers = TypeVar("Integers", int, np.ndarray)


def ceil_div(dividend: Integers, divisor: int) -> Integers:
    """Quotient of integers, rounded up."""
    return -(-dividend // divisor)


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut into `world_size` x `micro_steps` contiguous micro-batches.

    Every rank has the same number of micro-steps, so that collectives stay in phase; no micro-batch
    is empty; there are one or two sizes, so that a compiled step has few shapes; and each is a
    multiple of `unit_size` samples, because MixUp works on pairs and `--batch_norm group` on groups of
    neighbours. Raises `Refused` if no such cut exists.
    """

    global_batch_size: int
    world_size: int
    max_micro_batch_size: int
    unit_size: int = 1
    # The flag that needs all of a process's share at once: "--batch_norm global"
    undivided_for: str = ""

    def __post_init__(self):
        size = self.global_batch_size
        unit_size = self.unit_size
        world_size = self.world_size
        limit = self.max_micro_batch_size
        unit_text = (
            f"the {unit_size} samples that belong together (MixUp and CutMix pairs, groups of "
            "--norm_batch_size)"
        )
        if size < 1 or limit < 1:
            raise Refused(
                f"--global_batch_size {size} and --max_micro_batch_size {limit} must be at least 1"
            )
        if limit < unit_size:
            raise Refused(
                f"--max_micro_batch_size {limit} is less than {unit_text}: take at least {2 * unit_size}"
            )
        if size % unit_size:
            divisor = unit_size if limit >= 2 * unit_size else unit_size * world_size
            raise Refused(
                f"--global_batch_size {size} does not divide into {unit_text}: take a multiple of "
                f"{divisor}"
            )
        if size // unit_size < world_size:
            raise Refused(
                f"--global_batch_size {size} leaves some of {world_size} processes without a "
                f"sample (the least share is {unit_size}): take at least {world_size * unit_size} or start "
                "fewer processes"
            )
        if self.undivided_for and self.micro_steps > 1:
            raise Refused(
                f"{self.undivided_for} needs the whole share of a process at once, not "
                f"{self.micro_steps} micro-steps: raise --max_micro_batch_size to "
                f"{unit_size * ceil_div(self.num_units, world_size)}, or take --batch_norm group"
            )
        if self.num_units < self.num_micro_batches:
            raise Refused(
                f"--global_batch_size {size} on {world_size} processes can't be cut into equally "
                f"many non-empty micro-batches of at most {limit}: take --max_micro_batch_size "
                f"{2 * unit_size}"
            )

    @property
    def num_units(self) -> int:
        """Number of indivisible units in a global batch."""
        return self.global_batch_size // self.unit_size

    @property
    def micro_steps(self) -> int:
        """Number of forward and backward passes that each rank makes per optimizer step."""
        max_units = self.max_micro_batch_size // self.unit_size
        return ceil_div(self.num_units, self.world_size * max_units)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in a global batch."""
        return self.world_size * self.micro_steps

    @property
    def loss_scale(self) -> float:
        """Factor of the *sum* of a micro-batch's per-sample losses: world_size / global_batch_size.

        DDP averages gradients over ranks, and accumulation adds them over micro-steps. With this
        factor the result is the gradient of the mean loss over the global batch, however large each
        rank's share is.
        """
        return self.world_size / self.global_batch_size

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """The one or two sizes of micro-batches, largest first."""
        largest = self.unit_size * ceil_div(self.num_units, self.num_micro_batches)
        smallest = self.unit_size * (self.num_units // self.num_micro_batches)
        if smallest == largest:
            return (largest,)
        return largest, smallest

    def __str__(self) -> str:
        processes = "process" if self.world_size == 1 else "processes"
        micro_steps = "micro-step" if self.micro_steps == 1 else "micro-steps"
        sizes = " or ".join(map(str, self.micro_batch_sizes))
        return (
            f"{self.global_batch_size} = {self.world_size} {processes} x {self.micro_steps} "
            f"{micro_steps} x {sizes} samples"
        )

    def get_span(self, rank: int, micro_step: int) -> tuple[int, int]:
        """The range of a micro-batch in the global batch: `(low, high)`, high excluded.

        1,024 samples on 3 ranks: `get_span(0, 0) == (0, 342)`, `get_span(1, 0) == (342, 683)`,
        `get_span(2, 0) == (683, 1024)`.
        """
        index = rank * self.micro_steps + micro_step
        return self._get_start(index), self._get_start(index + 1)

    def _get_start(self, index: int) -> int:
        return self.unit_size * ceil_div(self.num_units * index, self.num_micro_batches)
