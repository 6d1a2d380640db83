"""Pictures of an evaluation: predictions, precision and recall, confusion matrix, misses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image

from common.data.images import BrokenImage
from common.detection.data.annotated import Annotated
from common.detection.evaluation.matching import IN_CROWD, IOU, Matches, Mistake
from common.run import plots
from common.run.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    Cell,
    count_of,
    evaluation_of,
    mark,
    new_figure,
    save,
    sheet,
    short,
    title,
)

SHOWN_IMAGES = 12
SHOWN_CROPS = 12  # of misses, and of false alarms
NAMED_CURVES = 20  # up to so many classes, all curves have names; of more, the best and the worst few
EXTREME_CURVES = 5
FONT = 7  # points
SIDE = 7.0  # inches of the longer side of an image on its own

# Okabe and Ito's colours, and line styles: together enough to tell NAMED_CURVES apart.
COLOURS, STYLES = (BLUE, ORANGE, GREEN, "#E69F00", "#CC79A7", "#56B4E9"), ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Box:
    """A box: left, top, right, bottom in pixels; id and name of its class; the score if it was predicted."""

    corners: tuple[float, float, float, float]
    class_id: int
    class_name: str
    score: float | None = None


def predictions(matches: Matches, path: Path) -> None:
    """Draw images, with objects beside detections.

    What was found is blue, missed objects and false alarms are orange, crowd regions are grey.
    """
    source, cells = matches.source, []
    for index in _chosen(source):
        image, name = read_image(source, index), source.name(index)
        objects = np.arange(source.offsets[index], source.offsets[index + 1])
        found = matches.of_image(index)
        true, guesses = _objects(source, objects), _detections(matches, found)
        crowd, hits = source.crowd[objects], matches.hits[found]
        of_true = np.where(crowd, GREY, np.where(matches.hit[objects], BLUE, ORANGE))
        of_found = np.where(hits == IN_CROWD, GREY, np.where(hits >= 0, BLUE, ORANGE))
        counts = f"{(hits >= 0).sum()} of {(~crowd).sum()} found, {(of_found == ORANGE).sum()} false"
        cells.append(_cell(image, "objects", name, true, of_true))
        cells.append(_cell(image, counts, name, guesses, of_found))
    what = f"objects, and predictions that score {matches.threshold:.2f} or more (best F1)" if cells else "no images"
    colours = "found blue, missed or false orange, crowds grey"
    sheet(cells, f"{evaluation_of(path)}: {what}\n{colours}", path)


def precision_recall(precision: np.ndarray, class_names: Sequence[str], path: Path) -> None:
    """Draw precision over recall at IoU 0.5, float[classes, 101], of each class and their mean; -1: no objects."""
    present = np.flatnonzero((precision > -1).any(1))
    precision = precision.clip(0)
    ap = 100 * precision.mean(1)
    best_first = present[np.argsort(-ap[present], kind="stable")]
    are_few = len(present) <= NAMED_CURVES
    named = best_first if are_few else [*best_first[:EXTREME_CURVES], *best_first[-EXTREME_CURVES:]]
    figure = new_figure(8.5, 5.6)
    axes = figure.subplots()
    axes.set(xlim=(0, 101), ylim=(0, 101), xlabel="recall (%)", ylabel="precision (%)")
    axes.set_box_aspect(1)
    axes.grid(color=PALE, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    headline = "no objects"
    if len(present):
        mean = precision[present].mean(0)
        headline = f"AP50 {100 * mean.mean():.2f} %"
        of_all = f"{100 * mean.mean():5.1f} %  mean of {len(present):,}"
        axes.plot(*_curve(mean), color=INK, linewidth=3, label=of_all, zorder=3)
    for row in np.setdiff1d(present, named):
        axes.plot(*_curve(precision[row]), color=GREY, alpha=0.25, linewidth=0.8)
    for row, (style, colour) in zip(named, product(STYLES, COLOURS), strict=False):
        label = f"{ap[row]:5.1f} %  {short(class_names[row], 24)}"
        axes.plot(*_curve(precision[row]), color=colour, linestyle=style, linewidth=1.3, label=label)
    if len(present):
        legend = axes.legend(
            title="AP50" if are_few else f"AP50, best and worst {EXTREME_CURVES}",
            loc="upper left",
            bbox_to_anchor=(1.02, 1),
            frameon=False,
            fontsize=9,
            handlelength=2.8,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    title(axes.set_title, f"{evaluation_of(path)}: {headline}")
    save(figure, path)


def confusion(matches: Matches, class_names: Sequence[str], path: Path) -> None:
    """Draw a confusion matrix of objects and detections; the last row and column: background."""
    headline = (
        f"{matches.hit.sum():,} of {matches.object_count:,} objects found\n"
        f"{count_of(matches.false_alarm_count, 'false alarm')} (score ≥ {matches.threshold:.2f}, of best F1; IoU ≥ {IOU})"
    )
    plots.confusion(matches.confusion(), class_names, path, headline)


def misses(matches: Matches, path: Path) -> None:
    """Draw a sheet of the worst misses, then the most confident false alarms: crops of the images around them."""
    missed, alarms = matches.misses(SHOWN_CROPS), matches.false_alarms(SHOWN_CROPS)
    cells = [_crop(matches, case) for case in (*missed, *alarms)]
    headline = f"{len(missed)} worst misses, {len(alarms)} most confident false alarms"
    sheet(cells, f"{evaluation_of(path)}: {headline}, at a score of {matches.threshold:.2f} or more", path)


def detections(image: Image.Image, boxes: list[Box], masks: np.ndarray, path: Path) -> None:
    """Draw an image with what was found in it, best first; `masks` uint8[n, H, W] of 0 and 1, or [0, H, W] for none."""
    from matplotlib.colors import to_rgb

    width, height = (side * SIDE / max(image.size) for side in image.size)
    figure = new_figure(max(width, 1.0), max(height, 1.0))
    axes = figure.subplots()
    axes.set_axis_off()
    pixels = np.array(image)
    colours = [COLOURS[box.class_id % len(COLOURS)] for box in boxes]
    for mask, colour in zip(masks[::-1], colours[::-1], strict=False):
        tint = 255 * np.array(to_rgb(colour))
        pixels[mask > 0] = (0.55 * pixels[mask > 0] + 0.45 * tint).astype(np.uint8)
    smooth = "nearest" if max(image.size) < 400 else "antialiased"
    axes.imshow(pixels, interpolation=smooth)
    marked = [(box.corners, _named(box), colour) for box, colour in zip(boxes, colours, strict=True)]
    mark(axes, marked[::-1], FONT)  # the best on top
    save(figure, path)


# ---- internals


def _chosen(source: Annotated) -> list[int]:
    """Images evenly spaced among those with objects: the same at every evaluation."""
    rows = np.flatnonzero(np.diff(source.offsets))
    rows = rows if len(rows) else np.arange(len(source))
    return rows[np.linspace(0, len(rows) - 1, min(SHOWN_IMAGES, len(rows))).astype(int)].tolist()


def read_image(source: Annotated, index: int) -> Image.Image:
    """The image; black, as in the evaluation, if it can't be read."""
    try:
        return source.image(index)
    except BrokenImage:
        return Image.new("RGB", tuple(source.sizes[index].tolist()))


def _objects(source: Annotated, rows: Sequence[int] | np.ndarray) -> list[Box]:
    columns = zip(source.boxes[rows].tolist(), source.labels[rows].tolist(), strict=True)
    return [Box(tuple(corners), label, source.classes[label]) for corners, label in columns]


def _detections(matches: Matches, rows: Sequence[int] | np.ndarray) -> list[Box]:
    names = matches.source.classes
    return [
        Box(tuple(corners), int(label), names[int(label)], score)
        for *corners, score, label in matches.rows[rows].tolist()
    ]


def _named(box: Box) -> str:
    score = "" if box.score is None else f" {box.score:.2f}".replace("0.", ".")
    return short(box.class_name, 16) + score


def _cell(image: Image.Image, caption: str, name: str, boxes: Sequence[Box], colours: Sequence[str]) -> Cell:
    marked = [(box.corners, _named(box), str(colour)) for box, colour in zip(boxes, colours, strict=True)]
    return Cell(np.asarray(image), caption, name, marked)


def _curve(precision: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Recall and precision in per cent, up to where precision falls to zero: higher recalls are never reached."""
    recalls = np.linspace(0, 100, len(precision))
    end = len(precision) if precision[-1] > 0 else int((precision > 0).sum()) + 1
    return recalls[:end], 100 * precision[:end]


def _crop(matches: Matches, case: Mistake) -> Cell:
    """The surroundings of a missed object, or of a false alarm with the object that explains it."""
    boxes = _objects(matches.source, [case.object] if case.object >= 0 else [])
    if case.kind == "missed":
        (wrong,), colours = boxes, [ORANGE]
        reason = f"only {case.score:.2f}" if case.score else "no such detection"
        caption = f"missed {short(wrong.class_name, 15)}\n{reason}"
    else:
        (wrong,) = _detections(matches, [case.detection])
        reasons = {"double": "a second time", "place": f"off: IoU {case.overlap:.2f}", "nothing": "nothing there"}
        reason = reasons.get(case.kind) or f"is {short(boxes[0].class_name, 18)}"
        caption = f"{short(wrong.class_name, 18)} {wrong.score:.2f}\n{reason}"
        boxes, colours = [*boxes, wrong], [BLUE] * len(boxes) + [ORANGE]
    image = read_image(matches.source, case.image)
    left, top, right, bottom = _window(wrong.corners, image.size)
    shifted = [replace(box, corners=tuple(np.subtract(box.corners, (left, top, left, top)))) for box in boxes]
    return _cell(image.crop((left, top, right, bottom)), caption, matches.source.name(case.image), shifted, colours)


def _window(corners: tuple[float, ...], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """A square around a box, of three times its longer side, moved into the image."""
    left, top, right, bottom = corners
    side = 3 * max(right - left, bottom - top, 8)
    window = []
    for centre, length in (((left + right) / 2, size[0]), ((top + bottom) / 2, size[1])):
        low = min(max(centre - side / 2, 0), max(length - side, 0))
        window.append((round(low), round(min(low + side, length))))
    return window[0][0], window[1][0], window[0][1], window[1][1]
