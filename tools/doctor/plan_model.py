"""Model of a step's time and memory: fitted to a few cuts of the global batch that a layout has tried, it predicts others.

    step = max((M - 1) * earlier(n) + last(n) + rest(M), supply)

A micro-batch of n samples takes `earlier(n)`, or `last(n)` if its gradients are sent, the part of the all-reduce that the
backward pass does not hide included. `rest(M)`, of M micro-steps, is the optimizer, the report, and batches that the process
makes itself. `supply` is how fast data workers make a global batch. Each is a line, a + b x.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.data.batch_plan import BatchPlan

_WAITS = 0.1  # share of a step: above it, data workers are what limits the speed
_POINTS = 2  # that make a line


@dataclass(frozen=True)
class Line:
    """a + b x, of numbers that can't be negative."""

    a: float
    b: float

    def __call__(self, x: float) -> float:
        return self.a + self.b * x

    @classmethod
    def through(cls, xs: Sequence[float], ys: Sequence[float]) -> "Line":
        """The line with the least relative errors; a constant for one x, or if the numbers fall."""
        x, y = np.asarray(xs, float), np.maximum(np.asarray(ys, float), 1e-9)
        if len(set(xs)) < _POINTS:
            return cls(float(np.median(y)), 0.0)
        b, a = np.polyfit(x, y, 1, w=1 / y)
        if b < 0:
            return cls(float(np.median(y)), 0.0)
        if a < 0:
            return cls(0.0, float(np.median(y / x)))
        return cls(float(a), float(b))


@dataclass(frozen=True)
class Prediction:
    """What a layout does with one cut of the global batch."""

    plan: BatchPlan
    step_s: float
    memory: float  # bytes at the peak, of the process that takes the most
    all_reduce_s: float  # of a step, that no backward pass hides
    waits: bool  # for data workers

    @property
    def images_per_second(self) -> float:
        return self.plan.global_batch_size / self.step_s


class Pace:
    """The model of one layout, fitted to what its processes have found (`plan_trial.Trial.result`)."""

    def __init__(self, found: Sequence[dict]) -> None:
        phases = [phase for result in found for phase in result["phases"]]
        alone, workers = found[0]["processes"] == 1, found[0]["workers"]
        earlier = [(phase["samples"], phase["earlier_s"]) for phase in phases if phase["earlier_s"]]
        last = [(phase["samples"], phase["last_s"]) for phase in phases]
        if alone:  # nothing is sent
            earlier = last = earlier + last
        self._last = Line.through(*zip(*last, strict=True))
        self._earlier = Line.through(*zip(*earlier, strict=True)) if earlier else self._last
        if len({n for n, _ in earlier}) == 1:  # the slope of those whose gradients are sent
            (n, *_), times = zip(*earlier, strict=True)
            self._earlier = Line(max(0.0, float(np.median(times)) - self._last.b * n), self._last.b)
        waits = [phase["data_s"] if workers else 0.0 for phase in phases]
        rests = [
            phase["step_s"] - (phase["micro_steps"] - 1) * (phase["earlier_s"] or 0) - phase["last_s"] - wait
            for phase, wait in zip(phases, waits, strict=True)
        ]
        self._rest = Line.through([phase["micro_steps"] for phase in phases], rests)
        bound = [phase["step_s"] for phase, wait in zip(phases, waits, strict=True) if wait > _WAITS * phase["step_s"]]
        self._supply = float(np.median(bound)) if bound else 0.0
        self._memory = []
        for result in found:
            first = {phase["samples"]: phase["peak"] for phase in reversed(result["phases"])}
            self._memory.append((Line.through([*first], [*first.values()]), result["end_peak"]))

    def predict(self, plan: BatchPlan) -> Prediction:
        """Time and memory of a step that is cut as `plan` says."""
        size, micro_steps = plan.global_batch_size / plan.parts, plan.micro_steps
        computing = (micro_steps - 1) * self._earlier(size) + self._last(size) + self._rest(micro_steps)
        sent = max(0.0, self._last(size) - self._earlier(size))
        memory = max(max(line(plan.micro_batch_sizes[0]), end) for line, end in self._memory)
        return Prediction(plan, max(computing, self._supply), memory, sent, self._supply > computing)
