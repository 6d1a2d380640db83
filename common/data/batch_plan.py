"""Batch plan: how a global batch is spread over processes and micro-steps."""

from dataclasses import dataclass

from common.errors import Refused


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut into `world_size` x `micro_steps` contiguous micro-batches.

    Every rank has the same number of micro-steps, so that collectives stay in phase; no micro-batch
    is empty; there are one or two sizes, so that a compiled step has few shapes; and each is a
    multiple of `unit` samples, because MixUp works on pairs and `--batch_norm group` on groups of
    neighbours. Raises `Refused` if no such cut exists.
    """

    global_batch_size: int
    world_size: int
    max_micro_batch_size: int
    unit: int = 1
    # The flag that needs all of a process's share at once: "--batch_norm global"
    undivided_for: str = ""

    def __post_init__(self):
        size, unit, world, limit = (
            self.global_batch_size,
            self.unit,
            self.world_size,
            self.max_micro_batch_size,
        )
        together = (
            f"the {unit} samples that belong together (MixUp and CutMix pairs, groups of "
            "--norm_batch_size)"
        )
        if size < 1 or limit < 1:
            raise Refused(
                f"--global_batch_size {size} and --max_micro_batch_size {limit} must be at least 1"
            )
        if limit < unit:
            raise Refused(
                f"--max_micro_batch_size {limit} is less than {together}: take at least {2 * unit}"
            )
        if size % unit:
            fitting = unit if limit >= 2 * unit else unit * world
            raise Refused(
                f"--global_batch_size {size} does not divide into {together}: take a multiple of "
                f"{fitting}"
            )
        if size // unit < world:
            raise Refused(
                f"--global_batch_size {size} leaves some of {world} processes without a sample "
                f"(the least share is {unit}): take at least {world * unit} or start fewer "
                "processes"
            )
        if self.undivided_for and self.micro_steps > 1:
            raise Refused(
                f"{self.undivided_for} needs the whole share of a process at once, not "
                f"{self.micro_steps} micro-steps: raise --max_micro_batch_size to "
                f"{unit * -(-self.units // world)}, or take --batch_norm group"
            )
        if self.units < self.parts:
            raise Refused(
                f"--global_batch_size {size} on {world} processes can't be cut into equally many "
                f"non-empty micro-batches of at most {limit}: take --max_micro_batch_size "
                f"{2 * unit}"
            )

    @property
    def units(self) -> int:
        """Number of indivisible units in a global batch."""
        return self.global_batch_size // self.unit

    @property
    def micro_steps(self) -> int:
        """Number of forward and backward passes that each rank makes per optimizer step."""
        return -(-self.units // (self.world_size * (self.max_micro_batch_size // self.unit)))

    @property
    def parts(self) -> int:
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
        sizes = {self.unit * (-(-self.units // self.parts)), self.unit * (self.units // self.parts)}
        return tuple(sorted(sizes, reverse=True))

    def __str__(self) -> str:
        world, steps, sizes = (
            self.world_size,
            self.micro_steps,
            " or ".join(map(str, self.micro_batch_sizes)),
        )
        processes, micro_steps = f"process{'es' * (world > 1)}", f"micro-step{'s' * (steps > 1)}"
        return (
            f"{self.global_batch_size} = {world} {processes} x {steps} {micro_steps} x {sizes} "
            "samples"
        )

    def span(self, rank: int, micro_step: int) -> tuple[int, int]:
        """Where in the global batch this micro-batch lies: `(low, high)`, high excluded.

        1,024 samples on 3 ranks: `span(0, 0) == (0, 342)`, `span(1, 0) == (342, 683)`, `span(2, 0)
        == (683, 1024)`.
        """
        part = rank * self.micro_steps + micro_step
        return self._cut(part), self._cut(part + 1)

    def _cut(self, part: int) -> int:
        return self.unit * -(-self.units * part // self.parts)
