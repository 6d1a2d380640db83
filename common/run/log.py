"""What does a run tell people and programs, and where?

Lines go to the terminal and log.txt, rows to metrics.jsonl and the dashboard, and one live bar shows the progress. On all
but the main process a `Journal` is silent.
"""

import os
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from common.errors import printable
from common.run.folder import RunFolder
from common.run.tracking import BoxedImage, Tracker

_LINE_SECONDS = 2.0  # without a terminal, progress lines are at least this far apart


class RunLog:
    """The voice of one run; `folder` is None on every process but the main one."""

    def __init__(self, folder: RunFolder | None):
        self._folder, self._bar, self._tracker = folder, None, None
        self._row: dict = {}
        self._failure: OSError | None = None
        self._said_at = 0.0

    def say(self, *lines: str) -> None:
        """Lines for people: terminal and log.txt."""
        if self._folder:
            text = "\n".join(map(printable, lines))
            try:
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()
            except OSError:
                # A terminal that was closed, or a full disk behind it, is not worth a run: log.txt has it all.
                sys.stdout = open(os.devnull, "w")
            self._folder.log(text)

    def table(self, rows: dict[str, str]) -> None:
        """Names and values, one a line."""
        width = max(map(len, rows))
        self.say(*(f"  {name:<{width}}  {value}" for name, value in rows.items()))

    def open(self, tracker: Tracker, done: int, total: int) -> None:
        """Start the bar, for a run of `total` steps of which `done` are done; the dashboard starts after the first step."""
        self._tracker, self._total, self._pace_from = tracker, total, None
        if self._folder and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)

    def advance(self, step: int) -> None:
        """`step` steps are done; the bar draws itself at most ten times a second."""
        if self._tracker:
            self._tracker.begin()
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def note(self, step: int, values: dict[str, float]) -> None:
        """Add to the row of `step`; a row is written when a later step's begins, so that no step has two."""
        if self._row and self._row["step"] != step:
            self.flush()
        self._row = {"step": step} | self._row | values

    def flush(self) -> None:
        """Write the row that is being collected."""
        row, self._row = self._row, {}
        if not row or not self._folder or self._folder.lost:  # a dashboard's files may be in it
            return
        if not self.failed:  # no row after a gap
            try:
                self._folder.row(row)
            except OSError as error:
                self._failure = error
        self._tracker.log(row["step"], {key: value for key, value in row.items() if key != "step"})
        self._show(row)

    @property
    def failed(self) -> bool:
        """Whether a row could not be written (the disk is full): the run can't go on, but all ranks have to stop together."""
        return self._failure is not None

    def check(self) -> None:
        """Raise the OSError for which a row could not be written."""
        if self._failure:
            raise self._failure

    def summary(self, values: dict) -> None:
        """Results, last and best: summary.json and the dashboard's table of runs."""
        if self._folder:  # also where a finished run is started again: a kill may have come before its last word
            self._folder.write("summary.json", values)
        if self._tracker:
            self._tracker.summary(
                {f"{part}/{key}": value for part in ("best", "last") for key, value in values[part].items()}
            )

    def close(self, exit_code: int, patience: float) -> str:
        """Stop the bar and the dashboard, waiting `patience` seconds for it; where the dashboard's files are."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if not self._tracker:
            return ""
        self._tracker.finish(exit_code, patience)
        return self._tracker.where()

    def pictures(self, step: int, pictures: dict, boxed_images: Sequence[BoxedImage] | None = None) -> None:
        """Send picture files (key -> path) of `step` to the tracker, and images with boxes if there are any."""
        if self._tracker:
            self._tracker.images(step, pictures)
            if boxed_images:
                self._tracker.boxed_images(step, boxed_images)

    def _show(self, row: dict) -> None:
        parts = [f"{name} {row[key]:.4g}" for key, name in _SHOWN.items() if row.get(key) is not None]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts))
        now, step = time.perf_counter(), row["step"]
        evaluated = any(key.startswith("eval/") for key in row)
        if evaluated or (self._bar is None and (now - self._said_at >= _LINE_SECONDS or step == self._total)):
            self._said_at = now
            self.say(f"step {step}/{self._total}  {'  '.join(parts)}{self._left(now, step)}")

    def _left(self, now: float, step: int) -> str:
        """The time that is left at the pace since the first row; before, the start-up of the first steps would mislead."""
        if self._pace_from is None:
            self._pace_from = now, step
            return ""
        began, first = self._pace_from
        return f"  {(now - began) / max(1, step - first) * (self._total - step):.0f} s left"


_SHOWN = {
    "train/loss": "loss",
    "train/loss_scale": "loss scale",
    "eval/loss": "eval loss",
    "eval/top1": "top-1",
    "eval/ema_top1": "EMA top-1",
    "eval/f1": "F1",
    "eval/AP": "AP",
    "eval/AP50": "AP50",
    "eval/ema_AP": "EMA AP",
    "eval/ema_AP50": "EMA AP50",
    "perf/images_per_second": "images/s",
}
