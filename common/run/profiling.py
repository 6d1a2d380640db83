"""Profiling: torch.profiler records some steps."""

import os
from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile, schedule

from common.distributed import watchdog
from common.distributed.collectives import gather_objects, rank, world_size
from common.errors import Refused


class Profile:
    """Records the steps `first` to `last` on every rank, counted from 1, into `profile/` of the run folder `run`.

    `done` are the steps that earlier starts have made.
    """

    def __init__(self, first: int, last: int, done: int, run: Path, say: Callable[[str], None]):
        self._last, self._folder, self._say, self._written = last, run / "profile", say, False
        self._first = max(first, done + 1)
        self._failure = ""
        self._profiler: profile | None = None
        if done >= last:
            say(f"--profile {first}-{last}: {done} steps were made before this start; name later ones")
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports that there is no GPU
        steps = schedule(wait=self._first - done - 1, warmup=1, active=last - self._first + 1, repeat=1)
        self._profiler = profile(schedule=steps, on_trace_ready=self._write)
        self._profiler.start()

    def before(self) -> None:
        """Must be called before each step."""
        if self._profiler:
            self._profiler.step()

    def after(self, step: int, ends: bool = False) -> None:
        """Must be called after each step, and with `ends` after the loop. A collective if it writes the trace."""
        if not self._profiler or not (step == self._last or ends):
            return
        watchdog.note("writing the profile")
        self._profiler.stop()
        self._profiler = None
        if failures := [*filter(None, gather_objects(self._failure))]:
            self._say(f"the profile is incomplete: {'; '.join(failures[:3])}")
        elif step >= self._first:
            where = self._folder / f"steps_{self._first}-{self._last}_rank{'*' if world_size() > 1 else 0}.json.gz"
            self._say(f"profile: {where} opens in ui.perfetto.dev or chrome://tracing")

    def _write(self, profiler: profile) -> None:
        path = self._folder / f"steps_{self._first}-{self._last}_rank{rank()}.json.gz"
        try:
            # Not its parents: a machine that does not see the run folder must not make it.
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except Exception as error:  # a failed profile must not end the run
            self._failure = f"rank {rank()}: {type(error).__name__}: {error}"


def check(steps: tuple[int, int] | None, total_steps: int) -> None:
    """Raise `Refused` if a run of `total_steps` ends before the last of the `steps` to profile."""
    if steps and steps[1] > total_steps:
        raise Refused(
            f"--profile {steps[0]}-{steps[1]}: the run ends with step {total_steps}; name steps up to that one"
        )
