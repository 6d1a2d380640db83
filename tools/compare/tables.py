"""Differences that are recorded in the folders of runs: configuration, source, data, results, cost
and classes.
"""

from collections.abc import Sequence
from typing import Any

from common.config.recipe_source import FOLDER, diff_sources
from common.errors import make_printable
from common.files import MEDIUM, read_text
from common.run import PastRun
from common.run.plots import finite
from common.run.progress import display_name, is_share
from common.run.report import format_duration, format_result, format_setting

OF_THE_FOLDER = ("name", "output_dir", "resume")  # flags that differ between any two runs
_WIDEST = 44  # letters of a cell

Row = tuple[str, list[str]]


def describe(runs: Sequence[PastRun]) -> list[str]:
    """Lines about all that the folders record."""
    names = [
        run.name if len({one.name for one in runs}) == len(runs) else str(run.path) for run in runs
    ]
    lines = ["configuration: what differs", *layout(names, configuration(runs), "nothing")]
    for run, name in zip(runs[1:], names[1:], strict=True):
        changed = source_difference(runs[0], run)
        what = "not recorded by both" if changed is None else "" if changed else "the same"
        lines += [
            "",
            f"recipe source, {names[0]} and {name}: {what}".rstrip(),
            *(f"  {line}" for line in changed or ()),
        ]
    lines += ["", "results of the best models", *layout(names, results(runs))]
    return [*lines, "", "cost", *layout(names, cost(runs))]


def layout(head: Sequence[str], rows: Sequence[Row], nothing: str = "") -> list[str]:
    """Lines of a table: a name and the value of each run; `nothing` instead if there are no rows."""
    if not rows:
        return [f"  {nothing}"]
    cells = [["", *head], *([name, *values] for name, values in rows)]
    cells = [[_short(make_printable(cell)) for cell in line] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def configuration(runs: Sequence[PastRun]) -> list[Row]:
    """The flags and fingerprints of the data that differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in OF_THE_FOLDER)
    rows = [
        (
            f"--{key}",
            [format_setting(run.config[key]) if key in run.config else "-" for run in runs],
        )
        for key in keys
    ]
    rows.append(("data, training-validation", [run.fingerprint or "-" for run in runs]))
    return [row for row in rows if len(set(row[1])) > 1]


def source_difference(first: PastRun, other: PastRun) -> list[str] | None:
    """Lines that differ in the recipes' source, without comments; None if one of the two has none."""
    sources = [_source(run) for run in (first, other)]
    return diff_sources(*sources) if all(sources) else None


def results(runs: Sequence[PastRun]) -> list[Row]:
    """The results of the best models, with their steps, and the leading result of the last evaluations."""
    best = [run.evaluation("best") for run in runs]
    every = [key for of_run in best for key in of_run if "_class/" not in key]
    # Of the exported weights first.
    keys = dict.fromkeys(sorted(every, key=lambda key: key.startswith("raw_")))
    rows = [("best at step", [f"{run.step_of('best'):,}" for run in runs])]
    rows += [
        (display_name(key), [format_result(of_run.get(key), is_share(key)) for of_run in best])
        for key in keys
    ]
    last = []
    for run in runs:
        value = format_result(run.evaluation("last").get(run.leading), is_share(run.leading))
        last.append(f"{value} (step {run.step_of('last'):,})")
    return [*rows, ("at the last evaluation", last)]


def cost(runs: Sequence[PastRun]) -> list[Row]:
    """Steps, images, time and devices."""
    keys = {
        "step": "steps",
        "samples": "images",
        "train_seconds": "",
        "images_per_second": "images/s",
    }
    rows = []
    for key, name in keys.items():
        values = [finite(run.summary.get(key)) for run in runs]
        shown = ["-" if value is None else f"{value:,.0f}" for value in values]
        rows.append(
            (name, shown)
            if name
            else ("training time", [format_duration(value) or "-" for value in values])
        )
    ranks = [run.environment.get("ranks") for run in runs]
    devices = [
        [str(rank).split(" on ")[0] for rank in of] if isinstance(of, list) else [] for of in ranks
    ]
    rows.append(("devices", [format_setting(of) or "-" for of in devices]))
    rows.append(
        ("precision", [format_setting(run.environment.get("precision")) or "-" for run in runs])
    )
    return [*rows, ("status", [format_setting(run.status.get("status")) or "-" for run in runs])]


def facts(run: PastRun) -> dict[str, Any]:
    """What comparison.json has of a run."""
    return {
        "path": str(run.path),
        "best": {"step": run.step_of("best"), **run.evaluation("best")},
        "last": {"step": run.step_of("last"), **run.evaluation("last")},
        "train_seconds": finite(run.summary.get("train_seconds")),
        "images_per_second": finite(run.summary.get("images_per_second")),
        "fingerprint": run.fingerprint,
    }


def _source(run: PastRun) -> dict[str, str]:
    known = run.environment.get("source")
    found = {}
    for name in known if isinstance(known, dict) else ():
        try:
            found[name] = read_text(run.path / FOLDER / name, MEDIUM)
        except (OSError, ValueError):
            return {}
    return found


def _short(cell: str) -> str:
    return cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 3]}..."
