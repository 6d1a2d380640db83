"""Pictures of a classifier's evaluation: confusion matrix, most confident mistakes, and reliability diagram."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.classification.calibration import BINS, Calibration
from common.classification.metrics import Mistake
from common.data.source import Source
from common.run.plots import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    breadth,
    confusion,
    evaluation_of,
    footnote,
    new_figure,
    save,
    short,
    title,
)

__all__ = ["confusion", "mistakes", "reliability"]


def mistakes(source: Source, mistakes: Sequence[Mistake], path: Path) -> None:
    """Draw a sheet of wrongly classified images of `source`, captioned "true → predicted"."""
    columns = min(6, max(len(mistakes), 3))
    lines = max(1, math.ceil(len(mistakes) / columns))
    figure = new_figure(1.75 * columns, 2.3 * lines + 0.5)
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, mistake in zip(grid, mistakes, strict=False):
        pixels = np.asarray(source.image(mistake.index))
        every = 1 + max(pixels.shape[:2]) // 512
        pixels = pixels[::every, ::every]
        height, width = pixels.shape[:2]
        half, across, down = max(height, width) / 2, (width - 1) / 2, (height - 1) / 2
        axes.imshow(pixels, cmap="gray", interpolation="nearest" if half < 50 else "antialiased")
        axes.set(xlim=(across - half, across + half), ylim=(down + half, down - half))  # squares: captions line up
        true, guess = (short(source.classes[index], 19) for index in (mistake.label, mistake.predicted))
        caption = f"{true} → {guess}" if breadth(true + guess) <= 17 else f"{true}\n→ {guess}"
        share = f"{mistake.confidence:.0%}".replace("%", " %")
        axes.set_title(f"{caption}\n{share}", fontsize=9, color=INK, parse_math=False)
        footnote(axes, source.name(mistake.index), 32)
    found = "most confident mistakes (true → predicted)" if len(mistakes) else "no mistakes"
    title(figure.suptitle, f"{evaluation_of(path)}: {found}")
    save(figure, path)


def reliability(calibration: Calibration, path: Path) -> None:
    """Draw accuracy over confidence, in bins, before and after the temperature; and how many images have each confidence."""
    from matplotlib.ticker import PercentFormatter

    images, right, _ = calibration.bins().numpy()
    width, filled = 1 / BINS, images > 0
    left = np.arange(BINS) * width
    figure = new_figure(5.6, 6.6)
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    upper.plot((0, 1), (0, 1), color=INK, linewidth=1.2, linestyle="--", label="perfectly calibrated", zorder=3)
    accuracies = right[filled] / images[filled]
    upper.bar(left[filled], accuracies, width, align="edge", color="#9CC9E3", edgecolor="white", label="accuracy")
    headline = "no images"
    if filled.any():
        headline = f"calibration error (ECE) {100 * calibration.ece():.2f} %"
    if best := calibration.temperature():
        after = calibration.bins(best).numpy()
        shown = after[0] > 0
        points = after[2][shown] / after[0][shown], after[1][shown] / after[0][shown]
        label = f"at temperature {best:.2f}"
        upper.plot(*points, "o", color=GREEN, markersize=6, label=label, zorder=4, clip_on=False)
        headline += f",\n{100 * calibration.ece(best):.2f} % at temperature {best:.2f}"
    upper.set_ylabel("share that is right")
    upper.set(xlim=(0, 1), ylim=(0, 1))
    for counts, label, colour, offset in ((right, "right", BLUE, 0), (images - right, "wrong", ORANGE, width / 2)):
        lower.bar(left + offset, counts, width / 2, align="edge", color=colour, label=label)
    lower.set_yscale("symlog", linthresh=1)
    lower.set_ylim(bottom=0)
    lower.yaxis.set_major_formatter("{x:,.0f}")
    lower.set(xlabel="confidence: probability of the predicted class", ylabel="images")
    for axes in (upper, lower):
        axes.xaxis.set_major_formatter(PercentFormatter(1, 0, symbol=" %"))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(-0.02, 0.99), fontsize=9)
    upper.yaxis.set_major_formatter(PercentFormatter(1, 0, symbol=" %"))
    title(figure.suptitle, f"{evaluation_of(path)}: {headline}")
    save(figure, path)
