"""Pictures of a classifier's evaluation: confusion matrix and most confident mistakes."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from common.classification.metrics import Mistake
from common.data.source import Source
from common.run.plots import INK, breadth, confusion, footnote, new_figure, run_of, save, short, title
from common.run.tracking import MistakenImage

__all__ = ["confusion", "mistakes"]


def mistakes(source: Source, mistakes: Sequence[Mistake], path: Path) -> list[MistakenImage]:
    """Draw a sheet of wrongly classified images of `source`, captioned "true → predicted", and return them."""
    columns = min(6, max(len(mistakes), 3))
    lines = max(1, math.ceil(len(mistakes) / columns))
    figure = new_figure(1.75 * columns, 2.3 * lines + 0.5)
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    sheet = []
    for axes, mistake in zip(grid, mistakes, strict=False):
        pixels = np.asarray(source.image(mistake.index))
        every = 1 + max(pixels.shape[:2]) // 512
        pixels = pixels[::every, ::every]
        height, width = pixels.shape[:2]
        half, across, down = max(height, width) / 2, (width - 1) / 2, (height - 1) / 2
        axes.imshow(pixels, cmap="gray", interpolation="nearest" if half < 50 else "antialiased")
        axes.set(xlim=(across - half, across + half), ylim=(down + half, down - half))  # squares: captions line up
        names = [source.classes[index] for index in (mistake.label, mistake.predicted)]
        name = source.name(mistake.index)
        sheet.append(MistakenImage(Image.fromarray(pixels), name, *names, mistake.confidence))
        true, guess = (short(name, 19) for name in names)
        caption = f"{true} → {guess}" if breadth(true + guess) <= 17 else f"{true}\n→ {guess}"
        share = f"{mistake.confidence:.0%}".replace("%", " %")
        axes.set_title(f"{caption}\n{share}", fontsize=9, color=INK, parse_math=False)
        footnote(axes, name, 32)
    found = "most confident mistakes (true → predicted)" if len(mistakes) else "no mistakes"
    title(figure.suptitle, f"{run_of(path)}, last evaluation: {found}")
    save(figure, path)
    return sheet
