"""Report of a run: the page report.html in its folder, made of the folder's files alone.

It is one file: pictures are in it, and it loads nothing. It is made when a start of the run ends, and again by
`write`. What can't be read is left out, and a part that fails says so on the page.
"""

import re
import statistics
from collections.abc import Callable
from pathlib import Path

from common.config.recipe_source import FOLDER
from common.durable import replace_file
from common.run import plots
from common.run.page import Html, duration, element, facts, in_words, join, listed, page, picture, section, table
from common.run.past_run import PastRun
from common.run.plots import finite
from common.run.progress import display_name, is_share

FILE = "report.html"
_CAPTIONS = {
    "confusion": "confusion matrix of the last evaluation",
    "precision_recall": "precision and recall at IoU 0.5",
    "predictions": "objects and predictions",
    "mistakes": "most confident mistakes",
    "misses": "missed objects and false detections",
}
_MOST_CLASSES = 1_000  # rows of the table of classes; of more, those with the lowest value
_MOST_MESSAGES = 200  # lines of the log


def write(folder: Path, draw: bool = True) -> Path:
    """Write report.html of a run folder, in one step; returns its path. With `draw`, its curves are drawn first.

    Raises OSError, and `Refused` for another folder.
    """
    run = PastRun(Path(folder))
    parts = [_head, _drawn_curves if draw else _curves, *_PARTS]
    replace_file(run.path / FILE, page(run.name, *(_part(part, run) for part in parts)).encode(errors="replace"))
    return run.path / FILE


def leave(folder: Path, say: Callable[[str], None]) -> Path | None:
    """`write` of a run that has drawn its curves. A failure is logged with `say`: a page is not worth a run."""
    try:
        return write(folder, draw=False)
    except Exception as error:
        say(f"{folder / FILE} could not be written: {type(error).__name__}: {error}")
        return None


def _part(part: Callable[[PastRun], Html], run: PastRun) -> Html:
    try:
        return part(run)
    except Exception as error:
        return element(
            "p", f"{part.__name__.strip('_')}: could not be made: {type(error).__name__}: {error}", kind="soft"
        )


def _head(run: PastRun) -> Html:
    status, cause = (str(run.status.get(key) or "") for key in ("status", "cause"))
    known = status if status in ("finished", "resumable", "failed", "running") else "unknown"
    said = f"{status or 'unknown'} at step {run.status['step']}" if "step" in run.status else status or "unknown"
    said += " (or killed)" * (status == "running")
    table = run.starts[-1] if run.starts else {}
    lines = [table.get("data", run.config.get("data", "")), table.get("model", run.config.get("model", ""))]
    head = [element("h1", run.name), element("span", said, kind=f"status {known}")]
    if cause:
        head.append(element("p", cause))
    head.append(element("p", " · ".join(filter(None, map(str, lines))), kind="soft"))
    tiles = []
    for which in ("best", "last"):
        value = run.evaluation(which).get(run.leading)
        if value is not None:
            figure = in_words(value, is_share(run.leading))
            tiles.append((figure, f"{which} {display_name(run.leading)}, step {run.step_of(which):,}"))
    seconds, pace = (finite(run.summary.get(key)) for key in ("train_seconds", "images_per_second"))
    step, epoch = finite(run.summary.get("step")), finite(run.summary.get("epoch"))
    if step is not None:
        tiles.append((f"{step:,.0f}", f"steps, {epoch or 0:.1f} epochs"))
    if seconds:
        tiles.append((duration(seconds), "of training"))
    if pace:
        tiles.append((f"{pace:,.0f}", "images/s, mean"))
    devices = run.environment.get("ranks")
    if isinstance(devices, list) and devices:
        tiles.append(
            (f"{len(devices)} × {str(devices[0]).split(' on ')[0]}", str(run.environment.get("precision", "")))
        )
    drawn = [element("div", element("b", value), element("span", name), kind="tile") for value, name in tiles]
    return join([element("header", *head), element("div", *drawn, kind="tiles")])


def _drawn_curves(run: PastRun) -> Html:
    if run.rows:
        leading = f"{run.part}{run.leading}" if run.leading else ""
        plots.curves(run.path, leading, run.step_of("best"))
    return _curves(run)


def _curves(run: PastRun) -> Html:
    drawn = run.path / "pictures" / "curves.png"
    if not drawn.exists():
        return section("Curves", "None yet.")
    return section("Curves", picture(drawn, "loss, leading result, learning rate"))


def _results(run: PastRun) -> Html:
    best, last = run.evaluation("best"), run.evaluation("last")
    keys = [key for key in dict.fromkeys((*best, *last)) if "AP_class/" not in key]
    rows = [(display_name(key), *(in_words(side.get(key), is_share(key)) for side in (best, last))) for key in keys]
    if not rows:
        return Html("")
    head = ["", *(f"{which}, step {run.step_of(which):,}" for which in ("best", "last"))]
    note = element("p", "Of the exported weights, the moving average (EMA), unless a row says otherwise.", kind="soft")
    return section("Results", note if run.part != "eval/" else "", table(head, rows))


def _pictures(run: PastRun) -> Html:
    found = {path.stem: path for path in sorted((run.path / "pictures").glob("*.png")) if path.stem != "curves"}
    figures = []
    for name in (*(name for name in _CAPTIONS if name in found), *(name for name in found if name not in _CAPTIONS)):
        caption = _CAPTIONS.get(name, name.replace("_", " "))
        try:
            figures.append(picture(found[name], caption))
        except (OSError, ValueError) as error:
            figures.append(element("p", f"{found[name].name}: can't be shown: {error}", kind="soft"))
    return section("Pictures", element("div", *figures, kind="pictures")) if figures else Html("")


def _classes(run: PastRun) -> Html:
    columns = {
        key: values
        for key, values in run.results.items()
        if isinstance(values, dict)
        and values
        and not key.startswith("raw_")
        and all(v is None or finite(v) is not None for v in values.values())
    }
    if not columns:
        return Html("")
    first = columns.get("per_class") or next(iter(columns.values()))
    names = sorted(first, key=lambda name: first[name] if first[name] is not None else 2)[:_MOST_CLASSES]
    titles = (
        ["AP" if "AP" in run.results else "F1" if "f1" in run.results else "accuracy"] if "per_class" in columns else []
    )
    titles += [key.replace("_", " ") for key in columns if key != "per_class"]
    ordered = sorted(columns, key=lambda key: key != "per_class")
    rows = [(name, *(columns[key].get(name) for key in ordered)) for name in names]
    left_out = f"The {len(names):,} lowest of {len(first):,} classes." if len(first) > len(names) else ""
    note = f"Of the best model, on the validation data; the lowest come first. {left_out}"
    return section("Classes", element("p", note, kind="soft"), table(["class", *titles], rows))


def _start_table(run: PastRun) -> Html:
    return section("Start table", facts(run.starts[-1].items())) if run.starts else Html("")


def _timings(run: PastRun) -> Html:
    seconds, step = finite(run.summary.get("train_seconds")), finite(run.summary.get("step"))
    rows = []
    if seconds and step:
        rows.append(("training", f"{duration(seconds)}, {1000 * seconds / step:,.1f} ms per step"))
    for name, key, unit in (("images/s", "perf/images_per_second", ""), ("waiting for data", "perf/data_wait", "%")):
        if values := _values(run, key):
            low, middle, high = min(values), statistics.median(values), max(values)
            shown = [f"{100 * v:.1f} %" if unit else f"{v:,.0f}" for v in (middle, low, high)]
            rows.append((name, f"median {shown[0]}, from {shown[1]} to {shown[2]} between rows"))
    if memory := _values(run, "perf/gpu_memory_gb"):
        rows.append(("GPU memory", f"{max(memory):.1f} GiB at most, main process"))
    return section("Timings", facts(rows)) if rows else Html("")


def _faults(run: PastRun) -> Html:
    broken, skipped = (int(finite(run.summary.get(key)) or 0) for key in ("broken_draws", "skipped_steps"))
    resumed = sum(line.startswith("resuming from step ") for _, line in run.log)
    names = listed(run.summary.get("broken_files")) or "unknown"
    rows = [
        ("starts", f"{len(run.starts)}, of which {resumed} resumed from a checkpoint"),
        ("broken images", f"{names} in training, drawn {broken:,} times"),
        ("skipped steps", f"{skipped:,}, after an overflow in fp16"),
    ]
    parts: list[object] = [facts(rows)]
    if run.messages:
        left_out = f", the last {_MOST_MESSAGES}" * (len(run.messages) > _MOST_MESSAGES)
        parts.append(element("h3", f"Messages of the log{left_out}"))
        parts.append(element("pre", "\n".join(run.messages[-_MOST_MESSAGES:])))
    return section("Faults and restarts", *parts)


def _environment(run: PastRun) -> Html:
    packages = run.environment.get("packages")
    rows = [
        (key, listed(value)) for key, value in run.environment.items() if key not in ("packages", "source", "ranks")
    ]
    rows += [("devices", listed(run.environment.get("ranks")))]
    rows += list(packages.items()) if isinstance(packages, dict) else []
    return section("Environment", facts((name, "" if value is None else value) for name, value in rows))


def _repeat(run: PastRun) -> Html:
    commit = str(run.environment.get("commit") or "")
    known = re.fullmatch(r"([0-9a-f]{7,40})(\+changes)?", commit)
    lines = ([f"git checkout {known[1]}"] if known else []) + [run.repeat_command]
    notes = [f"The recipe's own source is kept in {run.path / FOLDER}."]
    if known and known[2]:
        notes.insert(0, "The recipe was changed after this commit, or files beside it were.")
    config = table(["flag", "value"], [(f"--{key}", listed(value)) for key, value in run.config.items()])
    whole = element("details", element("summary", f"Complete configuration: {len(run.config)} flags"), config)
    parts = [element("pre", "\n".join(lines)), *(element("p", note, kind="soft") for note in notes)]
    if launch := run.environment.get("launch") or run.environment.get("command"):
        parts += [element("p", "As it was typed for the newest start:"), element("pre", launch)]
    return section("Repeat", *parts, whole if run.config else "")


_PARTS = (_results, _classes, _pictures, _start_table, _timings, _faults, _repeat, _environment)


def _values(run: PastRun, key: str) -> list[float]:
    return [value for row in run.rows if (value := finite(row.get(key))) is not None]
