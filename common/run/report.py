"""Report of a run: the page report.html in its folder, made of the folder's files alone.

It is one file with its pictures, and loads nothing. A part that fails says so on the page. The
template escapes all texts, so that names of classes and files can't become markup.
"""

import base64
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.config.recipe_source import FOLDER
from common.durable import replace_file
from common.files import read_bytes
from common.run import plots
from common.run.past_run import PastRun
from common.run.plots import finite
from common.run.progress import class_result_name, display_name, is_share

FILE = "report.html"
NOTHING = "-"  # in place of a number that there is not
_CAPTIONS = {
    "confusion": "confusion matrix of the last evaluation",
    "precision_recall": "precision and recall at IoU 0.5",
    "predictions": "objects and predictions",
    "mistakes": "most confident mistakes",
    "misses": "missed objects and false detections",
}
_MOST_MESSAGES = 300  # lines of the log
_MOST = 2**27  # bytes of a picture

# Of the page, see report.jinja: title, notes, facts, head and rows of a table, pictures, texts.
Part = dict[str, Any]


def write(folder: Path) -> Path:
    """Write report.html of a run folder; returns its path. Raises OSError, and `Refused` for
    another folder.
    """
    from jinja2 import Template

    run = PastRun(Path(folder))
    template = Template(Path(__file__).with_name("report.jinja").read_text(), autoescape=True)
    text = template.render(name=run.name, parts=[_made(part, run) for part in _PARTS])
    replace_file(run.path / FILE, text.encode(errors="replace"))
    return run.path / FILE


def in_words(value: float | None, share: bool = True) -> str:
    """A result; a `share` of 1 in per cent."""
    if value is None:
        return NOTHING
    if isinstance(value, int):
        return f"{value:,}"
    return f"{100 * value:.2f} %" if share and 0 <= value <= 1 else f"{value:,.5g}"


def listed(value: object) -> str:
    """A value of a configuration or an environment, lists in one line."""
    if isinstance(value, list):
        same = len(value) > 1 and len(set(map(str, value))) == 1
        return f"{len(value)} × {value[0]}" if same else ", ".join(map(str, value))
    return "" if value is None else str(value)


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours."""
    if seconds is None:
        return NOTHING
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 100 else f"{hours:.1f} h"


def _made(part: Callable[[PastRun], Part], run: PastRun) -> Part:
    try:
        return part(run)
    except Exception as error:
        return {
            "notes": [
                f"{part.__name__.strip('_')}: could not be made: {type(error).__name__}: {error}"
            ]
        }


def _head(run: PastRun) -> Part:
    said = str(run.status.get("status") or "unknown")
    said += f" at step {run.status.get('step')}" * ("step" in run.status) + " (or killed)" * (
        said == "running"
    )
    facts: list[tuple[str, object]] = [("status", said), ("cause", run.status.get("cause"))]
    facts += [(key, run.config.get(key)) for key in ("data", "model")]
    for which in ("best", "last"):
        value = run.evaluation(which).get(run.leading)
        if value is not None:
            figure = in_words(value, is_share(run.leading))
            facts.append(
                (f"{which} {display_name(run.leading)}, step {run.step_of(which):,}", figure)
            )
    of = {key: finite(value) for key, value in run.summary.items()}
    if of.get("step"):
        pace = (
            f"{duration(of.get('train_seconds'))}, {of.get('images_per_second') or 0:,.0f} images/s"
        )
        facts.append(
            ("training", f"{of['step']:,.0f} steps, {of.get('epoch') or 0:.1f} epochs, {pace}")
        )
    facts += [
        (key.replace("_", " "), of[key])
        for key in ("broken_files", "broken_draws", "skipped_steps")
        if of.get(key)
    ]
    return {"facts": facts}


def _curves(run: PastRun) -> Part:
    drawn, rows = run.path / "pictures" / "curves.png", run.path / "metrics.jsonl"
    if not drawn.exists() or (rows.exists() and drawn.stat().st_mtime < rows.stat().st_mtime):
        plots.curves(run.path)
    return {"title": "Curves", "pictures": [_picture(drawn, "loss, leading result, learning rate")]}


def _results(run: PastRun) -> Part:
    best, last = run.evaluation("best"), run.evaluation("last")
    keys = [key for key in dict.fromkeys((*best, *last)) if "_class/" not in key]
    note = "Of the exported weights, the moving average (EMA), unless a row says otherwise."
    if not keys:
        return {}
    return {
        "title": "Results",
        "notes": [note] * (run.summary.get("exported_weights") == "ema"),
        "head": ["", *(f"{which}, step {run.step_of(which):,}" for which in ("best", "last"))],
        "rows": [
            (display_name(key), *(in_words(of.get(key), is_share(key)) for of in (best, last)))
            for key in keys
        ],
    }


def _classes(run: PastRun) -> Part:
    title = class_result_name(run.results)
    columns = _class_columns(run.results, title)
    if not columns:
        return {}
    notes = ["Of the best model, on the validation data; the lowest come first."]
    if "threshold" in columns:
        notes.append(
            "threshold: the score from which on the class is told from all others with the best F1."
        )
    leading = next(iter(columns.values()))
    names = sorted(
        leading, key=lambda name: 2.0 if leading[name] is None else float(leading[name] or 0)
    )
    return {
        "title": "Classes",
        "notes": notes,
        "head": ["class", *(column.replace("_", " ") for column in columns)],
        "rows": [
            (name, *(in_words(values.get(name)) for values in columns.values())) for name in names
        ],
    }


def _class_columns(results: Mapping[str, Any], title: str) -> dict[str, dict[str, float | None]]:
    """By title, a number of each class: the leading one, then the others."""
    leading = results.get("per_class", {})
    columns = {title: leading}
    kept = [
        key
        for key in results
        if key not in ("per_class", "thresholds") and not key.startswith("raw_")
    ]
    columns |= {key: results[key] for key in kept if _is_of_classes(results[key], leading)}
    same_as_leading = "recall" if title == "accuracy" else title.lower()
    details = results.get("classes", {})
    names = [key for key in next(iter(details.values()), {}) if key != same_as_leading]
    columns |= {key: {name: row[key] for name, row in details.items()} for key in names}
    return columns if leading else {}


def _is_of_classes(values: Any, leading: Mapping[str, Any]) -> bool:
    """True if `values` has a number of each class, or None."""
    if not isinstance(values, dict) or values.keys() != leading.keys():
        return False
    return all(value is None or finite(value) is not None for value in values.values())


def _pictures(run: PastRun) -> Part:
    found = {
        path.stem: path
        for path in sorted((run.path / "pictures").glob("*.png"))
        if path.stem != "curves"
    }
    pictures, notes = [], []
    for name in sorted(found, key=lambda name: [*_CAPTIONS, name].index(name)):
        try:
            pictures.append(_picture(found[name], _CAPTIONS.get(name, name.replace("_", " "))))
        except OSError as error:
            notes.append(f"{found[name].name}: can't be shown: {error}")
    return {"title": "Pictures", "notes": notes, "pictures": pictures} if found else {}


def _messages(run: PastRun) -> Part:
    lines = run.messages[-_MOST_MESSAGES:]
    return {"title": "Messages of the log", "texts": ["\n".join(lines)]} if lines else {}


def _repeat(run: PastRun) -> Part:
    flags = [(f"--{key}", listed(value)) for key, value in run.config.items()]
    notes = [f"The recipe's own source is kept in {run.path / FOLDER}."]
    return {"title": "Repeat", "notes": notes, "texts": [run.repeat_command], "facts": flags}


def _environment(run: PastRun) -> Part:
    facts = {
        key: listed(value) for key, value in run.environment.items() if not isinstance(value, dict)
    }
    packages = run.environment.get("packages")
    facts |= packages if isinstance(packages, dict) else {}
    return {"title": "Environment", "facts": facts.items()}


_PARTS = (_head, _curves, _results, _classes, _pictures, _messages, _repeat, _environment)


def _picture(path: Path, caption: str) -> dict[str, str]:
    """The picture with its content as a URL. Raises OSError if it can't be read."""
    content = base64.b64encode(read_bytes(path, _MOST)).decode()
    return {"source": f"data:image/png;base64,{content}", "caption": caption}
