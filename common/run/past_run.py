"""Past run: what the files of a run folder tell about a run, whatever became of it.

A killed run lacks files, and a folder may be copied from elsewhere. So each part is read by itself, and what is missing or
damaged is empty.
"""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import Refused
from common.files import MEDIUM, SMALL, open_regular, read_yaml
from common.run.folder import read_json, read_rows
from common.run.plots import finite
from common.run.progress import Progress, metric_of, of_exported

_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (.*)")
_ROW = re.compile(r"  (\S.*?) {2,}(.*)")  # of a table in the log
_STEP = re.compile(r"step [\d,]+/[\d,]+  ")
LEADING = ("top1", "f1", "AP")  # the results that decide which model of cls.py and det.py is the best


@dataclass(frozen=True)
class PastRun:
    """A run folder. Raises `Refused` if it is none."""

    path: Path

    def __post_init__(self) -> None:
        known = ("config.yaml", "metrics.jsonl", "status.json", "log.txt")
        if not any((self.path / name).is_file() for name in known):
            raise Refused(f"{self.path}: is no run folder, it has none of {', '.join(known)}")

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def config(self) -> dict[str, Any]:
        try:
            content = read_yaml(self.path / "config.yaml", SMALL)
        except (OSError, ValueError, Refused):
            return {}
        return content if isinstance(content, dict) else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        return read_json(self.path / "environment.json")

    @cached_property
    def status(self) -> dict[str, Any]:
        return read_json(self.path / "status.json")

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Of summary.json; of a run that was killed before it was written, the same from its rows, as far as they say it."""
        return read_json(self.path / "summary.json") or self._summary_of_rows()

    @cached_property
    def results(self) -> dict[str, Any]:
        """The results of the best model, see `of_exported`; results of classes by name."""
        return of_exported(read_json(self.path / "best" / "results.json", MEDIUM))  # with a line for each class

    @cached_property
    def rows(self) -> list[dict]:
        return read_rows(self.path / "metrics.jsonl")

    @cached_property
    def leading(self) -> str:
        """The result that decides which model is the best, such as `top1`; "" before the first evaluation."""
        best = self.evaluation("best") or self.evaluation("last")
        if (said := metric_of(str(self.summary.get("leading")))) in best:
            return said
        return next((key for key in (*LEADING, *best) if key in best), "")

    @property
    def part(self) -> str:
        """What results of the exported weights begin with in `rows`: `eval/`, or `eval/ema_` with a moving average."""
        return "eval/ema_" if any(f"raw_{name}" in self.evaluation("last") for name in LEADING) else "eval/"

    def evaluation(self, which: str) -> dict[str, float | None]:
        """The results of the `best` or the `last` evaluation, numbers only, see `of_exported`."""
        found = self.summary.get(which)
        items = found.items() if isinstance(found, dict) else ()
        return of_exported({key: finite(value) for key, value in items if key.startswith("eval/")})

    def step_of(self, which: str) -> int:
        found = self.summary.get(which)
        return int(finite(found.get("step")) or 0) if isinstance(found, dict) else 0

    @cached_property
    def log(self) -> list[tuple[str, str]]:
        """The lines of the log, each with its time before it; of a very long one the last."""
        try:
            with open_regular(self.path / "log.txt") as file:
                file.seek(max(0, file.seek(0, 2) - MEDIUM))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        found = filter(None, map(_LINE.fullmatch, text.splitlines()))
        return [(match[1], match[2]) for match in found]

    @cached_property
    def starts(self) -> list[dict[str, str]]:
        """The start tables of the starts that came as far, oldest first."""
        starts: list[dict[str, str]] = []
        table: dict[str, str] = {}
        for _, line in self.log:
            row = _ROW.fullmatch(line)
            table = table | {row[1]: row[2]} if row else {}
            if row and row[1] == "run folder":  # the last row of a start table
                starts.append(table)
        return starts

    @cached_property
    def messages(self) -> list[str]:
        """The lines of the log that are neither a table's nor about the progress, with their times."""
        return [f"{time}  {line}" for time, line in self.log if not (_ROW.fullmatch(line) or _STEP.match(line))]

    @cached_property
    def fingerprint(self) -> str:
        """Of the data that the newest start names: training and validation part, joined by a dash; "" if none."""
        of_starts = (table.get("fingerprint", "").split(",")[0] for table in reversed(self.starts))
        return next(filter(None, of_starts), "")

    @property
    def repeat_command(self) -> str:
        """The command that makes the same run again in another folder, from its complete configuration."""
        typed, launch = (str(self.environment.get(key) or "") for key in ("command", "launch"))
        recipe = str(self.environment.get("recipe") or "recipes/cls.py")
        before = launch.removesuffix(typed) if typed and launch.endswith(typed) else "accelerate launch "
        return f"{before}{shlex.join([recipe, '--config', str(self.path / 'config.yaml'), '--name', f'{self.name}-again'])}"

    def _summary_of_rows(self) -> dict[str, Any]:
        last = self.rows[-1] if self.rows else {}
        summary = {key: last[key] for key in ("step", "epoch", "samples") if key in last}
        progress = Progress()
        for row in self.rows:
            results = {key: value for key, value in row.items() if key.startswith("eval/")}
            known = [f"eval/{part}{name}" for part in ("ema_", "") for name in LEADING]
            if leading := next((key for key in known if finite(results.get(key)) is not None), ""):
                progress.judge(row["step"], results, leading)
        return summary | {"best": progress.best, "last": progress.last}
