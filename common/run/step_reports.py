"""Step reports: loss and state of the last steps over all ranks, without waiting for the device.

The numbers of a step are copied to the host asynchronously, summed over the ranks by the host's
process group while the next step runs, and read one step later, on an accelerator two. Everything
that the ranks must agree on (to stop, that a loss is not finite, how many images were broken) is
sent in the same few numbers.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from common.distributed import devices
from common.distributed.collectives import gather_objects, host_group, rank, world_size
from common.errors import Refused
from common.training.step import StepOutcome
from common.training.update_size import Update

_LATE = 2  # steps between a step and its report on an accelerator
_MOST_NAMES = 1_000  # of custom numbers in a run
# fp16: a smaller scale would not help; from 65,536, it takes 26 skipped steps in a row.
_LEAST_SCALE = 2**-9


@dataclass(frozen=True)
class StepReport:
    """The result of one step, the same on every rank."""

    step: int  # optimizer steps done, this one included
    loss: float  # mean over the global batch
    grad_norm: float  # before clipping; not finite if fp16 skipped the step
    data_wait: float  # seconds that a rank waited for data, mean over ranks
    broken: tuple[str, ...]  # images that could not be read, of all ranks
    stop: bool  # some rank was asked to stop
    skipped: bool  # fp16 found an overflow and left the weights as they were
    rate: float = 0.0  # the highest learning rate of the step
    ended_by: str = ""  # why the recipe ends the run, if some rank does
    loss_scale: float | None = None  # fp16: the factor of the next step's loss
    # Custom numbers: means over all values of the step.
    logged: dict[str, float] = field(default_factory=dict)
    # Only of a step that is logged: the size of its update and the rates of parts.
    update: dict[str, float] = field(default_factory=dict)
    ready: tuple[float, ...] = ()  # by rank, seconds of its laps since the last such step


@dataclass
class _Posted:
    step: int
    outcome: StepOutcome
    # float64: loss, gradient norm, loss scale, then the sum of each custom number.
    device_numbers: torch.Tensor
    stop: bool
    ended_by: str
    counts: dict[str, int]  # number of values of each custom number
    update: Update | None
    lap: "Lap | None"
    rate: float
    copied: torch.Event | None = None
    # Fields of `StepReport` that every rank knows by itself.
    report: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, tuple[float, int]] = field(default_factory=dict)  # on the host: sum and count
    names: tuple[str, ...] = ()  # of the custom numbers that are summed over ranks
    summed: torch.Tensor | None = None
    work: Any = None


class Lap:
    """The time that a rank takes for data and forward passes, until it can send its gradients.

    Until then ranks don't wait for each other. On a GPU it is the device's time, which is read once
    the step is over. `began` is when the step began, by this process's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.began = time.perf_counter()
        self._events = (
            [torch.Event(device, enable_timing=True) for _ in range(2)]
            if devices.has_streams(device)
            else None
        )
        self._times = [0.0, 0.0]
        self._mark(0)

    def ready(self) -> None:
        """Call it before every backward pass; the last one sends the gradients."""
        self._mark(1)

    def seconds(self) -> float:
        """On a GPU the step must be over."""
        if self._events:
            return self._events[0].elapsed_time(self._events[1]) / 1000
        return self._times[1] - self._times[0]

    def _mark(self, place: int) -> None:
        if self._events:
            self._events[place].record()
        else:
            self._times[place] = time.perf_counter()


@dataclass
class StepReports:
    """Takes the numbers of every step and returns complete reports.

    All ranks call the same methods in the same order.
    """

    global_batch_size: int
    scaler: torch.amp.GradScaler | None = None  # under fp16
    _posted: deque = field(default_factory=deque)
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)  # of the present step
    _counts: dict[str, int] = field(default_factory=dict)
    _names: tuple[str, ...] = ()  # of custom numbers, known to all ranks
    _laps: float = 0.0  # seconds of this rank's laps since the last step that was logged

    def __post_init__(self) -> None:
        # Of the step that is summed next.
        self._loss_scale = self.scaler.get_scale() if self.scaler else 0.0

    def add(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Add custom numbers, float[] or float[n], to the present step. Does not wait for a device."""
        for name, value in values.items():
            try:
                if isinstance(value, torch.Tensor):
                    value = value.detach()
                else:
                    value = torch.tensor(value, dtype=torch.float64)
            except (TypeError, ValueError, RuntimeError):
                raise Refused(
                    f"run.log: {name} is {value!r:.40}; give a number or a tensor"
                ) from None
            if value.ndim > 1:
                raise Refused(
                    f"run.log: {name} has shape {list(value.shape)}; give one number, or one per "
                    "sample, [n]"
                )
            total = value.sum(dtype=devices.get_sum_dtype(value.device))
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._counts[name] = self._counts.get(name, 0) + value.numel()

    def post(
        self,
        step: int,
        outcome: StepOutcome,
        grad_norm: torch.Tensor,
        stop: bool,
        ended_by: str = "",
        update: Update | None = None,
        lap: Lap | None = None,
        rate: float = 0.0,
    ) -> None:
        """Take the numbers of this rank's `step`.

        Args:
            step: counted from 1.
            outcome: losses of this rank's samples, and more.
            grad_norm: before clipping, a scalar on the device.
            stop: whether this rank was asked to stop.
            ended_by: why the recipe ends the run, if it does.
            update: for a step that is logged, on all ranks.
            lap: the time of this rank.
            rate: the highest learning rate of the step.
        """
        losses = outcome.losses
        loss = losses.sum(dtype=devices.get_sum_dtype(losses.device))
        numbers = [loss, grad_norm.to(loss.dtype)]
        if self.scaler:  # scaling 1 gives the scale; `get_scale` would wait for the device
            numbers.append(self.scaler.scale(torch.ones_like(loss)))
        if update and update.norms is not None:
            numbers += update.norms.to(loss.dtype).unbind()
        numbers += [  # a host scalar is added as an argument: a copy would wait for the device
            total if total.device == loss.device else torch.zeros_like(loss) + total.to(loss.dtype)
            for total in self._sums.values()
        ]
        on_host = torch.stack(numbers).to("cpu", non_blocking=True)
        posted = _Posted(step, outcome, on_host, stop, ended_by, self._counts, update, lap, rate)
        self._sums = {}
        self._counts = {}
        if devices.has_streams(losses.device):
            posted.copied = devices.record_event()
        elif losses.device.type != "cpu":
            torch.accelerator.synchronize()
        self._posted.append(posted)

    def read(self) -> list[StepReport]:
        """The reports that are due, oldest first. Raises `Refused` on every rank if a step was not finite."""
        late = 1
        if self._posted and devices.has_streams(self._posted[-1].outcome.losses.device):
            late = _LATE
        num_posted = len(self._posted)
        for posted in list(self._posted)[: max(0, num_posted - late + 1)]:
            self._start(posted)
        return [self._finish() for _ in range(max(0, num_posted - late))]

    def settle(self) -> list[StepReport]:
        """All outstanding reports, before an evaluation or a checkpoint. Waits for the device."""
        for posted in self._posted:
            self._start(posted)
        return [self._finish() for _ in range(len(self._posted))]

    def _start(self, posted: _Posted) -> None:
        """Start summing over ranks, once the numbers have arrived on the host."""
        if posted.summed is not None:
            return
        if posted.copied is not None:
            posted.copied.synchronize()
        loss, grad_norm, *totals = posted.device_numbers.tolist()
        posted.report = {"grad_norm": grad_norm, "skipped": False}
        if self.scaler:
            scale, *totals = totals
            posted.report |= {"skipped": scale < self._loss_scale, "loss_scale": scale}
            self._loss_scale = scale
        if posted.update:
            posted.report["update"] = dict(posted.update.rates)
            if posted.update.norms is not None:
                size, change, *totals = totals
                posted.report["update"] |= {
                    "weight_norm": size,
                    "update_ratio": change / size if size else 0.0,
                }
        posted.logged = {
            name: (total, count)
            for total, (name, count) in zip(totals, posted.counts.items(), strict=True)
        }
        posted.names = self._names
        # Only gradients may overflow, since a smaller scale makes them smaller. The loss is
        # computed before scaling.
        bad = not (math.isfinite(loss) and (posted.report["skipped"] or math.isfinite(grad_norm)))
        new = not posted.logged.keys() <= set(posted.names)
        outcome = posted.outcome
        has_reason = bool(posted.ended_by)
        num_broken = len(outcome.broken)
        shared = [loss, bad, outcome.data_wait, num_broken, posted.stop, has_reason, new]
        if posted.lap:
            self._laps += posted.lap.seconds()
        if posted.update:
            seconds_by_rank = [0.0] * world_size()
            seconds_by_rank[rank()] = self._laps
            self._laps = 0.0
            shared += seconds_by_rank
        for name in posted.names:
            shared += [*posted.logged.get(name, (0.0, 0)), name in posted.logged]
        posted.summed = torch.tensor(shared, dtype=torch.float64)
        if world_size() > 1:
            posted.work = dist.all_reduce(posted.summed, group=host_group(), async_op=True)

    def _finish(self) -> StepReport:
        # It stays until all of its numbers are in: the loss of a process must not leave a step without
        # a report.
        posted = self._posted[0]
        if posted.work is not None:
            posted.work.wait()
        loss, bad, wait, broken, stop, ended, new, *sums = posted.summed.tolist()
        if bad:
            self._refuse(posted)
        if posted.report["skipped"] and posted.report["loss_scale"] < _LEAST_SCALE:
            raise Refused(
                f"step {posted.step}: gradients still overflow in fp16 with a loss scale below "
                f"{_LEAST_SCALE:.2g}; lower --lr, set --clip 1, or take a bf16 config"
            )
        names: list[str] = []
        if broken:
            for names_of_rank in gather_objects(posted.outcome.broken):
                names += names_of_rank
        ranks = world_size() if posted.update else 0
        report = StepReport(
            step=posted.step,
            loss=loss / self.global_batch_size,
            data_wait=wait / world_size(),
            rate=posted.rate,
            broken=tuple(names),
            stop=stop > 0,
            ended_by=find_first_text(posted.ended_by) if ended else "",
            logged=self._compute_means(posted, sums[ranks:], new > 0),
            ready=tuple(sums[:ranks]),
            **posted.report,
        )
        self._posted.popleft()
        return report

    def _compute_means(self, posted: _Posted, sums: list[float], new: bool) -> dict[str, float]:
        """The mean of each custom number over all values that the ranks gave in the step.

        `sums` has three numbers for each of `posted.names`: the sum, the number of values, and the
        number of ranks that gave one. `new`: some rank has further names, which are sent in full.
        """
        sums_by_name: dict[str, list[float]] = {}
        for i, name in enumerate(posted.names):
            sums_by_name[name] = sums[3 * i : 3 * i + 3]
        if new:  # names are sent only the first time
            self._gather_new(posted, sums_by_name)
        where = f"step {posted.step}: run.log"
        if len(self._names) > _MOST_NAMES:
            raise Refused(
                f"{where} got more than {_MOST_NAMES:,} names, the last {self._names[-1]}; log "
                "under fewer names"
            )
        means = {}
        for name, (total, num_values, num_ranks) in sums_by_name.items():
            if 0 < num_ranks < world_size():
                raise Refused(
                    f"{where}: {name} came from {num_ranks:.0f} of {world_size()} processes; log "
                    "it on all of them in the same steps, with an empty tensor where there is "
                    "nothing to log"
                )
            if not (math.isfinite(total) or posted.report["skipped"]):
                raise Refused(
                    f"{where}: {name} is not finite; mend it, or log torch.nan_to_num of it"
                )
            if num_values:
                means[name] = total / num_values
        return means

    def _gather_new(self, posted: _Posted, sums_by_name: dict[str, list[float]]) -> None:
        """Add to `sums_by_name` the custom numbers whose names not all ranks know. A collective."""
        unsent = {name: sums for name, sums in posted.logged.items() if name not in sums_by_name}
        for unsent_by_rank in gather_objects(unsent):
            for name, (total, num_values) in unsent_by_rank.items():
                sums = sums_by_name.setdefault(name, [0.0, 0, 0])
                sums[0] += total
                sums[1] += num_values
                sums[2] += 1
        known = set(self._names)
        self._names += tuple(sorted(name for name in sums_by_name if name not in known))

    def _refuse(self, posted: _Posted) -> None:
        is_bad = ~torch.isfinite(posted.outcome.losses.cpu())
        positions_by_rank = gather_objects(posted.outcome.positions[is_bad].tolist())
        positions = sorted(itertools.chain.from_iterable(positions_by_rank))
        what = "the gradient norm"
        if positions:
            what = f"the loss of the samples at positions {_format_positions(positions)}"
        half = ", or take a bf16 config: beyond 65,504 fp16 is infinite" if self.scaler else ""
        raise Refused(
            f"step {posted.step}: {what} is not finite; no checkpoint of it was made. "
            f"Lower --lr, set --clip 1 or --warmup_epochs, or look at these samples{half}"
        )


def find_first_text(text: str) -> str:
    """The first text of a rank that is not empty, on every rank; "" if there is none. A collective."""
    return next(filter(None, gather_objects(text)), "")


def _format_positions(positions: list[int], limit: int = 8) -> str:
    """A list of numbers as text, with the number of those beyond `limit`."""
    more = f" and {len(positions) - limit} more" if len(positions) > limit else ""
    return ", ".join(map(str, positions[:limit])) + more
