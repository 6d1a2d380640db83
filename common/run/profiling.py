"""Profiling: records some steps with torch.profiler, and measures the idle time in them.

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
from torch.profiler import profile, record_function

from common.distributed import watchdog
from common.distributed.collectives import gather_objects, is_main, rank, world_size
from common.errors import Refused

_STEP, _PHASE = "step ", "phase: "  # prefixes of names in a trace
WAITING_FOR_DATA = "waiting for data"  # the phase that common/data/loader.py notes
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace


@dataclass(frozen=True)
class IdleTime:
    """Time without work in the steps of a trace; an evaluation between two steps does not count."""

    steps: tuple[int, ...]
    step_ms: float  # median
    share: float  # of the time of the steps
    longest_ms: float
    phase: str  # the phase that takes most of the longest

    def __str__(self) -> str:
        longest = f"{self.longest_ms:.2f} ms, most of that {self.phase}"
        return f"{self.step_ms:.1f} ms a step, idle for {100 * self.share:.2f} % of it, for at most {longest}"


class Profile:
    """Records the steps `first` to `last` on every rank, counted from 1, into `profile/` of the run folder `run`."""

    def __init__(self, first: int, last: int, run: Path, say: Callable[[str], None]):
        self._first, self._last, self._run, self._say = first, last, run, say
        self._profiler: profile | None = None
        self._step_mark: record_function | None = None  # these marks of the trace are open
        self._phase_mark: record_function | None = None
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
                self._begin(step, self._profiler)

    def after(self) -> None:
        """Must be called after each step, so that an evaluation or a checkpoint does not count as part of it."""
        for mark in (self._phase_mark, self._step_mark):
            _close(mark)
        self._step_mark = self._phase_mark = None

    def end(self) -> None:
        """Write the trace and log the idle time. A collective; does nothing if nothing was recorded."""
        profiler, self._profiler = self._profiler, None
        if not (self._steps and profiler):
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

    def _begin(self, step: int, profiler: profile) -> None:
        if not self._steps:
            profiler.start_trace()
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
    steps = [_span(event) for event in marked]  # microseconds, as all times below
    on_device = sorted(_span(event) for event in events if event.get("cat") in _ON_DEVICE)
    # A device may still be at work on the step before the first one.
    busy_until = on_device[0][0] if on_device else steps[0][0]
    gaps = []
    for begin, end in on_device or _on_thread(events, marks, marked[0]["tid"]):
        if begin > busy_until:
            gaps.append((sum(_overlap((busy_until, begin), step) for step in steps), (busy_until, begin)))
        busy_until = max(end, busy_until)
    longest, where = max(gaps, default=(0.0, (0.0, 0.0)))
    durations = [end - begin for begin, end in steps]
    return IdleTime(
        steps=tuple(int(event["name"].removeprefix(_STEP)) for event in marked),
        step_ms=statistics.median(durations) / 1e3,
        share=sum(idle for idle, _ in gaps) / sum(durations),
        longest_ms=longest / 1e3,
        phase=_phase_of(marks, where),
    )


def _on_thread(events: list[dict], marks: list[dict], thread: int) -> list[tuple[float, float]]:
    """When each operator on a thread began and ended, but for those that are part of waiting for data."""
    loading = sorted(_span(mark) for mark in marks if mark["name"] == _PHASE + WAITING_FOR_DATA)
    began = [begin for begin, _ in loading]
    operators = sorted(_span(event) for event in events if event.get("cat") == "cpu_op" and event["tid"] == thread)
    return [
        span for span in operators if not (place := bisect.bisect(began, span[0])) or span[0] >= loading[place - 1][1]
    ]


def _span(event: dict) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _phase_of(marks: list[dict], span: tuple[float, float]) -> str:
    """The phase that takes most of a time span."""
    shares: dict[str, float] = {}
    for event in marks:
        if event["name"].startswith(_PHASE):
            name = event["name"].removeprefix(_PHASE)
            shares[name] = shares.get(name, 0.0) + _overlap(span, _span(event))
    return max(shares, key=shares.__getitem__, default="")


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
    return profile()


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
