"""What became of the last steps, on all ranks, without making the device wait?

Each step's numbers are copied to the host without waiting, summed over ranks on the host-side group while the next step
runs, and read when they are there anyway: one step late, on an accelerator two. Everything ranks must agree on (to stop, that
a loss is not finite, how many images were broken) travels in the same few numbers.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from common.collectives import gather_objects, host_group, world_size
from common.errors import Refused

_LATE = 2  # steps between a step and its report on an accelerator
_MAX_SKIPPED = 25  # fp16: from 65,536 the scale is then below 0.002, and no smaller one will help


@dataclass(frozen=True)
class Report:
    """What became of one step, the same on every rank."""

    step: int  # optimizer steps done, this one included
    loss: float  # mean over the global batch
    grad_norm: float  # before clipping; not finite where fp16 skipped the step
    data_wait: float  # seconds that a rank waited for data, mean over ranks
    broken: tuple[str, ...]  # images that could not be read, of all ranks
    stop: bool  # some rank was asked to stop
    skipped: bool  # fp16 found an overflow and left the weights as they were
    ended_by: str = ""  # why the recipe ends the run, where some rank said so


@dataclass
class _Posted:
    step: int
    losses: torch.Tensor  # per sample, on the device
    positions: torch.Tensor
    device_numbers: torch.Tensor  # [2] float64: sum of losses, gradient norm
    data_wait: float
    broken: tuple[str, ...]
    stop: bool
    ended_by: str
    copied: object = None  # CUDA event
    summed: torch.Tensor | None = None
    grad_norm: float = 0.0
    work: object = None


@dataclass
class Health:
    """Post every step, read the reports that are complete. All ranks call the same methods in the same order."""

    global_batch_size: int
    fp16: bool = False
    skipped_in_a_row: int = 0
    _posted: deque = field(default_factory=deque)

    def post(
        self,
        step: int,
        losses: torch.Tensor,
        positions: torch.Tensor,
        grad_norm: torch.Tensor,
        data_wait: float,
        broken: tuple[str, ...],
        stop: bool,
        ended_by: str = "",
    ) -> None:
        """Hand over what this rank knows of `step`: losses float[n] of its samples at `positions` int64[n], on the device."""
        exact = torch.float32 if losses.device.type == "mps" else torch.float64
        numbers = torch.stack([losses.sum(dtype=exact), grad_norm.to(exact)]).to("cpu", non_blocking=True)
        posted = _Posted(step, losses, positions, numbers, data_wait, broken, stop, ended_by)
        if losses.is_cuda:
            posted.copied = torch.cuda.Event()
            posted.copied.record()
        elif losses.device.type != "cpu":
            torch.accelerator.synchronize()
        self._posted.append(posted)

    def read(self) -> list[Report]:
        """The reports that are due, oldest first. Raises `Refused` on every rank where a step was not finite."""
        late = _LATE if self._posted and self._posted[-1].losses.is_cuda else 1
        for posted in list(self._posted)[: max(0, len(self._posted) - late + 1)]:
            self._start(posted)
        return [self._finish() for _ in range(max(0, len(self._posted) - late))]

    def settle(self) -> list[Report]:
        """All outstanding reports; waits for the device. Before an evaluation and a checkpoint: these build on finite steps."""
        for posted in self._posted:
            self._start(posted)
        return [self._finish() for _ in range(len(self._posted))]

    def _start(self, posted: _Posted) -> None:
        """Start summing over ranks, once the numbers have arrived on the host."""
        if posted.summed is not None:
            return
        if posted.copied is not None:
            posted.copied.synchronize()
        loss, posted.grad_norm = posted.device_numbers.tolist()
        bad = not (math.isfinite(loss) and (self.fp16 or math.isfinite(posted.grad_norm)))
        shared = [loss, bad, posted.data_wait, len(posted.broken), posted.stop, bool(posted.ended_by)]
        posted.summed = torch.tensor(shared, dtype=torch.float64)
        if world_size() > 1:
            posted.work = dist.all_reduce(posted.summed, group=host_group(), async_op=True)

    def _finish(self) -> Report:
        posted = self._posted.popleft()
        if posted.work is not None:
            posted.work.wait()
        loss, bad, wait, broken, stop, ended = posted.summed.tolist()
        skipped = self.fp16 and not math.isfinite(posted.grad_norm)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if bad and not skipped:
            self._refuse(posted)
        if self.skipped_in_a_row > _MAX_SKIPPED:
            raise Refused(
                f"fp16: the last {self.skipped_in_a_row} steps up to step {posted.step} overflowed and were skipped; "
                "lower --lr, set --clip 1, or take a bf16 config"
            )
        names = tuple(name for theirs in gather_objects(posted.broken) for name in theirs) if broken else ()
        ended_by = first_said(posted.ended_by) if ended else ""
        mean = loss / self.global_batch_size
        return Report(posted.step, mean, posted.grad_norm, wait / world_size(), names, stop > 0, skipped, ended_by)

    def _refuse(self, posted: _Posted) -> None:
        mine = posted.positions[~torch.isfinite(posted.losses.cpu())].tolist()
        positions = sorted(position for theirs in gather_objects(mine) for position in theirs)
        what = f"the loss of the samples at positions {_listed(positions)}" if positions else "the gradient norm"
        raise Refused(
            f"step {posted.step}: {what} is not finite; no checkpoint of it was made. "
            "Lower --lr, set --clip 1 or --warmup_epochs, or look at these samples"
        )


def first_said(text: str) -> str:
    """What the first rank says that says something, on every rank; a collective. Two ranks, "" and "b": "b" on both."""
    return next(filter(None, gather_objects(text)), "")


def _listed(positions: list[int], most: int = 8) -> str:
    more = f" and {len(positions) - most} more" if len(positions) > most else ""
    return ", ".join(map(str, positions[:most])) + more
