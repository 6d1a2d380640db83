"""Pictures of a classifier: confusion matrix and most confident mistakes of an evaluation, and suspicious labels."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.classification.metrics import Mistake
from common.data.source import Source
from common.run.plots import INK, breadth, confusion, footnote, new_figure, run_of, save, short, title

__all__ = ["confusion", "mistakes", "suspicious"]


def mistakes(source: Source, mistakes: Sequence[Mistake], path: Path) -> None:
    """Draw a sheet of wrongly classified images of `source`, captioned "true → predicted"."""
    captions = [
        (row.index, source.classes[row.label], source.classes[row.predicted], f"{row.confidence:.0%}".replace("%", " %"))
        for row in mistakes
    ]
    found = "most confident mistakes (true → predicted)" if len(mistakes) else "no mistakes"
    _sheet(source, captions, f"{run_of(path)}, last evaluation: {found}", path)


def suspicious(source: Source, rows: Sequence[tuple[int, str, str, str]], path: Path) -> None:
    """Draw a sheet of training images whose labels are likely wrong: `rows` of index, label, suggested label, and a number."""
    found = "labels that are likely wrong (given → suggested)" if rows else "no sample was audited"
    _sheet(source, rows, f"{run_of(path)}, training: {found}", path)


def _sheet(source: Source, rows: Sequence[tuple[int, str, str, str]], headline: str, path: Path) -> None:
    """Images by index, each under "one name → other name" and a number."""
    columns = min(6, max(len(rows), 3))
    lines = max(1, math.ceil(len(rows) / columns))
    figure = new_figure(1.75 * columns, 2.3 * lines + 0.5)
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, (index, *names, number) in zip(grid, rows, strict=False):
        pixels = np.asarray(source.image(index))
        every = 1 + max(pixels.shape[:2]) // 512
        pixels = pixels[::every, ::every]
        height, width = pixels.shape[:2]
        half, across, down = max(height, width) / 2, (width - 1) / 2, (height - 1) / 2
        axes.imshow(pixels, cmap="gray", interpolation="nearest" if half < 50 else "antialiased")
        axes.set(xlim=(across - half, across + half), ylim=(down + half, down - half))  # squares: captions line up
        true, guess = (short(name, 19) for name in names)
        caption = f"{true} → {guess}" if breadth(true + guess) <= 17 else f"{true}\n→ {guess}"
        axes.set_title(f"{caption}\n{number}", fontsize=9, color=INK, parse_math=False)
        footnote(axes, source.name(index), 32)
    title(figure.suptitle, headline)
    save(figure, path)
