"""Profiling: records some steps with torch.profiler, and measures the idle time in and between them.

The trace names each step, and the phases that a process notes in `watchdog`, such as waiting for data. On a GPU, kernels
count as work. Without a GPU, operators on the training thread do, except those that are part of waiting for data.
"""

import bisect
import gzip
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from common.distributed import watchdog
from common.distributed.collectives import gather_objects, is_main, rank, world_size
from common.errors import Refused

_STEP, _PHASE = "step ", "phase: "  # prefixes of names in a trace
WAITING_FOR_DATA = "waiting for data"  # the phase that common/data/loader.py notes
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class IdleTime:
    """Time without work in a trace, in milliseconds."""

    steps: tuple[int, ...]
    step_ms: float  # median
    # From the last work of a step to the first of the next; left out if there is other work between, such as an evaluation.
    between_ms: tuple[float, ...]
    phase: str  # the phase that takes most of the longest time between two steps
    within_ms: float  # the longest time without work in a step

    def __str__(self) -> str:
        parts = [f"{self.step_ms:.1f} ms a step"]
        if self.between_ms:
            parts.append(
                f"between steps no work for {self._share(statistics.median(self.between_ms))}, for at most "
                f"{self._share(max(self.between_ms))}, most of that {self.phase}"
            )
        return "; ".join([*parts, f"within a step for at most {self._share(self.within_ms)}"])

    def _share(self, time_ms: float) -> str:
        return f"{time_ms:.2f} ms ({100 * time_ms / self.step_ms:.2f} % of a step)"


class Profile:
    """Records the steps `first` to `last` on every rank, counted from 1, into `profile/` of the run folder `run`."""

    def __init__(self, first: int, last: int, run: Path, say: Callable[[str], None]):
        self._first, self._last, self._run, self._say = first, last, run, say
        self._profiler: profile | None = None
        self._step_mark = self._phase_mark = None  # open marks of the trace
        self._steps: list[int] = []  # recorded so far

    def skip(self, done: int) -> None:
        """Log a message if all steps to profile are among the `done` steps of earlier starts."""
        if done >= self._last:
            self._say(
                f"--profile {self._first}-{self._last}: {done} steps were made before this start; name later ones"
            )

    def before(self, step: int) -> None:
        """Must be called before each step. A collective if it ends the profile."""
        if step > self._last:
            self.end()
        elif step >= self._first - 1:
            if not self._profiler:
                self._profiler = _profiler()
                self._profiler.prepare_trace()  # one step earlier, if possible: it takes time
            if step >= self._first:
                self._begin(step)

    def after(self) -> None:
        """Must be called after each step, so that an evaluation or a checkpoint does not count as part of it."""
        for mark in (self._phase_mark, self._step_mark):
            _close(mark)
        self._step_mark = self._phase_mark = None

    def end(self) -> None:
        """Write the trace and log the idle time. A collective; does nothing if nothing was recorded."""
        profiler, self._profiler = self._profiler, None
        if not self._steps:
            return
        watchdog.note("writing the profile")
        watchdog.listen(None)
        self.after()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # kernels of the last step
        profiler.stop_trace()
        name, self._steps = f"steps_{self._steps[0]}-{self._steps[-1]}", []
        path = self._run / "profile" / f"{name}_rank{rank()}.json.gz"
        failure = ""
        try:
            _write(profiler, path)
            idle = idle_time_of(path) if is_main() else None
        except Exception as error:  # a failed profile must not end the run
            failure = f"rank {rank()}: {type(error).__name__}: {error}"
        if failures := [theirs for theirs in gather_objects(failure) if theirs]:
            self._say(f"the profile is incomplete: {'; '.join(failures[:3])}")
        if not failure and is_main():
            where = path if world_size() == 1 else path.with_name(f"{name}_rank*.json.gz")
            self._say(f"profile: {idle}; {where} opens in ui.perfetto.dev or chrome://tracing")

    def _begin(self, step: int) -> None:
        if not self._steps:
            self._profiler.start_trace()
            watchdog.listen(self._mark_phase)
        self.after()
        self._steps.append(step)
        self._step_mark = _open(f"{_STEP}{step}")

    def _mark_phase(self, phase: str) -> None:
        _close(self._phase_mark)
        self._phase_mark = _open(_PHASE + phase)


def check(steps: tuple[int, int] | None, total_steps: int) -> None:
    """Raise `Refused` if a run of `total_steps` ends before the last of the `steps` to profile."""
    if steps and steps[1] > total_steps:
        raise Refused(
            f"--profile {steps[0]}-{steps[1]}: the run ends with step {total_steps}; name steps up to that one"
        )


def idle_time_of(trace: Path) -> IdleTime:
    """The idle time in a trace that `Profile` wrote, on its GPU or, without one, on its training thread."""
    with gzip.open(trace, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    marked = sorted((event for event in marks if event["name"].startswith(_STEP)), key=lambda event: event["ts"])
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in marked]  # microseconds, as all times below
    work = _on_device(events) or _on_thread(events, marks, marked[0]["tid"])
    starts = [start for start, _ in spans]
    between, within, longest = [], 0.0, (0.0, 0.0)
    before, busy_until = None, 0.0  # the step of the last work, and when all work so far was done
    for asked, began, duration in sorted(work, key=lambda event: event[1]):
        step = bisect.bisect(starts, asked) - 1  # the step that launched it, whenever it ran
        step = step if step >= 0 and asked < spans[step][1] else None  # launched between two steps
        idle = began - busy_until
        if None not in (step, before) and step == before + 1:
            longest = max(longest, (busy_until, began), key=lambda span: span[1] - span[0])
            between.append(max(0.0, idle) / 1e3)
        elif step is not None and step == before:
            within = max(within, idle)
        before, busy_until = step, max(busy_until, began + duration)
    return IdleTime(
        steps=tuple(int(event["name"].removeprefix(_STEP)) for event in marked),
        step_ms=statistics.median(end - start for start, end in spans) / 1e3,
        between_ms=tuple(between),
        phase=_phase_of(marks, longest),
        within_ms=within / 1e3,
    )


def _on_device(events: list[dict]) -> list[tuple[float, float, float]]:
    """Of each kernel and copy on a GPU: when the host launched it, when it began and how long it took."""
    asked = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    return [
        (asked[event["args"]["correlation"]], event["ts"], event["dur"])
        for event in events
        if event.get("cat") in _ON_DEVICE and event.get("args", {}).get("correlation") in asked
    ]


def _on_thread(events: list[dict], marks: list[dict], thread: int) -> list[tuple[float, float, float]]:
    """The same of each operator on a thread, except those that are part of waiting for data."""
    loading = sorted(
        (mark["ts"], mark["ts"] + mark["dur"]) for mark in marks if mark["name"] == _PHASE + WAITING_FOR_DATA
    )
    began = [start for start, _ in loading]
    operators = [event for event in events if event.get("cat") == "cpu_op" and event["tid"] == thread]
    return [
        (event["ts"], event["ts"], event["dur"])
        for event in operators
        if not (place := bisect.bisect(began, event["ts"])) or event["ts"] >= loading[place - 1][1]
    ]


def _phase_of(marks: list[dict], span: tuple[float, float]) -> str:
    """The phase that takes most of a time span."""
    shares: dict[str, float] = {}
    for event in marks:
        if event["name"].startswith(_PHASE):
            share = min(span[1], event["ts"] + event["dur"]) - max(span[0], event["ts"])
            name = event["name"].removeprefix(_PHASE)
            shares[name] = shares.get(name, 0.0) + max(0.0, share)
    return max(shares, key=shares.get, default="")


def _open(name: str) -> record_function:
    mark = record_function(name)
    mark.__enter__()
    return mark


def _close(mark: record_function | None) -> None:
    if mark:
        mark.__exit__(None, None, None)


def _profiler() -> profile:
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # else it reports its own comings and goings, and that there is no GPU
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    return profile(activities=activities)


def _write(profiler: profile, path: Path) -> None:
    """Write the complete trace, or leave no file."""
    path.parent.mkdir(
        exist_ok=True
    )  # not its parents: a machine that does not see the run folder must not seem to have it
    draft = path.with_name(f".{path.name}")  # the profiler compresses what is named .gz
    try:
        profiler.export_chrome_trace(str(draft))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
