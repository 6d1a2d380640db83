"""Pictures of a classifier: confusion matrix, mistakes, reliability diagram, suspicious labels."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from common.classification.calibration import BINS, Calibration
from common.classification.metrics import Mistake
from common.data.source import Source
from common.run.plots import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    Cell,
    arrow,
    confusion,
    evaluation_of,
    new_figure,
    run_of,
    save,
    sheet,
    short,
    title,
)

__all__ = ["captioned", "confusion", "mistakes", "reliability", "suspicious"]


def mistakes(source: Source, mistakes: Sequence[Mistake], path: Path) -> None:
    """Draw a sheet of wrongly classified images, captioned "true → predicted"."""
    cells = []
    for mistake in mistakes:
        names = source.classes[mistake.label], source.classes[mistake.predicted]
        share = f"{mistake.confidence:.0%}".replace("%", " %")
        cells.append(_cell(source, mistake.index, f"{arrow(*names)}\n{share}"))
    found = "most confident mistakes (true → predicted)" if len(mistakes) else "no mistakes"
    sheet(cells, f"{evaluation_of(path)}: {found}", path)


def reliability(calibration: Calibration, path: Path) -> None:
    """Draw accuracy over confidence, before and after the temperature, and the images in each bin."""
    from matplotlib.ticker import PercentFormatter

    images, right, _ = calibration.bins().numpy()
    width, filled = 1 / BINS, images > 0
    left = np.arange(BINS) * width
    figure = new_figure(5.6, 6.6)
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    upper.plot((0, 1), (0, 1), color=INK, linewidth=1.2, linestyle="--", label="perfectly calibrated", zorder=3)
    accuracies = right[filled] / images[filled]
    upper.bar(left[filled], accuracies, width, align="edge", color="#9CC9E3", edgecolor="white", label="accuracy")
    ece = calibration.ece()
    headline = "no images" if ece is None else f"calibration error (ECE) {100 * ece:.2f} %"
    if best := calibration.temperature():
        after = calibration.bins(best).numpy()
        shown = after[0] > 0
        points = after[2][shown] / after[0][shown], after[1][shown] / after[0][shown]
        label = f"at temperature {best:.2f}"
        upper.plot(*points, "o", color=GREEN, markersize=6, label=label, zorder=4, clip_on=False)
        headline += f",\n{100 * (calibration.ece(best) or 0):.2f} % at temperature {best:.2f}"
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


def captioned(image: Image.Image, found: Sequence[tuple[str, float]], path: Path) -> None:
    """Draw an image under its predictions (class, score)."""
    longest = max(image.size)
    figure = new_figure(*(max(2.4, 6 * side / longest) for side in image.size))
    axes = figure.subplots()
    axes.set_axis_off()
    axes.imshow(np.asarray(image), interpolation="nearest" if longest < 100 else "antialiased")
    lines = [f"{short(name, 40)} {score:.1%}".replace("%", " %") for name, score in found]
    axes.set_title("\n".join(lines) or "no class", fontsize=10, color=INK, parse_math=False)
    save(figure, path)


def suspicious(source: Source, rows: Sequence[tuple[int, str, str, str]], headline: str, path: Path) -> None:
    """Draw contradicted training images: `rows` of index, label, suggested label, and a caption."""
    cells = [_cell(source, index, f"{arrow(*names)}\n{number}") for index, *names, number in rows]
    sheet(cells, f"{run_of(path)}, training (given → suggested): {headline}", path)


def _cell(source: Source, index: int, caption: str) -> Cell:
    return Cell(np.asarray(source.image(index)), caption, source.name(index))
