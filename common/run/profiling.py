"""Profiling: torch.profiler records some steps."""

import os
from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile, schedule

from common.config.fields import parse_step_range
from common.distributed import watchdog
from common.distributed.collectives import rank, world_size
from common.errors import Refused


class Profile:
    """Profiles the `steps` of --profile, such as 10-14 (the first is 1), on every rank, into `profile/`.

    `done` are the steps that earlier starts have made. Without `steps` it does nothing. Raises
    `Refused` if a run of `total_steps` ends before the last of them.
    """

    def __init__(
        self, steps: str, done: int, total_steps: int, run: Path, say: Callable[[str], None]
    ):
        first, last = parse_step_range(steps) or (0, 0)
        self._first = max(first, done + 1)
        self._last = last
        self._folder = run / "profile"
        self._say = say
        self._has_failed = False
        self._profiler: profile | None = None
        if self._last > total_steps:
            raise Refused(
                f"--profile {steps}: the run ends with step {total_steps}; name steps up to that "
                "one"
            )
        if steps and done >= self._last:
            say(f"--profile {steps}: {done} steps were made before this start; name later ones")
        elif steps:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports that there is no GPU
            steps_to_profile = schedule(
                wait=self._first - done - 1, warmup=1, active=self._last - self._first + 1, repeat=1
            )
            self._profiler = profile(schedule=steps_to_profile, on_trace_ready=self._write)
            self._profiler.start()

    def before(self) -> None:
        """Must be called before each step."""
        if self._profiler:
            self._profiler.step()

    def after(self, step: int, ends: bool = False) -> None:
        """Must be called after each step, and with `ends` after the loop."""
        if self._profiler is None:
            return
        if step != self._last and not ends:
            return
        watchdog.note("writing the profile")
        self._profiler.stop()
        self._profiler = None
        if step >= self._first and not self._has_failed:
            files = self._get_path("*" if world_size() > 1 else "0")
            self._say(f"profile: {files} opens in ui.perfetto.dev or chrome://tracing")

    def _get_path(self, rank_name: str) -> Path:
        return self._folder / f"steps_{self._first}-{self._last}_rank{rank_name}.json.gz"

    def _write(self, profiler: profile) -> None:
        path = self._get_path(str(rank()))
        try:
            # Not its parents: a machine that does not see the run folder must not make it.
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except Exception as error:  # a failed profile must not end the run
            self._has_failed = True
            self._say(f"the profile could not be written: {type(error).__name__}: {error}")
