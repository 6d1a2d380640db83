"""What the folders of runs tell about their differences: configuration, source, data, results, cost and classes."""

from collections.abc import Sequence
from typing import Any

from common.config.recipe_source import FOLDER, difference
from common.errors import printable
from common.files import MEDIUM, read_text
from common.run import PastRun
from common.run.plots import finite
from common.run.progress import display_name, is_share
from common.run.report import duration, in_words, listed

OF_THE_FOLDER = ("name", "output_dir", "resume")  # flags that differ between any two runs
SHOWN_CLASSES = 10
_WIDEST = 44  # letters of a cell

Row = tuple[str, list[str]]


def layout(head: Sequence[str], rows: Sequence[Row], nothing: str = "") -> list[str]:
    """Lines of a table: a name and the value of each run; `nothing` instead if there are no rows."""
    if not rows:
        return [f"  {nothing}"]
    cells = [["", *head], *([name, *values] for name, values in rows)]
    cells = [[_short(printable(cell)) for cell in line] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]


def configuration(runs: Sequence[PastRun]) -> list[Row]:
    """The flags that differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in OF_THE_FOLDER)
    rows = [(f"--{key}", [listed(run.config[key]) if key in run.config else "-" for run in runs]) for key in keys]
    return [row for row in rows if len(set(row[1])) > 1]


def source_difference(first: PastRun, other: PastRun) -> list[str] | None:
    """Lines that differ in the recipes' source, without comments; None if one of the two has none."""
    sources = [_source(run) for run in (first, other)]
    return difference(*sources) if all(sources) else None


def results(runs: Sequence[PastRun]) -> list[Row]:
    """The results of the best models, with their steps, and the leading result of the last evaluations."""
    best = [run.evaluation("best") for run in runs]
    every = [key for of_run in best for key in of_run if "AP_class/" not in key]
    keys = dict.fromkeys(sorted(every, key=lambda key: key.startswith("raw_")))  # of the exported weights first
    rows = [("best at step", [f"{run.step_of('best'):,}" for run in runs])]
    rows += [(display_name(key), [in_words(of_run.get(key), is_share(key)) for of_run in best]) for key in keys]
    last = []
    for run in runs:
        value = in_words(run.evaluation("last").get(run.leading), is_share(run.leading))
        last.append(f"{value} (step {run.step_of('last'):,})")
    return [*rows, ("at the last evaluation", last)]


def cost(runs: Sequence[PastRun]) -> list[Row]:
    """Steps, images, time and devices."""
    of_runs = [_cost(run) for run in runs]
    return [(name, [cost[name] or "-" for cost in of_runs]) for name in of_runs[0]]


def _cost(run: PastRun) -> dict[str, str]:
    keys = ("step", "samples", "train_seconds", "images_per_second")
    numbers = {key: finite(run.summary.get(key)) for key in keys}
    shown = {key: "" if value is None else f"{value:,.0f}" for key, value in numbers.items()}
    seconds, world = numbers["train_seconds"], finite(run.environment.get("world_size"))
    ranks = run.environment.get("ranks")
    devices = [str(rank).split(" on ")[0] for rank in ranks] if isinstance(ranks, list) else []
    return {
        "steps": shown["step"],
        "images": shown["samples"],
        "training time": duration(seconds),
        "time of all devices": duration(seconds * world if seconds and world else None),
        "images/s": shown["images_per_second"],
        "devices": listed(devices),
        "precision": listed(run.environment.get("precision")),
        "starts": str(len(run.starts) or ""),
        "status": listed(run.status.get("status")),
    }


def classes(runs: Sequence[PastRun]) -> list[Row]:
    """The classes whose recorded result differs most between the best models, with the change if there are two runs."""
    of_runs = [values for run in runs if isinstance(values := run.results.get("per_class"), dict)]
    if len(of_runs) < len(runs):
        return []
    shared: dict[str, list[float]] = {}
    for name in of_runs[0]:
        known = [value for values in of_runs if (value := finite(values.get(name))) is not None]
        if len(known) == len(runs):
            shared[name] = known
    spread = {name: max(values) - min(values) for name, values in shared.items()}
    most = sorted((name for name in spread if spread[name] > 0), key=lambda name: -spread[name])[:SHOWN_CLASSES]
    changes = [[points(shared[name][1] - shared[name][0])] if len(runs) == 2 else [] for name in most]
    return [(name, [*map(in_words, shared[name]), *change]) for name, change in zip(most, changes, strict=True)]


def points(change: float) -> str:
    """A change of a share: +1.39 points."""
    return f"{100 * change:+.2f} points"


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
