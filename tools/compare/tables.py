"""Differences that the folders of runs record: configuration, source, data, results and cost."""

from collections.abc import Sequence
from typing import Any

from common.config.recipe_source import FOLDER, diff_sources
from common.errors import make_printable
from common.files import MEDIUM, read_text
from common.run import PastRun
from common.run.plots import finite
from common.run.progress import display_name, is_share
from common.run.report import format_duration, format_result, format_setting

RUN_FLAGS = ("name", "output_dir", "resume")  # flags that differ between any two runs
_MAX_WIDTH = 44  # letters of a cell
# Names of rows, by keys of summary.json.
_COSTS = {
    "step": "steps",
    "samples": "images",
    "train_seconds": "training time",
    "images_per_second": "images/s",
}

Row = tuple[str, list[str]]


def describe_runs(runs: Sequence[PastRun]) -> list[str]:
    """Lines about all that the folders record."""
    names = [run.name for run in runs]
    if len(set(names)) < len(runs):
        names = [str(run.path) for run in runs]
    settings = list_settings(runs)
    lines = ["configuration: what differs"]
    lines += format_table(names, settings) if settings else ["  nothing"]
    for run, name in zip(runs[1:], names[1:], strict=True):
        changed_lines = compare_sources(runs[0], run)
        title = f"recipe source, {names[0]} and {name}:"
        if changed_lines is None:
            title += " not recorded by both"
        elif not changed_lines:
            title += " the same"
        lines += ["", title]
        lines += [f"  {line}" for line in changed_lines or ()]
    lines += ["", "results of the best models"]
    lines += format_table(names, list_results(runs))
    lines += ["", "cost"]
    lines += format_table(names, list_costs(runs))
    return lines


def format_table(head: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Format a table: lines of a name and the value of each run."""
    table = [["", *head]]
    for name, values in rows:
        table.append([name, *values])
    widths = [0] * len(table[0])
    for cells in table:
        for i, cell in enumerate(cells):
            cells[i] = _shorten(make_printable(cell))
            widths[i] = max(widths[i], len(cells[i]))
    lines = []
    for cells in table:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append(("  " + "  ".join(padded)).rstrip())
    return lines


def list_settings(runs: Sequence[PastRun]) -> list[Row]:
    """The flags and fingerprints of the data that differ."""
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run.config)
    rows = []
    for key in keys:
        if key not in RUN_FLAGS:
            values = []
            for run in runs:
                values.append(format_setting(run.config[key]) if key in run.config else "-")
            rows.append((f"--{key}", values))
    rows.append(("data, training-validation", [run.fingerprint or "-" for run in runs]))
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def compare_sources(first: PastRun, second: PastRun) -> list[str] | None:
    """Lines that differ in the recipes' source, without comments; None if one of the two has none."""
    first_source = _read_source(first)
    second_source = _read_source(second)
    if not first_source or not second_source:
        return None
    return diff_sources(first_source, second_source)


def list_results(runs: Sequence[PastRun]) -> list[Row]:
    """The results of the best models, with their steps, and the leading result of the last evaluations."""
    evaluations = [run.evaluation("best") for run in runs]
    keys: dict[str, None] = {}
    for evaluation in evaluations:
        keys |= dict.fromkeys(evaluation)
    rows = [("best at step", [f"{run.step_of('best'):,}" for run in runs])]
    # Results of the exported weights come first.
    for key in sorted(keys, key=lambda key: key.startswith("raw_")):
        if "_class/" not in key:
            values = [format_result(results.get(key), is_share(key)) for results in evaluations]
            rows.append((display_name(key), values))
    last = []
    for run in runs:
        value = format_result(run.evaluation("last").get(run.leading), is_share(run.leading))
        last.append(f"{value} (step {run.step_of('last'):,})")
    rows.append(("at the last evaluation", last))
    return rows


def list_costs(runs: Sequence[PastRun]) -> list[Row]:
    """Steps, images, time and devices."""
    rows = []
    for key, name in _COSTS.items():
        values = [finite(run.summary.get(key)) for run in runs]
        if key == "train_seconds":
            rows.append((name, [format_duration(value) or "-" for value in values]))
        else:
            rows.append((name, ["-" if value is None else f"{value:,.0f}" for value in values]))
    settings: dict[str, list] = {
        "devices": [_list_devices(run) for run in runs],
        "precision": [run.environment.get("precision") for run in runs],
        "status": [run.status.get("status") for run in runs],
    }
    for name, cells in settings.items():
        rows.append((name, [format_setting(cell) or "-" for cell in cells]))
    return rows


def collect_facts(run: PastRun) -> dict[str, Any]:
    """Collect what comparison.json has of a run."""
    return {
        "path": str(run.path),
        "best": {"step": run.step_of("best"), **run.evaluation("best")},
        "last": {"step": run.step_of("last"), **run.evaluation("last")},
        "train_seconds": finite(run.summary.get("train_seconds")),
        "images_per_second": finite(run.summary.get("images_per_second")),
        "fingerprint": run.fingerprint,
    }


def _list_devices(run: PastRun) -> list[str]:
    ranks = run.environment.get("ranks")
    if not isinstance(ranks, list):
        return []
    return [str(rank).split(" on ")[0] for rank in ranks]


def _read_source(run: PastRun) -> dict[str, str]:
    names = run.environment.get("source")
    if not isinstance(names, dict):
        return {}
    source = {}
    for name in names:
        try:
            source[name] = read_text(run.path / FOLDER / name, MEDIUM)
        except (OSError, ValueError):
            return {}
    return source


def _shorten(cell: str) -> str:
    return cell if len(cell) <= _MAX_WIDTH else f"{cell[: _MAX_WIDTH - 3]}..."
