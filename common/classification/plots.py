"""Pictures of a classifier: confusion matrix, mistakes, reliability diagram."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from common.classification.calibration import Calibration
from common.data.source import Source
from common.run.plots import (
    BLUE,
    GREEN,
    INK,
    Cell,
    confusion,
    describe_plot,
    draw_cells,
    format_arrow,
    new_figure,
    save,
    shorten_name,
    title,
)

__all__ = ["confusion", "draw_captioned", "draw_mistakes", "draw_reliability"]


def draw_mistakes(source: Source, mistakes: Sequence[tuple[int, Sequence]], path: Path) -> None:
    """Draw a sheet of wrongly classified images, captioned "true → predicted".

    Each is its index and its row of predictions.csv.
    """
    cells = []
    for index, (_, label, predicted, score, _) in mistakes:
        share = f"{score:.0%}".replace("%", " %")
        cells.append(make_cell(source, index, f"{format_arrow(label, predicted)}\n{share}"))
    draw_cells(cells, f"{describe_plot(path)}: most confident mistakes (true → predicted)", path)


def draw_reliability(calibration: Calibration, path: Path) -> None:
    """Draw accuracy over confidence, before and after the temperature, with a point for each bin."""
    from matplotlib.ticker import PercentFormatter

    figure = new_figure(5.6, 5.2)
    axes = figure.subplots()
    diagonal = (0, 1)
    axes.plot(
        diagonal, diagonal, color=INK, linewidth=1.2, linestyle="--", label="perfectly calibrated"
    )
    _draw_bins(axes, calibration.bins().numpy(), BLUE, "as it is")
    ece = calibration.ece()
    headline = "no images" if ece is None else f"calibration error (ECE) {100 * ece:.2f} %"
    best = calibration.temperature()
    if best:
        _draw_bins(axes, calibration.bins(best).numpy(), GREEN, f"at temperature {best:.2f}")
        best_ece = calibration.ece(best) or 0
        headline += f",\n{100 * best_ece:.2f} % at temperature {best:.2f}"
    axes.set(
        xlim=(0, 1),
        ylim=(0, 1),
        xlabel="confidence: probability of the predicted class",
        ylabel="share that is right",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, 0, symbol=" %"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=9, markerscale=0.5)
    title(figure.suptitle, f"{describe_plot(path)}: {headline}")
    save(figure, path)


def _draw_bins(axes: Any, bins: np.ndarray, colour: str, label: str) -> None:
    images, right, confidences = bins
    num_images = np.maximum(images, 1)  # an empty bin is a point without an area
    areas = 300 * images / max(1, images.sum())
    axes.scatter(
        confidences / num_images, right / num_images, areas, colour, label=label, clip_on=False
    )


def draw_captioned(
    image: Image.Image, predictions: Sequence[tuple[str, float]], path: Path
) -> None:
    """Draw an image under its predictions (class, score)."""
    longest = max(image.size)
    width = max(2.4, 6 * image.width / longest)
    height = max(2.4, 6 * image.height / longest)
    figure = new_figure(width, height)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.imshow(np.asarray(image), interpolation="nearest" if longest < 100 else "antialiased")
    lines = [
        f"{shorten_name(name, 40)} {score:.1%}".replace("%", " %") for name, score in predictions
    ]
    axes.set_title("\n".join(lines) or "no class", fontsize=10, color=INK, parse_math=False)
    save(figure, path)


def make_cell(source: Source, index: int, caption: str) -> Cell:
    """An image of a sheet, with its caption and name."""
    return Cell(np.asarray(source.load_image(index)), caption, source.get_name(index))
