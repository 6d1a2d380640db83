"""Ending of a start: what asked it to stop, what the ranks agree on, and the step after which its loop ends.

A start ends after the last step of the run, or before it:

- A signal, or the end of its launcher, asks a process to stop. Step reports tell all ranks, which
  save and leave. The run is resumable.
- The recipe or a flag ends the run by `stop`. All ranks evaluate and save a last time. The run is finished.
- A process that was asked to stop waits for what may not come. It saves what it can and leaves
  without the others.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from common.config.fields import RunConfig
from common.distributed.collectives import is_main
from common.launching import launch
from common.launching.exit_codes import END, RESTART, get_signal_name, handle_stopping, read_notice
from common.run.progress import Progress
from common.run.step_reports import StepReport, find_first_text

# Seconds that a wait for data or an evaluation may take once this process was asked to stop.
GRACE_S = 5.0


class Ending:
    """How one start of a run ends.

    Attributes:
        last: the step after which this start ends; 0 until that is known.
        requested_by: what asked this process to stop, such as SIGTERM; "" if nothing did.
        is_leaving: whether this machine was asked to leave the run, rather than to restart its processes.
        is_stopping: whether some rank was asked to stop, as all ranks know.
        stop_reason: why the recipe or a flag ends the run, as this rank knows; "" if none does.
        is_evaluating: whether this process is within an evaluation.
    """

    def __init__(self, leave: Callable[[], None]):
        """`leave()` saves and closes the run without communication; this process ends after it."""
        self.last = 0
        self.requested_by = ""
        self.is_leaving = False
        self.is_stopping = False
        self.stop_reason = ""
        self.is_evaluating = False
        self._leave = leave
        self._agreed_reason = ""  # the `stop_reason` of some rank, which all ranks know
        # When a wait began that this process may leave; before the first step it may always.
        self._leavable_since: float | None = 0.0
        self._handlers: dict[int, Any] = {}

    # --- signals

    def handle_signals(self) -> None:
        """Take the signals that ask to stop."""
        self._handlers = handle_stopping(self._on_signal)

    def restore_handlers(self) -> None:
        """Give the signals back to their handlers from before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def cancel_alarm(self) -> None:
        """Don't leave alone any more: the run is being closed.

        An error may have ended a `leavable` block, and a signal may come only now.
        """
        self._leavable_since = None
        signal.setitimer(signal.ITIMER_REAL, 0)

    def request(self, cause: str, is_leaving: bool = True) -> None:
        """Ask this process to stop; with `is_leaving`, its machine leaves the run. The first cause counts."""
        if not self.requested_by:
            self.requested_by = cause
        if is_leaving:
            self.is_leaving = True

    def forbid_leaving(self) -> None:
        """The steps begin: from here on this process leaves alone only from within `leavable` blocks."""
        self._leavable_since = None

    @contextlib.contextmanager
    def leavable(self, is_evaluating: bool = False) -> Iterator[None]:
        """A block that this process leaves if it is asked to stop and it takes longer than `GRACE_S`."""
        self._leavable_since = time.monotonic()
        self.is_evaluating = is_evaluating
        yield
        self._leavable_since = None
        self.is_evaluating = False

    def _on_signal(self, number: int, frame) -> None:
        if self.requested_by and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once, without saving
        cause = read_notice()  # of the launcher, before it ends its processes
        if cause == RESTART:
            self.request("a change of machines", is_leaving=False)
        elif cause in ("", END):
            self.request(get_signal_name(number))
        else:
            self.request(cause)
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        self._on_alarm(number, frame)

    def _on_alarm(self, number: int, frame) -> None:
        """End this process if it waits for what may not come. No communication."""
        if self._leavable_since is None or time.monotonic() - self._leavable_since < GRACE_S:
            return
        self._leavable_since = None
        try:
            self._leave()
        finally:
            launch.leave_now(self.is_leaving)

    # --- agreement between ranks

    def stop(self, reason: str) -> None:
        """End the run early; see `Run.stop`. The first reason counts."""
        if not self.stop_reason:
            self.stop_reason = reason if reason else "the recipe"

    def stop_by_flags(self, progress: Progress, config: RunConfig) -> None:
        """Stop if --patience or --max_hours says so: the main process decides, since clocks differ."""
        if is_main():
            reason = progress.exhausted(config)
            if reason:
                self.stop(reason)

    def record_report(self, report: StepReport) -> None:
        """Take from a step's report, the same on all ranks, whether some rank is to stop or ends the run."""
        if report.stop:
            self.is_stopping = True
        if not self._agreed_reason:
            self._agreed_reason = report.ended_by

    def agree(self, step: int, progress: Progress) -> None:
        """Make `step` the last if `stop` was called on some rank. A collective."""
        if step < self.last:
            if not self._agreed_reason:
                self._agreed_reason = find_first_text(self.stop_reason)
            self.end_if_agreed(step, progress)

    def end_if_agreed(self, step: int, progress: Progress) -> None:
        """Make `step` the last if all ranks know that the run is to end.

        To be called before the evaluation and the checkpoint of the step.
        """
        if self._agreed_reason and step < self.last:
            self.last = step
            progress.ended_by = self._agreed_reason

    def end_here(self, step: int, reason: str, progress: Progress) -> None:
        """Make `step` the last, on all ranks alike."""
        self._agreed_reason = reason
        self.end_if_agreed(step, progress)
