"""Pictures of an evaluation, and of the detections in one image."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

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
    describe_plot,
    draw_cells,
    shorten_name,
)

NUM_IMAGES = 12
NUM_CROPS = 12  # of misses, and of false alarms
MAX_NAMED_CURVES = 20  # of more classes, only the mean has a name
FONT_SIZE = 7  # points
IMAGE_INCHES = 7.0  # of the longer side of an image on its own

# Okabe and Ito's colours, and line styles: together enough to tell MAX_NAMED_CURVES apart.
COLOURS = (BLUE, ORANGE, GREEN, "#E69F00", "#CC79A7", "#56B4E9")
LINE_STYLES = ("-", "--", ":", "-.")

# Left, top, right, bottom in pixels; the text at the box; colour.
Mark = tuple[Sequence[float], str, str]


def draw_predictions(matches: Matches, path: Path) -> None:
    """Draw images, with objects beside detections.

    Objects that are detected are blue, missed objects and false alarms orange, crowd regions grey.
    """
    source = matches.source
    cells = []
    for index in _choose_images(source):
        image = np.asarray(read_image(source, index))
        name = source.get_name(index)
        objects = np.arange(source.offsets[index], source.offsets[index + 1])
        is_crowd = source.crowd[objects]
        colours = np.where(matches.is_detected[objects], BLUE, ORANGE)
        object_marks = _mark_objects(source, objects, np.where(is_crowd, GREY, colours).tolist())

        detections = matches.get_detections(index)
        hits = matches.hit_objects[detections]
        colours = np.where(hits >= 0, BLUE, ORANGE)
        colours = np.where(hits == IN_CROWD, GREY, colours)
        detection_marks = _mark_detections(matches, detections, colours.tolist())
        num_false = (colours == ORANGE).sum()
        counts = f"{(hits >= 0).sum()} of {(~is_crowd).sum()} found, {num_false} false"
        cells.append(Cell(image, "objects", name, object_marks))
        cells.append(Cell(image, counts, name, detection_marks))
    headline = "no images"
    if cells:
        headline = f"objects, and predictions that score {matches.threshold:.2f} or more (best F1)"
    legend = "found blue, missed or false orange, crowds grey"
    draw_cells(cells, f"{describe_plot(path)}: {headline}\n{legend}", path)


def draw_precision_recall(precision: np.ndarray, class_names: Sequence[str], path: Path) -> None:
    """Draw precision over recall at IoU 0.5, float[classes, 101], and the mean; -1: no objects."""
    classes = np.flatnonzero((precision > -1).any(1))
    precision = 100 * precision.clip(0)
    ap = precision.mean(1)
    figure = plots.new_figure(8.5, 5.6)
    axes = figure.subplots()
    axes.set(xlim=(0, 101), ylim=(0, 101), xlabel="recall (%)", ylabel="precision (%)")
    axes.set_box_aspect(1)
    axes.grid(color=PALE, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    headline = "no objects"
    if len(classes):
        mean_ap = ap[classes].mean()
        headline = f"AP50 {mean_ap:.2f} %"
        recalls = np.linspace(0, 100, precision.shape[1])
        label = f"{mean_ap:5.1f} %  mean of {len(classes):,}"
        mean_precision = precision[classes].mean(0)
        axes.plot(recalls, mean_precision, color=INK, linewidth=3, label=label, zorder=3)
        if len(classes) <= MAX_NAMED_CURVES:
            best_first = classes[np.argsort(-ap[classes], kind="stable")]
            _draw_named_curves(axes, recalls, precision, best_first, class_names)
        else:
            for class_id in classes:
                axes.plot(recalls, precision[class_id], color=GREY, alpha=0.25, linewidth=0.8)
        legend = axes.legend(
            title="AP50",
            frameon=False,
            fontsize=9,
            handlelength=2.8,
            loc="upper left",
            bbox_to_anchor=(1.02, 1),
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    plots.title(axes.set_title, f"{describe_plot(path)}: {headline}")
    plots.save(figure, path)


def _draw_named_curves(
    axes: Any,
    recalls: np.ndarray,
    precision: np.ndarray,
    class_ids: np.ndarray,
    class_names: Sequence[str],
) -> None:
    for class_id, (style, colour) in zip(class_ids, product(LINE_STYLES, COLOURS), strict=False):
        name = shorten_name(class_names[class_id], 24)
        axes.plot(
            recalls,
            precision[class_id],
            color=colour,
            linestyle=style,
            linewidth=1.3,
            label=f"{precision[class_id].mean():5.1f} %  {name}",
        )


def draw_confusion(matches: Matches, class_names: Sequence[str], path: Path) -> None:
    """Draw a confusion matrix of objects and detections; the last row and column: background."""
    headline = (
        f"{matches.is_detected.sum():,} of {matches.num_objects:,} objects found\n"
        f"{plots.count_of(matches.num_false_alarms, 'false alarm')} "
        f"(score ≥ {matches.threshold:.2f}, of best F1; IoU ≥ {IOU})"
    )
    plots.confusion(matches.compute_confusion(), class_names, path, headline)


def draw_mistakes(matches: Matches, path: Path) -> None:
    """Draw the surroundings of the worst misses, then of the most confident false alarms."""
    misses = matches.find_misses(NUM_CROPS)
    alarms = matches.find_false_alarms(NUM_CROPS)
    cells = [_draw_mistake(matches, mistake) for mistake in misses + alarms]
    counts = f"{len(misses)} worst misses, {len(alarms)} most confident false alarms"
    headline = f"{counts}, at a score of {matches.threshold:.2f} or more"
    draw_cells(cells, f"{describe_plot(path)}: {headline}", path)


def draw_detections(
    image: Image.Image,
    boxes: Sequence[tuple[Sequence[float], int, str, float]],
    masks: np.ndarray,
    path: Path,
) -> None:
    """Draw an image with the detections in it, best first.

    Args:
        boxes: left, top, right and bottom in pixels, id and name of the class, and score of each.
        masks: uint8[n, H, W] of 0 and 1, or [0, H, W] for none.
    """
    from matplotlib.colors import to_rgb

    longest = max(image.size)
    width = max(image.width * IMAGE_INCHES / longest, 1.0)
    height = max(image.height * IMAGE_INCHES / longest, 1.0)
    figure = plots.new_figure(width, height)
    axes = figure.subplots()
    axes.set_axis_off()
    pixels = np.array(image)
    marks = []
    for corners, class_id, name, score in boxes:
        marks.append(_make_mark(corners, name, COLOURS[class_id % len(COLOURS)], score))
    marks.reverse()  # the best on top
    for mask, (*_, colour) in zip(masks[::-1], marks, strict=False):
        tint = 255 * np.array(to_rgb(colour))
        pixels[mask > 0] = (0.55 * pixels[mask > 0] + 0.45 * tint).astype(np.uint8)
    axes.imshow(pixels, interpolation="nearest" if longest < 400 else "antialiased")
    plots.mark(axes, marks, FONT_SIZE)
    plots.save(figure, path)


# ---- internals


def _choose_images(source: Annotated) -> list[int]:
    """Images evenly spaced among those with objects: the same at every evaluation."""
    indices = np.flatnonzero(np.diff(source.offsets))
    if not len(indices):
        indices = np.arange(len(source))
    num_images = min(NUM_IMAGES, len(indices))
    return indices[np.linspace(0, len(indices) - 1, num_images).astype(int)].tolist()


def read_image(source: Annotated, index: int) -> Image.Image:
    """The image; black, as in the evaluation, if it can't be read."""
    try:
        return source.load_image(index)
    except BrokenImage:
        return Image.new("RGB", tuple(source.sizes[index].tolist()))


def _mark_objects(
    source: Annotated, indices: Sequence[int] | np.ndarray, colours: Iterable[str]
) -> list[Mark]:
    boxes = source.boxes[indices].tolist()
    labels = source.labels[indices].tolist()
    marks = []
    for corners, label, colour in zip(boxes, labels, colours, strict=True):
        marks.append(_make_mark(corners, source.classes[label], colour))
    return marks


def _mark_detections(
    matches: Matches, indices: Sequence[int] | np.ndarray, colours: Iterable[str]
) -> list[Mark]:
    marks = []
    for row, colour in zip(matches.detections[indices].tolist(), colours, strict=True):
        *corners, score, label = row
        marks.append(_make_mark(corners, matches.source.classes[int(label)], colour, score))
    return marks


def _make_mark(
    corners: Sequence[float], name: str, colour: str, score: float | None = None
) -> Mark:
    text = shorten_name(name, 16)
    if score is not None:
        text += f" {score:.2f}".replace("0.", ".")
    return corners, text, colour


def _draw_mistake(matches: Matches, mistake: Mistake) -> Cell:
    """The surroundings of a missed object, or of a false alarm with the object that explains it."""
    source = matches.source
    name = ""
    marks = []
    if mistake.object >= 0:
        name = source.classes[source.labels[mistake.object]]
        colour = ORANGE if mistake.kind == "missed" else BLUE
        marks = _mark_objects(source, [mistake.object], [colour])
    if mistake.kind == "missed":
        reason = f"only {mistake.score:.2f}" if mistake.score else "no such detection"
        caption = f"missed {shorten_name(name, 15)}\n{reason}"
    else:
        marks += _mark_detections(matches, [mistake.detection], [ORANGE])
        score, label = matches.detections[mistake.detection, 4:].tolist()
        reason = _explain_mistake(mistake, name)
        caption = f"{shorten_name(source.classes[int(label)], 18)} {score:.2f}\n{reason}"
    image = read_image(source, mistake.image)
    left, top, right, bottom = marks[-1][0]
    margin = max(right - left, bottom - top, 8)
    left = int(max(left - margin, 0))
    top = int(max(top - margin, 0))
    right = min(int(right + margin), image.width)
    bottom = min(int(bottom + margin), image.height)
    shifted = []
    for corners, text, colour in marks:
        shifted.append((np.subtract(corners, (left, top, left, top)).tolist(), text, colour))
    crop = np.asarray(image.crop((left, top, right, bottom)))
    return Cell(crop, caption, source.get_name(mistake.image), shifted)


def _explain_mistake(mistake: Mistake, object_name: str) -> str:
    if mistake.kind == "duplicate":
        return "a second time"
    if mistake.kind == "location":
        return f"off: IoU {mistake.overlap:.2f}"
    if mistake.kind == "background":
        return "nothing there"
    return f"is {shorten_name(object_name, 18)}"
