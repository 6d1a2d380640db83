"""Pictures of a classifier: confusion matrix and most confident mistakes of an evaluation, and suspicious labels."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.classification.metrics import Mistake
from common.data.source import Source
from common.run.plots import Cell, arrow, confusion, run_of, sheet

__all__ = ["confusion", "mistakes", "suspicious"]


def mistakes(source: Source, mistakes: Sequence[Mistake], path: Path) -> None:
    """Draw a sheet of wrongly classified images of `source`, captioned "true → predicted"."""
    cells = []
    for mistake in mistakes:
        names = source.classes[mistake.label], source.classes[mistake.predicted]
        share = f"{mistake.confidence:.0%}".replace("%", " %")
        cells.append(_cell(source, mistake.index, f"{arrow(*names)}\n{share}"))
    found = "most confident mistakes (true → predicted)" if len(mistakes) else "no mistakes"
    sheet(cells, f"{run_of(path)}, last evaluation: {found}", path)


def suspicious(source: Source, rows: Sequence[tuple[int, str, str, str]], path: Path) -> None:
    """Draw a sheet of training images whose labels are likely wrong: `rows` of index, label, suggested label, and a number."""
    cells = [_cell(source, index, f"{arrow(*names)}\n{number}") for index, *names, number in rows]
    found = "labels that are likely wrong (given → suggested)" if rows else "no sample was audited"
    sheet(cells, f"{run_of(path)}, training: {found}", path)


def _cell(source: Source, index: int, caption: str) -> Cell:
    return Cell(np.asarray(source.image(index)), caption, source.name(index))
