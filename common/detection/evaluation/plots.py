"""Pictures of a detector's evaluation: predictions, precision and recall, confusion matrix, worst misses and false alarms."""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from common.data.images import BrokenImage
from common.detection.data.annotated import Annotated
from common.detection.evaluation.matching import IN_CROWD, IOU, FalseAlarm, Matches, Miss
from common.run import plots
from common.run.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    breadth,
    count_of,
    evaluation_of,
    footnote,
    new_figure,
    save,
    short,
    title,
)
from common.run.tracking import Box, BoxedImage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SHOWN_IMAGES = 12
SHOWN_CROPS = 12  # of misses, and of false alarms
CROPS_A_LINE = 6
NAMED_CURVES = 20  # up to this many classes, each curve has a name; of more, only the best and the worst few
EXTREME_CURVES = 5
MOST_PIXELS = 512  # side of an image on a sheet
PANEL, FONT = 2.6, 7  # inches a side, points

# Okabe and Ito's colours, and line styles: together enough to tell NAMED_CURVES apart.
COLOURS, STYLES = (BLUE, ORANGE, GREEN, "#E69F00", "#CC79A7", "#56B4E9"), ("-", "--", ":", "-.")


def predictions(source: Annotated, matches: Matches, path: Path) -> list[BoxedImage]:
    """Draw a sheet of images, with objects beside detections, and return the same for the dashboard."""
    shown = _chosen(source)
    pairs = min(3, max(len(shown), 1))
    lines = max(1, math.ceil(len(shown) / pairs))
    figure = new_figure(2 * PANEL * pairs, (PANEL + 0.12) * lines + 0.8)
    grid = _grid(figure, lines, 3 * pairs, width_ratios=(1, 1, 0.04) * pairs).reshape(-1, 3)  # the third is a gap
    sheet, crowds = [], False
    for (left, right, _), index in zip(grid, shown, strict=False):
        image = _read(source, index)
        objects = np.arange(source.offsets[index], source.offsets[index + 1])
        found = matches.of_image(index)
        true, guesses = _boxes_of_objects(source, objects), _boxes_of_detections(source, matches, found)
        for axes in (left, right):
            _show(axes, image, (0, 0, *image.size))
        crowd = source.crowd[objects]
        crowds = crowds or crowd.any()
        styles = [_CROWD if source.crowd[row] else _RIGHT if matches.hit[row] else _MISSED for row in objects]
        _mark(left, true, styles)
        of_found = matches.hits[found]
        styles = [_CROWD if hit == IN_CROWD else _RIGHT if hit >= 0 else _WRONG for hit in of_found]
        _mark(right, guesses, styles)
        _caption(left, short(source.name(index), 34, path=True))
        _caption(right, f"{(of_found >= 0).sum()} of {(~crowd).sum()} found, {styles.count(_WRONG)} false")
        sheet.append(BoxedImage(image, source.name(index), {"ground_truth": true, "predictions": guesses}))
    _legend(figure, crowds)
    what = f"objects, and predictions that score {matches.threshold:.2f} or more (best F1)" if shown else "no images"
    title(figure.suptitle, f"{evaluation_of(path)}: {what}")
    save(figure, path)
    return sheet


def precision_recall(precision: np.ndarray, class_names: Sequence[str], path: Path) -> None:
    """Draw precision over recall at IoU 0.5, float[classes, 101], of each class and their mean; -1: no objects."""
    present = np.flatnonzero((precision > -1).any(1))
    ap = precision[present].clip(0).mean(1)
    best_first = present[np.argsort(-ap, kind="stable")]
    named = best_first
    if len(present) > NAMED_CURVES:
        named = np.concatenate([best_first[:EXTREME_CURVES], best_first[-EXTREME_CURVES:]])
    figure = new_figure(8.5, 5.6)
    axes = figure.subplots()
    axes.set(xlim=(0, 101), ylim=(0, 101), xlabel="recall (%)", ylabel="precision (%)")
    axes.set_box_aspect(1)
    axes.grid(color=PALE, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    for row in np.setdiff1d(present, named):
        axes.plot(*_curve(precision[row]), color=GREY, alpha=0.25, linewidth=0.8)
    styles = [(colour, style) for style, colour in product(STYLES, COLOURS)]
    for row, (colour, style) in zip(named, styles, strict=False):
        label = f"{100 * precision[row].mean():5.1f} %  {short(class_names[row], 24)}"
        axes.plot(*_curve(precision[row]), color=colour, linestyle=style, linewidth=1.3, label=label)
    headline = "no objects"
    if len(present):
        mean = precision[present].clip(0).mean(0)
        axes.plot(*_curve(mean), color=INK, linewidth=3, label=f"{100 * mean.mean():5.1f} %  mean of {len(present):,}")
        lines, labels = axes.get_legend_handles_labels()
        few = len(named) < len(present)
        legend = axes.legend(
            [lines[-1], *lines[:-1]],
            [labels[-1], *labels[:-1]],
            title=f"AP50, best and worst {EXTREME_CURVES}" if few else "AP50",
            loc="upper left",
            bbox_to_anchor=(1.02, 1),
            frameon=False,
            fontsize=9,
            handlelength=2.8,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        headline = f"AP50 {100 * mean.mean():.2f} %"
    title(axes.set_title, f"{evaluation_of(path)}: {headline}")
    save(figure, path)


def confusion(matches: Matches, class_names: Sequence[str], path: Path) -> None:
    """Draw a confusion matrix of objects and detections, with a row and a column for the background."""
    headline = (
        f"{matches.hit.sum():,} of {matches.object_count:,} objects found\n"
        f"{count_of(matches.false_alarm_count, 'false alarm')} (score ≥ {matches.threshold:.2f}, of best F1; IoU ≥ {IOU})"
    )
    plots.confusion(matches.confusion(), class_names, path, headline)


def misses(source: Annotated, matches: Matches, path: Path) -> None:
    """Draw a sheet of the worst misses and the most confident false alarms: crops of the images around them."""
    missed, alarms = matches.misses(SHOWN_CROPS), matches.false_alarms(SHOWN_CROPS)
    columns = min(CROPS_A_LINE, max(4, len(missed), len(alarms)))
    lines = [math.ceil(len(part) / columns) for part in (missed, alarms)]
    figure = new_figure(columns * 1.9, sum(lines) * 2.35 + 1.3)
    upper, lower = figure.subfigures(2, 1, height_ratios=[max(0.25, count) for count in lines])
    good = f"at a score of {matches.threshold:.2f} or more"
    headline = f"not found {good}: largest first, less what other boxes cover" if missed else f"nothing missed {good}"
    _crops(upper, headline, columns, missed, source, matches)
    headline = f"false alarms {good}: most confident first" if alarms else f"no false alarms {good}"
    _crops(lower, headline, columns, alarms, source, matches)
    title(figure.suptitle, f"{evaluation_of(path)}: worst misses and false alarms")
    save(figure, path)


# ---- internals

_RIGHT, _MISSED = {"edgecolor": BLUE, "linestyle": "-"}, {"edgecolor": ORANGE, "linestyle": "--"}
_WRONG, _CROWD = {"edgecolor": ORANGE, "linestyle": "-"}, {"edgecolor": GREY, "linestyle": ":"}


def _chosen(source: Annotated) -> list[int]:
    """Images evenly spaced among those with objects: the same at every evaluation."""
    rows = np.flatnonzero(np.diff(source.offsets))
    rows = rows if len(rows) else np.arange(len(source))
    return rows[np.linspace(0, len(rows) - 1, min(SHOWN_IMAGES, len(rows))).astype(int)].tolist()


def _read(source: Annotated, index: int) -> Image.Image:
    """The image; black, as in the evaluation, if it can't be read."""
    try:
        return source.image(index)
    except BrokenImage:
        return Image.new("RGB", tuple(source.sizes[index].tolist()))


def _boxes_of_objects(source: Annotated, rows: Sequence[int]) -> list[Box]:
    labels = source.labels[rows].tolist()
    return [
        Box(tuple(corners), label, source.classes[label])
        for corners, label in zip(source.boxes[rows].tolist(), labels, strict=True)
    ]


def _boxes_of_detections(source: Annotated, matches: Matches, rows: Sequence[int]) -> list[Box]:
    boxes = []
    for *corners, score, label in matches.rows[rows].tolist():
        boxes.append(Box(tuple(corners), int(label), source.classes[int(label)], score))
    return boxes


def _grid(figure: "Figure | SubFigure", lines: int, columns: int, **options) -> np.ndarray:
    """Empty panels, [lines, columns]."""
    grid = figure.subplots(lines, columns, squeeze=False, **options)
    for axes in grid.ravel():
        axes.set_axis_off()
        axes.set(xticks=(), yticks=())  # drawing invisible ticks would take most of the time
    return grid


def _show(axes: "Axes", image: Image.Image, window: tuple[float, float, float, float]) -> None:
    """Show a part of an image in a square panel, whose coordinates are the image's pixels."""
    left, top, right, bottom = (round(side) for side in window)
    pixels = np.asarray(image)[top:bottom, left:right]
    every = 1 + max(pixels.shape[:2]) // MOST_PIXELS
    smooth = "nearest" if max(pixels.shape[:2]) < 100 else "antialiased"
    axes.imshow(pixels[::every, ::every], cmap="gray", extent=(left, right, bottom, top), interpolation=smooth)
    half, across, down = max(right - left, bottom - top) / 2, (left + right) / 2, (top + bottom) / 2
    axes.set(xlim=(across - half, across + half), ylim=(down + half, down - half))


def _outline(axes: "Axes", box: Box, style: dict) -> None:
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    left, top, right, bottom = box.corners
    halo = [withStroke(linewidth=3.2, foreground="white", alpha=0.8)]  # visible on any background
    axes.add_patch(
        Rectangle((left, top), right - left, bottom - top, fill=False, linewidth=1.5, path_effects=halo, **style)
    )


def _mark(axes: "Axes", boxes: list[Box], styles: list[dict]) -> None:
    """Draw boxes with names and scores, most important first; a name that would cover another one is left out."""
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    point = (right - left) / (PANEL * 0.95 * 72)  # in pixels of the image
    placed: list[tuple[float, float, float, float]] = []
    for box, style in reversed(list(zip(boxes, styles, strict=True))):
        _outline(axes, box, style)  # the most important one on top
    for box, style in zip(boxes, styles, strict=True):
        score = "" if box.score is None else f" {box.score:.2f}".replace("0.", ".")
        text = short(box.class_name, 16) + score
        width, height = (0.66 * breadth(text) + 0.3) * FONT * point, 1.35 * FONT * point
        others = [other.corners for other in boxes if other is not box]
        places = [place for place in _places(box.corners, width, height) if _within(place, (left, top, right, bottom))]
        places = [place for place in places if not any(_overlap(place, other) for other in placed)]
        free = [place for place in places if not any(_overlap(place, other) for other in others)]
        for place in (free or places)[:1]:
            placed.append(place)
            label = axes.text(
                (place[0] + place[2]) / 2,
                (place[1] + place[3]) / 2,
                text,
                color="white",
                fontsize=FONT,
                ha="center",
                va="center",
                parse_math=False,
                bbox={"facecolor": style["edgecolor"], "edgecolor": "none", "boxstyle": "square,pad=0.12"},
            )
            label.set_in_layout(False)  # it lies within the panel


def _places(corners, width: float, height: float):
    """Places for a label of this size: above its box, below, beside, or in it."""
    left, top, right, bottom = corners
    for x, y in (
        (left, top - height),
        (left, bottom),
        (right - width, top - height),
        (right - width, bottom),
        (right, top),
        (left - width, top),
        (right, bottom - height),
        (left - width, bottom - height),
        (left, top),
        (left, bottom - height),
    ):
        yield x, y, x + width, y + height


def _within(one, other) -> bool:
    return one[0] >= other[0] and one[1] >= other[1] and one[2] <= other[2] and one[3] <= other[3]


def _overlap(one, other) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _caption(axes: "Axes", text: str) -> None:
    axes.set_title(text, fontsize=9, color=INK, parse_math=False, pad=3)


def _legend(figure: "Figure", crowds: bool) -> None:
    from matplotlib.lines import Line2D

    kinds = {"object, found": _RIGHT, "object, missed": _MISSED, "false alarm": _WRONG}
    kinds |= {"crowd region, not judged": _CROWD} if crowds else {}
    lines = [
        Line2D([], [], color=style["edgecolor"], linestyle=style["linestyle"], linewidth=2) for style in kinds.values()
    ]
    figure.legend(lines, list(kinds), loc="outside lower center", ncols=len(kinds), frameon=False, fontsize=10)


def _curve(precision: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Recall and precision in per cent, up to where precision falls to zero: higher recalls are never reached."""
    recalls = np.linspace(0, 100, len(precision))
    end = len(precision) if precision[-1] > 0 else int((precision > 0).sum()) + 1
    return recalls[:end], 100 * precision[:end]


def _crops(
    part: "SubFigure",
    headline: str,
    columns: int,
    cases: list[Miss] | list[FalseAlarm],
    source: Annotated,
    matches: Matches,
) -> None:
    part.suptitle(headline, fontsize=10, color=INK)
    grid = _grid(part, max(1, math.ceil(len(cases) / columns)), columns).ravel()
    for axes, case in zip(grid, cases, strict=False):
        image = _read(source, case.image)
        true = _boxes_of_objects(source, [case.object] if case.object >= 0 else [])
        if isinstance(case, Miss):
            wrong, text = (
                true[0],
                f"{short(true[0].class_name, 22)}\n"
                + (f"only {case.score:.2f}" if case.score else "no such detection"),
            )
        else:
            wrong = _boxes_of_detections(source, matches, [case.detection])[0]
            text = f"{short(wrong.class_name, 18)} {wrong.score:.2f}\n{_explanation(case, true)}"
        _show(axes, image, _window(wrong.corners, image.size))
        if not isinstance(case, Miss):
            for box in true:
                _outline(axes, box, _RIGHT)
        _outline(axes, wrong, _MISSED if isinstance(case, Miss) else _WRONG)
        _caption(axes, text)
        footnote(axes, source.name(case.image), 34)


def _explanation(alarm: FalseAlarm, true: list[Box]) -> str:
    if alarm.kind == "class":
        return f"is {short(true[0].class_name, 18)}"
    return {"double": "a second time", "place": f"off: IoU {alarm.overlap:.2f}", "nothing": "nothing there"}[alarm.kind]


def _window(corners: tuple[float, ...], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """A square around a box, of three times its longer side, within the image as far as possible."""
    left, top, right, bottom = corners
    side = 3 * max(right - left, bottom - top, 8)
    window = []
    for centre, length in (((left + right) / 2, size[0]), ((top + bottom) / 2, size[1])):
        low = min(max(centre - side / 2, 0), max(length - side, 0))
        window.append((low, min(low + side, length)))
    return window[0][0], window[1][0], window[0][1], window[1][1]
