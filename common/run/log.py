"""The log of a run: lines in the terminal and log.txt, rows in metrics.jsonl and on the dashboard.

A bar shows the progress. Only the main process writes; on the others, a `RunLog` does nothing.
"""

import sys
import time
from pathlib import Path

from tqdm import tqdm

from common.errors import make_printable
from common.run.folder import RunFolder
from common.run.progress import display_name, get_shown_metrics, of_exported
from common.run.tracking import Tracker

_LINE_SECONDS = 2.0  # shortest time between two progress lines if there is no terminal


class RunLog:
    """The log of one run. `folder` is None on every process except the main one.

    Attributes:
        leading: the result that lines show of an evaluation, beside its loss; "" before the first.
    """

    def __init__(self, folder: RunFolder | None):
        self.leading = ""
        self._folder = folder
        self._bar = tqdm(disable=True)
        self._tracker: Tracker | None = None
        self._first_row: tuple[float, int] | None = None  # its time and step
        self._row: dict = {}
        self._failure: OSError | None = None
        self._line_at = 0.0

    def say(self, *lines: str) -> None:
        """Log lines: print them and append them to log.txt."""
        if self._folder:
            text = "\n".join(map(make_printable, lines))
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
            self._folder.log(text)

    def table(self, rows: dict[str, str]) -> None:
        """Log a table: one name and value per line."""
        width = max(map(len, rows))
        self.say(*(f"  {name:<{width}}  {value}" for name, value in rows.items()))

    def open(self, tracker: Tracker, done: int, total: int) -> None:
        """Start the bar of a run of `total` steps, of which `done` are done.

        The dashboard starts after the first step.
        """
        self._tracker = tracker
        self._total = total
        is_shown = self._folder is not None and sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=done, unit="step", dynamic_ncols=True, disable=not is_shown
        )

    def advance(self, step: int) -> None:
        """Set the bar to `step` steps; it is redrawn at most ten times a second."""
        if self._tracker:
            self._tracker.begin()
        self._bar.update(step - self._bar.n)

    def note(self, step: int, values: dict[str, float]) -> None:
        """Add values to the row of `step`.

        The row is written when that of a later step begins, so that no step has two rows.
        """
        if self._row and self._row["step"] != step:
            self.flush()
        self._row = {"step": step} | self._row | values

    def flush(self) -> None:
        """Write the present row."""
        row = self._row
        self._row = {}
        # In a lost folder, neither rows nor the dashboard's files are written.
        if not row or not self._folder or self._folder.lost:
            return
        if not self.failed:  # no gap in the rows
            try:
                self._folder.row(row)
            except OSError as error:
                self._failure = error
        if self._tracker:
            metrics = {key: value for key, value in row.items() if key != "step"}
            self._tracker.log(row["step"], metrics)
        self._show(row)

    @property
    def failed(self) -> bool:
        """True if a row could not be written (the disk is full). All ranks have to stop together."""
        return self._failure is not None

    def check(self) -> None:
        """Raise the OSError of a row that could not be written, if there was one."""
        if self._failure:
            raise self._failure

    def summary(self, values: dict) -> None:
        """Write summary.json, and show the best and the last results on the dashboard."""
        # Also when a finished run starts again: it may have been killed before this.
        if self._folder:
            self._folder.write("summary.json", values)
        if self._tracker:
            results = {}
            for which in ("best", "last"):
                for key, value in values[which].items():
                    results[f"{which}/{key}"] = value
            self._tracker.summary(results)

    def close(self, exit_code: int, patience: float, model: Path | None = None) -> str:
        """Stop the bar and the dashboard; returns where the dashboard is.

        Waits for it up to `patience` seconds. `model` is uploaded by `Tracker.finish`.
        """
        self._bar.close()
        if not self._tracker:
            return ""
        self._tracker.finish(exit_code, patience, model)
        return self._tracker.where()

    def pictures(self, step: int, pictures: dict) -> None:
        """Send image files of `step` (key -> path) to the dashboard."""
        if self._tracker:
            self._tracker.images(step, pictures)

    def _show(self, row: dict) -> None:
        figures = []
        for name, value in self._select_figures(row).items():
            if value is not None:
                figures.append(f"{name} {value:.4g}")
        self._bar.set_postfix_str(", ".join(figures))
        time_s = time.perf_counter()
        step = row["step"]
        is_evaluated = any(key.startswith("eval/") for key in row)
        is_due = time_s - self._line_at >= _LINE_SECONDS or step == self._total
        if is_evaluated or (self._bar.disable and is_due):
            self._line_at = time_s
            remaining = self._format_remaining(time_s, step)
            self.say(f"step {step}/{self._total}  {'  '.join(figures)}{remaining}")

    def _select_figures(self, row: dict) -> dict[str, float | None]:
        """Select what a line shows of a row, by its name; None for what the row does not have."""
        results = of_exported({key: value for key, value in row.items() if key.startswith("eval/")})
        figures = {
            "loss": row.get("train/loss"),
            "loss scale": row.get("train/loss_scale"),
            "eval loss": results.get("loss"),
        }
        for metric in get_shown_metrics(self.leading):
            for key in (metric, f"raw_{metric}"):
                figures[display_name(key)] = results.get(key)
        figures["images/s"] = row.get("perf/images_per_second")
        return figures

    def _format_remaining(self, time_s: float, step: int) -> str:
        """The remaining time, from the pace since the first row: steps before it include the start-up."""
        if self._first_row is None:
            self._first_row = (time_s, step)
            return ""
        first_time_s, first_step = self._first_row
        step_s = (time_s - first_time_s) / max(1, step - first_step)
        return f"  {step_s * (self._total - step):.0f} s left"
