"""Plots of a run as PNG files: curves and the confusion matrix, and helpers for the plots of each task.

They use Matplotlib's objects instead of `pyplot`, so they need no display. A file is replaced in one step.
"""

import io
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from common.durable import make_folder, replace_file
from common.run.folder import read_json, read_rows
from common.run.progress import display_name, get_shown_metrics, is_share, metric_of

if TYPE_CHECKING:  # importing Matplotlib takes 0.4 s; it is done for the first plot
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor


# Okabe and Ito, "Color Universal Design" (2008): distinguishable with any kind of colour vision.
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
INK = "#222222"
GREY = "#707070"
PALE = "#E4E4E4"
NUMBERED_CLASSES = 20  # up to so many classes, cells of the confusion matrix show their counts
NAMED_CLASSES = 50  # up to so many classes, its rows and columns have names
# Fonts with Chinese, Japanese and Korean letters. The first that is installed is used.
WIDE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Arial Unicode MS")
_OF_EMA = " of the averaged weights (EMA)"
MAX_SHEET_BYTES = 500_000  # of 24 photographs, which would take several MB
SMOOTHED_POINTS = 300  # a longer line is drawn pale, under its mean over windows


def curves(folder: Path, path: Path | None = None) -> None:
    """Draw the curves of a run folder: the loss and its parts, the leading metric and the learning rate.

    summary.json says which metric leads and which step `best/` is of. Missing keys and values that
    are not finite are skipped. `path` is that of the PNG file (default: `pictures/curves.png` in
    the folder).
    """
    from matplotlib.ticker import MaxNLocator

    rows = read_rows(folder / "metrics.jsonl")
    summary = read_json(folder / "summary.json")
    leading = _find_leading(rows, summary)
    metric = metric_of(leading)
    figure = new_figure(7.5, 7.5)
    loss, quality, rate = figure.subplots(3, sharex=True, height_ratios=(3, 3, 1.4))
    _draw_losses(loss, rows)
    _draw_results(quality, rows, metric)
    _draw_line(rate, rows, "train/lr", "", INK)
    best = _find_best(rows, summary, leading)
    headline = folder.resolve().name
    if best:
        _mark_best(best, loss, quality)
        headline += f": best/ is of step {best.step:,}, {display_name(leading)} {best.text}"
    title(figure.suptitle, headline)
    _label_axes(loss, "loss")
    _label_axes(
        quality, f"{display_name(metric)} (%)" if is_share(metric) else display_name(metric)
    )
    _label_axes(rate, "learning rate")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("step")
    rate.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels()
    if path is None:
        path = folder / "pictures" / "curves.png"
    save(figure, path)


class _Best(NamedTuple):
    """The leading result of the best evaluation."""

    step: int
    height: float  # in its axes
    text: str


def _find_leading(rows: list[dict], summary: dict) -> str:
    """The result that leads: as the summary says, or else the first that is a share."""
    if summary.get("leading"):
        return str(summary["leading"])
    for row in rows:
        for key in row:
            if key.startswith("eval/") and is_share(key):
                return key
    return "eval/evaluation"


def _find_best(rows: list[dict], summary: dict, leading: str) -> _Best | None:
    """The evaluation that summary.json calls the best, if the rows have it."""
    recorded = summary.get("best")
    step = recorded.get("step") if isinstance(recorded, dict) else None
    for row in rows:
        if row["step"] == step and leading in row:
            value = finite(row[leading])
            if value is None:
                return None
            if is_share(leading):
                return _Best(row["step"], 100 * value, f"{100 * value:.2f} %")
            return _Best(row["step"], value, f"{value:.4g}")
    return None


def _mark_best(best: _Best, loss: "Axes", quality: "Axes") -> None:
    for axes in (loss, quality):
        axes.axvline(best.step, color=GREY, linewidth=0.9, linestyle=":", zorder=0)
    label = f"best/ (step {best.step:,})"
    quality.plot(
        best.step, best.height, "o", color=INK, fillstyle="none", markersize=9, label=label
    )


def _draw_losses(axes: "Axes", rows: list[dict]) -> None:
    """Draw the losses of training and of evaluations, and the parts `train/loss_NAME` of training's."""
    _draw_line(axes, rows, "train/loss", "training", BLUE)
    _draw_line(axes, rows, "eval/loss", "evaluation", ORANGE)
    _draw_line(axes, rows, "eval/ema_loss", f"evaluation{_OF_EMA}", GREEN)
    keys: dict[str, None] = {}
    for row in rows:
        keys |= dict.fromkeys(row)
    parts = [key for key in keys if re.fullmatch("train/loss_(?!scale$).*", key)]
    for i, key in enumerate(parts):
        _draw_line(axes, rows, key, key.removeprefix("train/loss_"), f"C{i}", style=":")


def _draw_results(axes: "Axes", rows: list[dict], leading: str) -> None:
    """Draw the leading result, and with dashes the other that is shown beside it."""
    scale = 100 if is_share(leading) else 1
    for prefix, suffix, colour in (("eval/", "", ORANGE), ("eval/ema_", _OF_EMA, GREEN)):
        for metric in get_shown_metrics(leading):
            label = f"{display_name(metric)}{suffix}"
            style = "-" if metric == leading else "--"
            _draw_line(axes, rows, f"{prefix}{metric}", label, colour, scale=scale, style=style)


def _label_axes(axes: "Axes", label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(color=PALE, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.lines:
        axes.text(
            0.5, 0.5, "nothing yet", color=GREY, ha="center", va="center", transform=axes.transAxes
        )
    elif axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def confusion(matrix: Any, class_names: Sequence[str], path: Path, headline: str = "") -> None:
    """Draw a confusion matrix, int[classes, classes] with true classes as rows.

    The colour is the share of the row. One more row and column than names stands for the
    background: detections of nothing, and objects that were not found. `headline` replaces the
    accuracy in the title.
    """
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    counts = np.asarray(matrix)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1) * 100
    has_counts = len(class_names) <= NUMBERED_CLASSES
    has_names = len(class_names) <= NAMED_CLASSES
    num_classes = len(counts)
    class_names = [*class_names, "background"][:num_classes]
    side = min(max(4.6, 2.2 + 0.42 * num_classes), 9.5)
    figure = new_figure(side + 1.1, side + 0.6)
    axes = figure.subplots()
    colours = LinearSegmentedColormap.from_list(
        "paper to blue", ["white", "#9CC9E3", BLUE, "#00304F"]
    )
    # With many classes, errors are spread thinly; a square root makes them visible.
    picture = axes.imshow(shares, cmap=colours, norm=PowerNorm(1 if has_counts else 0.5, 0, 100))
    bar = figure.colorbar(
        picture, ax=axes, shrink=0.7, aspect=30, pad=0.02, label="share of the true class (%)"
    )
    bar.outline.set_visible(False)
    axes.set(xlabel="predicted", ylabel="true")
    axes.spines[:].set_color(PALE)
    if has_names:
        names = [shorten_name(name, 18) for name in class_names]
        style: dict = {"fontsize": 10 if has_counts else 7, "parse_math": False}
        is_upright = max(map(len, names)) <= 30 // num_classes + 1
        axes.set_xticks(range(num_classes), names, rotation=0 if is_upright else 90, **style)
        axes.set_yticks(range(num_classes), names, **style)
        axes.tick_params(length=0)
    if has_counts:
        _write_counts(axes, counts, shares)
    else:
        text = _list_most_confused(counts, class_names)
        figure.text(0.5, -0.01, text, va="top", ha="center", fontsize=9, parse_math=False)
    title(axes.set_title, f"{describe_plot(path)}: {headline or _describe_accuracy(counts)}")
    save(figure, path)


def _write_counts(axes: "Axes", counts: np.ndarray, shares: np.ndarray) -> None:
    from matplotlib.ticker import EngFormatter

    shorten_count = EngFormatter(places=1, sep="")  # 3.7M pixels
    size = 9 if len(counts) <= 12 else 7
    style: dict = {"ha": "center", "va": "center", "fontsize": size}
    for row, column in np.argwhere(counts > 0):
        colour = "white" if shares[row, column] > 55 else INK
        count = counts[row, column]
        text = f"{count:,}" if count < 100_000 else shorten_count(count)
        axes.text(column, row, text, color=colour, **style)


def _describe_accuracy(counts: np.ndarray) -> str:
    num_right = np.trace(counts)
    num_images = counts.sum()
    text = f"{num_right:,} of {num_images:,} right"
    if num_images:
        text += f" ({100 * num_right / num_images:.2f} %)"
    return text


def attempt(path: Path, say: Callable[[str], None], function: Callable, *arguments) -> bool:
    """Draw `path` by `function(*arguments, path)`.

    Returns False if that failed, which is logged: a picture is not worth a run.
    """
    try:
        function(*arguments, path)
    except Exception as error:
        say(f"{path} could not be drawn: {type(error).__name__}: {error}")
        return False
    return True


def draw_evaluation(evaluation: Any, pictures: Any, say: Callable[[str], None]) -> None:
    """Draw what a recipe's `evaluate` has returned, if it has pictures; a failure is logged.

    `pictures.draw(name, function, *arguments)` draws one of them.
    """
    if not hasattr(evaluation, "draw"):
        return
    try:
        evaluation.draw(pictures)
    except Exception as error:
        say(f"the pictures of the evaluation could not be drawn: {type(error).__name__}: {error}")


def get_run_name(path: Path) -> str:
    """The run's name, from the path of a plot: `runs/<name>/pictures/...`."""
    return Path(path).resolve().parent.parent.name


def describe_plot(path: Path) -> str:
    """What a plot of an evaluation shows, from its path: "NAME, last evaluation" in the run folder NAME.

    In a report of `--eval_only`, `NAME/evaluation/best-test/` or its draft, it is "NAME, best-test".
    """
    folder = Path(path).resolve().parent.parent
    if folder.parent.name == "evaluation":
        return f"{folder.parent.parent.name}, {folder.name.removeprefix('.').removesuffix('.new')}"
    return f"{get_run_name(path)}, last evaluation"


def measure_breadth(text: str) -> float:
    """Width of a text in average Latin letters.

    Chinese, Japanese and Korean letters are nearly twice as wide.
    """
    num_wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + 0.75 * num_wide


class Cell(NamedTuple):
    """One image of a sheet."""

    pixels: np.ndarray  # uint8[H, W, 3]
    caption: str  # above it, one to three lines
    footnote: str  # the name of the image, below it
    # Left, top, right, bottom in pixels; a text; colour.
    boxes: Sequence[tuple[Sequence[float], str, str]] = ()


def draw_cells(cells: Sequence[Cell], headline: str, path: Path) -> None:
    """Draw images in rows of six, each in a square of the same size."""
    num_columns = min(6, max(len(cells), 3))
    num_rows = max(1, math.ceil(len(cells) / num_columns))
    figure = new_figure(1.75 * num_columns, 2.3 * num_rows + 0.5)
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, cell in zip(grid, cells, strict=False):
        _draw_cell(axes, cell)
    title(figure.suptitle, headline)
    save(figure, path, MAX_SHEET_BYTES)


def _draw_cell(axes: "Axes", cell: Cell) -> None:
    height, width = cell.pixels.shape[:2]
    stride = 1 + max(height, width) // 512
    half_side = max(height, width) / 2
    center_x = (width - 1) / 2
    center_y = (height - 1) / 2
    axes.imshow(
        cell.pixels[::stride, ::stride],
        cmap="gray",
        interpolation="nearest" if half_side < 50 else "antialiased",
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )
    # Squares: captions line up.
    axes.set(
        xlim=(center_x - half_side, center_x + half_side),
        ylim=(center_y + half_side, center_y - half_side),
    )
    boxes = [(corners, shorten_name(text, 14), colour) for corners, text, colour in cell.boxes]
    mark(axes, boxes, 5.5)
    axes.set_title(cell.caption, fontsize=9, color=INK, parse_math=False)
    name = shorten_name(cell.footnote, 32, path=True)
    below: dict = {"ha": "center", "va": "top", "transform": axes.transAxes}
    axes.text(0.5, -0.02, name, fontsize=6, color=GREY, parse_math=False, **below)


def mark(axes: "Axes", boxes: Iterable[tuple[Sequence[float], str, str]], size: float) -> None:
    """Draw boxes as `Cell` has them, with their texts in letters of `size` points."""
    from matplotlib.patches import Rectangle

    low, high = axes.get_ylim()
    for (left, top, right, bottom), text, colour in boxes:
        frame = Rectangle(
            (left - 0.5, top - 0.5),
            width=right - left,
            height=bottom - top,
            fill=False,
            edgecolor=colour,
            linewidth=size / 4.5,
        )
        axes.add_patch(frame)
        ground = {"facecolor": colour, "edgecolor": "none", "boxstyle": "square,pad=0.15"}
        # Inside its box at the upper edge.
        above = "bottom" if top - high > 0.07 * (low - high) else "top"
        axes.text(
            left,
            top,
            text,
            size=size,
            color="white",
            va=above,
            bbox=ground,
            clip_on=True,
            parse_math=False,
        )


def first_batch(
    parts: Iterable[tuple["Tensor", Sequence]], size: int, normalization: Mapping, path: Path
) -> None:
    """Draw samples of the first global batch of `size` as the model gets them, with labels, boxes or masks.

    `parts` are of images [B, 3, H, W] and their `TrainDataset.describe_images`; for `normalization` see
    `to_pixels`. The title has the mean and the spread of the model's input, which are around 0 and
    1 if it is normalised.
    """
    cells = []
    values = []
    for images, descriptions in parts:
        values.append(images.cpu().numpy().ravel())
        pixels = to_pixels(images, normalization)
        for image, (caption, name, boxes, *overlays) in zip(pixels, descriptions, strict=True):
            for overlay in overlays:
                blend = image // 2 + overlay[..., :3] // 2
                image = np.where(overlay[..., 3:], blend, image)
            caption = "\n".join(shorten_name(line, 21) for line in caption.splitlines())
            orange_boxes = [(corners, label, ORANGE) for corners, label in boxes]
            cells.append(Cell(image, caption, name, orange_boxes))
    inputs = np.concatenate(values)
    headline = (
        f"{get_run_name(path)}: {len(cells)} of the first {size:,} samples as the model sees them (mean "
        f"{inputs.mean():.2f}, standard deviation {inputs.std():.2f})"
    )
    draw_cells(cells, headline, path)


def to_pixels(images: "Tensor", normalization: Mapping) -> np.ndarray:
    """uint8[B, H, W, 3] of images [B, C, H, W] as the model gets them: the first three channels, one in grey.

    `normalization` has their mean and std, or nothing: then each channel is stretched to the visible range.
    """
    array = images.cpu().numpy()
    if "mean" in normalization and "std" in normalization:
        mean = np.reshape(normalization["mean"], (-1, 1, 1))
        std = np.reshape(normalization["std"], (-1, 1, 1))
    else:
        low = np.min(array, (0, 2, 3))[:, None, None]
        high = np.max(array, (0, 2, 3))[:, None, None]
        std = 1 / np.maximum(high - low, 1e-9)
        mean = -low * std
    pixels = (255 * (array * std + mean)).round().clip(0, 255).astype(np.uint8)
    return pixels.transpose(0, 2, 3, 1)[..., np.arange(3) % pixels.shape[1]]


def format_arrow(name: str, target: str) -> str:
    """The caption `name → target`, on two lines if it is long."""
    name = shorten_name(name, 19)
    target = shorten_name(target, 19)
    separator = " → " if measure_breadth(name + target) <= 17 else "\n→ "
    return name + separator + target


def shorten_name(name: Any, limit: int, path: bool = False) -> str:
    """A name in one line, shortened to the width of `limit` letters.

    Both ends of a name are kept, the end of a path.
    """
    name = " ".join(str(name).split())
    if measure_breadth(name) <= limit:
        return name
    middle = 0 if path else len(name) // 2
    head = name[:middle]
    tail = name[middle:]
    while measure_breadth(head + tail) > limit - 1:  # the ellipsis takes one
        if measure_breadth(head) > measure_breadth(tail):
            head = head[:-1]
        else:
            tail = tail[1:]
    if path:
        tail = tail[max(0, tail.find("/")) :]
    return f"{head}…{tail}"


def count_of(number: int, thing: str) -> str:
    """A number with its noun: 1 image, 2,000 images."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, sides in inches, whose letters may also come from `WIDE_FONTS`."""
    from matplotlib import font_manager, rcParams
    from matplotlib.figure import Figure

    installed = set(font_manager.get_font_names())
    wide_fonts = [name for name in WIDE_FONTS if name in installed]
    rcParams["font.family"] = ["DejaVu Sans"] + wide_fonts[:1]
    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def title(set_title: Callable, text: str) -> None:
    """Set a title in the style of all plots, by `figure.suptitle` or `axes.set_title`."""
    set_title(text, fontsize=12, fontweight="bold", color=INK, parse_math=False)


def save(figure: "Figure", path: Path, max_bytes: float = math.inf) -> None:
    """Write the PNG file durably, in one step. A failure leaves the old file. Raises OSError.

    One that is larger than `max_bytes` gets fewer pixels, and 64 colours.
    """
    content = io.BytesIO()
    figure.savefig(content, format="png", bbox_inches="tight", pad_inches=0.15)
    if content.tell() > max_bytes:
        pixels = Image.open(content).convert("RGB")
        pixels.thumbnail((1000, 10_000))  # six columns in which captions are legible
        palette = pixels.quantize(64)
        content = io.BytesIO()
        pixels.quantize(palette=palette).save(content, "png")  # dithers
    make_folder(Path(path).parent)
    replace_file(Path(path), content.getvalue())


def _draw_line(
    axes: "Axes",
    rows: list[dict],
    key: str,
    label: str,
    colour: str,
    scale: float = 1,
    style: str = "-",
) -> None:
    """Draw `key` of the rows over their steps; a long line pale, under its mean over windows."""
    points = [(row["step"], row[key] * scale) for row in rows if finite(row.get(key)) is not None]
    if not points:
        return
    data = np.array(points)
    if len(data) > SMOOTHED_POINTS:
        axes.plot(data[:, 0], data[:, 1], color=colour, alpha=0.25, linewidth=0.8)
        data = np.array([window.mean(0) for window in np.array_split(data, SMOOTHED_POINTS // 3)])
    marker = "o" if len(data) <= 30 else None
    axes.plot(
        data[:, 0],
        data[:, 1],
        color=colour,
        label=label,
        linewidth=1.8,
        linestyle=style,
        marker=marker,
        markersize=4,
    )


def finite(value: Any) -> float | None:
    """The number `value`; None if it is no number, or not a finite one."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _list_most_confused(counts: np.ndarray, class_names: Sequence[str], limit: int = 6) -> str:
    errors = counts - np.diag(np.diag(counts))
    most_first = np.argsort(-errors, axis=None, kind="stable")
    lines = ["most often confused (true → predicted)"]
    for flat_index in most_first[:limit]:
        row, column = np.unravel_index(flat_index, errors.shape)
        if errors[row, column]:
            true = shorten_name(class_names[row], 30)
            predicted = shorten_name(class_names[column], 30)
            lines.append(f"{true} → {predicted}: {errors[row, column]:,}")
    return "\n".join(lines) if len(lines) > 1 else "no confusions"
