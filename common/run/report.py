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
from common.run.past_run import PastRun, get_text
from common.run.plots import finite
from common.run.progress import class_result_name, display_name, is_share

FILE = "report.html"
UNKNOWN = "-"  # in place of a number that is not known
_CAPTIONS = {
    "confusion": "confusion matrix of the last evaluation",
    "precision_recall": "precision and recall at IoU 0.5",
    "predictions": "predictions beside the truth",
    "mistakes": "most confident mistakes",
    "misses": "missed objects and false detections",
    "worst": "images with the fewest right pixels",
}
_MAX_MESSAGES = 300  # lines of the log
_MAX_PICTURE_BYTES = 2**27

# Of the page, see report.jinja: title, notes, facts, head and rows of a table, pictures, texts.
Section = dict[str, Any]


def write(folder: Path) -> Path:
    """Write report.html of a run folder; returns its path.

    Raises OSError, and `Refused` for another folder.
    """
    from jinja2 import Template

    run = PastRun(Path(folder))
    template = Template(Path(__file__).with_name("report.jinja").read_text(), autoescape=True)
    sections = [_build_section(name, build, run) for name, build in _SECTIONS.items()]
    text = template.render(name=run.name, parts=sections)
    replace_file(run.path / FILE, text.encode(errors="replace"))
    return run.path / FILE


def format_result(value: float | None, is_share: bool = True) -> str:
    """A result as text; in per cent if it is a share of 1."""
    if value is None:
        return UNKNOWN
    if isinstance(value, int):
        return f"{value:,}"
    if is_share and 0 <= value <= 1:
        return f"{100 * value:.2f} %"
    return f"{value:,.5g}"


def format_setting(value: object) -> str:
    """A value of a configuration or an environment as text, a list in one line."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return str(value)
    texts = [str(item) for item in value]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"{len(texts)} × {texts[0]}"
    return ", ".join(texts)


def format_duration(seconds: float | None) -> str:
    """Seconds as text, in seconds, minutes or hours."""
    if seconds is None:
        return UNKNOWN
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    if minutes < 100:
        return f"{minutes:.1f} min"
    return f"{minutes / 60:.1f} h"


def _build_section(name: str, build: Callable[[PastRun], Section], run: PastRun) -> Section:
    try:
        return build(run)
    except Exception as error:
        return {"notes": [f"{name}: could not be made: {type(error).__name__}: {error}"]}


def _build_head(run: PastRun) -> Section:
    status = get_text(run.status, "status", default="unknown")
    at_step = f" at step {run.status['step']}" if "step" in run.status else ""
    killed = " (or killed)" if status == "running" else ""
    facts: list[tuple[str, object]] = [
        ("status", f"{status}{at_step}{killed}"),
        ("cause", run.status.get("cause")),
        ("data", run.config.get("data")),
        ("model", run.config.get("model")),
    ]
    for which in ("best", "last"):
        value = run.evaluation(which).get(run.leading)
        if value is not None:
            title = f"{which} {display_name(run.leading)}, step {run.step_of(which):,}"
            facts.append((title, format_result(value, is_share(run.leading))))
    totals = {}
    for key, value in run.summary.items():
        total = finite(value)
        if total is not None:
            totals[key] = total
    step = totals.get("step")
    if step:
        epochs = totals.get("epoch", 0)
        seconds = format_duration(totals.get("train_seconds"))
        pace = totals.get("images_per_second", 0)
        length = f"{step:,.0f} steps, {epochs:.1f} epochs, {seconds}, {pace:,.0f} images/s"
        facts.append(("training", length))
    for key in ("broken_files", "broken_draws", "skipped_steps"):
        if totals.get(key):
            facts.append((key.replace("_", " "), totals[key]))
    return {"facts": facts}


def _build_curves(run: PastRun) -> Section:
    picture = run.path / "pictures" / "curves.png"
    metrics = run.path / "metrics.jsonl"
    if not picture.exists() or _is_older(picture, metrics):
        plots.curves(run.path)
    caption = "loss, leading result, learning rate"
    return {"title": "Curves", "pictures": [_embed_picture(picture, caption)]}


def _is_older(path: Path, source: Path) -> bool:
    """True if the file at `path` was written before `source`."""
    if not source.exists():
        return False
    return path.stat().st_mtime < source.stat().st_mtime


def _build_results(run: PastRun) -> Section:
    best = run.evaluation("best")
    last = run.evaluation("last")
    keys = [key for key in dict.fromkeys([*best, *last]) if "_class/" not in key]
    if not keys:
        return {}
    notes = []
    if run.summary.get("exported_weights") == "ema":
        notes.append(
            "Of the exported weights, the moving average (EMA), unless a row says otherwise."
        )
    rows = []
    for key in keys:
        figures = [format_result(results.get(key), is_share(key)) for results in (best, last)]
        rows.append((display_name(key), *figures))
    columns = [f"{which}, step {run.step_of(which):,}" for which in ("best", "last")]
    return {"title": "Results", "notes": notes, "head": ["", *columns], "rows": rows}


def _build_classes(run: PastRun) -> Section:
    columns = _collect_class_columns(run.results, class_result_name(run.results))
    if not columns:
        return {}
    notes = ["Of the best model, on the validation data; the lowest come first."]
    if "threshold" in columns:
        notes.append(
            "threshold: the score from which on the class is told from all others with the best F1."
        )
    leading = next(iter(columns.values()))

    def get_order(name: str) -> float:
        value = leading[name]
        return 2.0 if value is None else float(value)

    rows = []
    for name in sorted(leading, key=get_order):
        rows.append((name, *(format_result(values.get(name)) for values in columns.values())))
    head = ["class", *(column.replace("_", " ") for column in columns)]
    return {"title": "Classes", "notes": notes, "head": head, "rows": rows}


def _collect_class_columns(
    results: Mapping[str, Any], title: str
) -> dict[str, dict[str, float | None]]:
    """By title, a number of each class: the leading one, then the others."""
    leading = results.get("per_class", {})
    if not leading:
        return {}
    columns = {title: leading}
    for key, values in results.items():
        is_other = key not in ("per_class", "thresholds") and not key.startswith("raw_")
        if is_other and _is_per_class(values, leading):
            columns[key] = values
    same_as_leading = "recall" if title == "accuracy" else title.lower()
    # Of a segmenter, `classes` is their number.
    details = results["pixels"] if "pixels" in results else results.get("classes", {})
    for key in next(iter(details.values()), {}):
        if key != same_as_leading:
            columns[key] = {name: row[key] for name, row in details.items()}
    return columns


def _is_per_class(values: Any, leading: Mapping[str, Any]) -> bool:
    """True if `values` has a number of each class, or None."""
    if not isinstance(values, dict) or values.keys() != leading.keys():
        return False
    return all(value is None or finite(value) is not None for value in values.values())


def _build_pictures(run: PastRun) -> Section:
    paths = {path.stem: path for path in sorted((run.path / "pictures").glob("*.png"))}
    paths.pop("curves", None)
    if not paths:
        return {}
    # Those with a caption first, in its order.
    names = [name for name in _CAPTIONS if name in paths]
    names += [name for name in paths if name not in _CAPTIONS]
    pictures = []
    notes = []
    for name in names:
        caption = _CAPTIONS.get(name, name.replace("_", " "))
        try:
            pictures.append(_embed_picture(paths[name], caption))
        except OSError as error:
            notes.append(f"{paths[name].name}: can't be shown: {error}")
    return {"title": "Pictures", "notes": notes, "pictures": pictures}


def _build_messages(run: PastRun) -> Section:
    lines = run.messages[-_MAX_MESSAGES:]
    if not lines:
        return {}
    return {"title": "Messages of the log", "texts": ["\n".join(lines)]}


def _build_repeat(run: PastRun) -> Section:
    flags = [(f"--{key}", format_setting(value)) for key, value in run.config.items()]
    notes = [f"The recipe's own source is kept in {run.path / FOLDER}."]
    return {"title": "Repeat", "notes": notes, "texts": [run.repeat_command], "facts": flags}


def _build_environment(run: PastRun) -> Section:
    facts = {}
    for key, value in run.environment.items():
        if not isinstance(value, dict):
            facts[key] = format_setting(value)
    packages = run.environment.get("packages")
    if isinstance(packages, dict):
        facts |= packages
    return {"title": "Environment", "facts": facts.items()}


_SECTIONS = {
    "head": _build_head,
    "curves": _build_curves,
    "results": _build_results,
    "classes": _build_classes,
    "pictures": _build_pictures,
    "messages": _build_messages,
    "repeat": _build_repeat,
    "environment": _build_environment,
}


def _embed_picture(path: Path, caption: str) -> dict[str, str]:
    """The picture with its content as a URL. Raises OSError if it can't be read."""
    content = base64.b64encode(read_bytes(path, _MAX_PICTURE_BYTES)).decode()
    return {"source": f"data:image/png;base64,{content}", "caption": caption}
