"""Pictures of an evaluation, and of the detections in one image."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image

from common.data.images import BrokenImage
from common.detection.data.annotated import Annotated
from common.detection.evaluation.matching import IN_CROWD, IOU, Matches, Mistake
from common.run import plots
from common.run.plots import BLUE, GREEN, GREY, INK, ORANGE, PALE, Cell, evaluation_of, sheet, short

SHOWN_IMAGES = 12
SHOWN_CROPS = 12  # of misses, and of false alarms
NAMED_CURVES = 20  # of more classes, only the mean has a name
FONT = 7  # points
SIDE = 7.0  # inches of the longer side of an image on its own

# Okabe and Ito's colours, and line styles: together enough to tell NAMED_CURVES apart.
COLOURS, STYLES = (BLUE, ORANGE, GREEN, "#E69F00", "#CC79A7", "#56B4E9"), ("-", "--", ":", "-.")

# Left, top, right, bottom in pixels; what stands there; colour.
Mark = tuple[Sequence[float], str, str]


def predictions(matches: Matches, path: Path) -> None:
    """Draw images, with objects beside detections.

    What was found is blue, missed objects and false alarms are orange, crowd regions are grey.
    """
    source, cells = matches.source, []
    for index in _chosen(source):
        image, name = np.asarray(read_image(source, index)), source.name(index)
        objects = np.arange(source.offsets[index], source.offsets[index + 1])
        found = matches.of_image(index)
        crowd, hits = source.crowd[objects], matches.hits[found]
        of_true = np.where(crowd, GREY, np.where(matches.hit[objects], BLUE, ORANGE)).tolist()
        of_found = np.where(hits == IN_CROWD, GREY, np.where(hits >= 0, BLUE, ORANGE)).tolist()
        counts = f"{(hits >= 0).sum()} of {(~crowd).sum()} found, {of_found.count(ORANGE)} false"
        cells.append(Cell(image, "objects", name, _objects(source, objects, of_true)))
        cells.append(Cell(image, counts, name, _detections(matches, found, of_found)))
    what = (
        f"objects, and predictions that score {matches.threshold:.2f} or more (best F1)"
        if cells
        else "no images"
    )
    colours = "found blue, missed or false orange, crowds grey"
    sheet(cells, f"{evaluation_of(path)}: {what}\n{colours}", path)


def precision_recall(precision: np.ndarray, class_names: Sequence[str], path: Path) -> None:
    """Draw precision over recall at IoU 0.5, float[classes, 101], and the mean; -1: no objects."""
    present = np.flatnonzero((precision > -1).any(1))
    precision = 100 * precision.clip(0)
    recalls, ap = np.linspace(0, 100, precision.shape[1]), precision.mean(1)
    figure = plots.new_figure(8.5, 5.6)
    axes = figure.subplots()
    axes.set(xlim=(0, 101), ylim=(0, 101), xlabel="recall (%)", ylabel="precision (%)")
    axes.set_box_aspect(1)
    axes.grid(color=PALE, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    headline = "no objects"
    if len(present):
        headline = f"AP50 {ap[present].mean():.2f} %"
        of_all = f"{ap[present].mean():5.1f} %  mean of {len(present):,}"
        axes.plot(
            recalls, precision[present].mean(0), color=INK, linewidth=3, label=of_all, zorder=3
        )
        best_first = present[np.argsort(-ap[present], kind="stable")]
        for row, (style, colour) in zip(best_first, product(STYLES, COLOURS), strict=False):
            if len(present) <= NAMED_CURVES:
                label = f"{ap[row]:5.1f} %  {short(class_names[row], 24)}"
                axes.plot(
                    recalls,
                    precision[row],
                    color=colour,
                    linestyle=style,
                    linewidth=1.3,
                    label=label,
                )
        for row in present if len(present) > NAMED_CURVES else ():
            axes.plot(recalls, precision[row], color=GREY, alpha=0.25, linewidth=0.8)
        outside = {"loc": "upper left", "bbox_to_anchor": (1.02, 1)}
        legend = axes.legend(title="AP50", frameon=False, fontsize=9, handlelength=2.8, **outside)
        for text in legend.get_texts():
            text.set_parse_math(False)
    plots.title(axes.set_title, f"{evaluation_of(path)}: {headline}")
    plots.save(figure, path)


def confusion(matches: Matches, class_names: Sequence[str], path: Path) -> None:
    """Draw a confusion matrix of objects and detections; the last row and column: background."""
    headline = (
        f"{matches.hit.sum():,} of {matches.object_count:,} objects found\n"
        f"{plots.count_of(matches.false_alarm_count, 'false alarm')} "
        f"(score ≥ {matches.threshold:.2f}, of best F1; IoU ≥ {IOU})"
    )
    plots.confusion(matches.confusion(), class_names, path, headline)


def misses(matches: Matches, path: Path) -> None:
    """Draw the surroundings of the worst misses, then of the most confident false alarms."""
    missed, alarms = matches.misses(SHOWN_CROPS), matches.false_alarms(SHOWN_CROPS)
    cells = [_crop(matches, case) for case in (*missed, *alarms)]
    headline = f"{len(missed)} worst misses, {len(alarms)} most confident false alarms"
    sheet(
        cells,
        f"{evaluation_of(path)}: {headline}, at a score of {matches.threshold:.2f} or more",
        path,
    )


def detections(
    image: Image.Image,
    boxes: Sequence[tuple[Sequence[float], int, str, float]],
    masks: np.ndarray,
    path: Path,
) -> None:
    """Draw an image with what was found in it, best first.

    Args:
        boxes: left, top, right and bottom in pixels, id and name of the class, and score of each.
        masks: uint8[n, H, W] of 0 and 1, or [0, H, W] for none.
    """
    from matplotlib.colors import to_rgb

    width, height = (side * SIDE / max(image.size) for side in image.size)
    figure = plots.new_figure(max(width, 1.0), max(height, 1.0))
    axes = figure.subplots()
    axes.set_axis_off()
    pixels = np.array(image)
    marks = [
        _mark(corners, name, COLOURS[number % len(COLOURS)], score)
        for corners, number, name, score in boxes
    ]
    for mask, (*_, colour) in zip(masks[::-1], marks[::-1], strict=False):
        tint = 255 * np.array(to_rgb(colour))
        pixels[mask > 0] = (0.55 * pixels[mask > 0] + 0.45 * tint).astype(np.uint8)
    axes.imshow(pixels, interpolation="nearest" if max(image.size) < 400 else "antialiased")
    plots.mark(axes, marks[::-1], FONT)  # the best on top
    plots.save(figure, path)


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


def _objects(
    source: Annotated, rows: Sequence[int] | np.ndarray, colours: Iterable[str]
) -> list[Mark]:
    columns = zip(source.boxes[rows].tolist(), source.labels[rows].tolist(), colours, strict=True)
    return [_mark(corners, source.classes[label], colour) for corners, label, colour in columns]


def _detections(
    matches: Matches, rows: Sequence[int] | np.ndarray, colours: Iterable[str]
) -> list[Mark]:
    classes, found = matches.source.classes, zip(matches.rows[rows].tolist(), colours, strict=True)
    return [
        _mark(box, classes[int(label)], colour, score) for (*box, score, label), colour in found
    ]


def _mark(corners: Sequence[float], name: str, colour: str, score: float | None = None) -> Mark:
    return (
        corners,
        short(name, 16) + ("" if score is None else f" {score:.2f}".replace("0.", ".")),
        colour,
    )


def _crop(matches: Matches, case: Mistake) -> Cell:
    """The surroundings of a missed object, or of a false alarm with the object that explains it."""
    source = matches.source
    name = source.classes[source.labels[case.object]] if case.object >= 0 else ""
    if case.kind == "missed":
        marks = _objects(source, [case.object], [ORANGE])
        reason = f"only {case.score:.2f}" if case.score else "no such detection"
        caption = f"missed {short(name, 15)}\n{reason}"
    else:
        score, label = matches.rows[case.detection, 4:].tolist()
        marks = _objects(source, [case.object], [BLUE]) if case.object >= 0 else []
        marks += _detections(matches, [case.detection], [ORANGE])
        reasons = {
            "double": "a second time",
            "place": f"off: IoU {case.overlap:.2f}",
            "nothing": "nothing there",
        }
        reason = reasons.get(case.kind) or f"is {short(name, 18)}"
        caption = f"{short(source.classes[int(label)], 18)} {score:.2f}\n{reason}"
    image, (left, top, right, bottom) = read_image(source, case.image), marks[-1][0]
    margin = max(right - left, bottom - top, 8)
    left, top = int(max(left - margin, 0)), int(max(top - margin, 0))
    size = min(int(right + margin), image.width), min(int(bottom + margin), image.height)
    shifted = [
        (np.subtract(corners, (left, top, left, top)).tolist(), text, ink)
        for corners, text, ink in marks
    ]
    return Cell(
        np.asarray(image.crop((left, top, *size))), caption, source.name(case.image), shifted
    )
