"""Report of training images whose labels are likely wrong, as `common.training.audit` finds them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.classification import plots
from common.data.source import Source
from common.training.audit import Suspects

SHOWN = 24  # images on the sheet
COLUMNS = ("rank", "image", "label", "suggested", "mean_margin", "mean_loss", "times_seen")


def rows(source: Source, suspects: Suspects) -> list[Sequence]:
    """The rows of `suspicious.csv`. Multi-label data: the suggestion is a class to add, `+cat`, or to take away, `-cat`."""
    table: list[Sequence] = [COLUMNS]
    for place, index in enumerate(suspects.indices.tolist()):
        numbers = _margin(suspects, place, 6), f"{suspects.losses[place]:.6f}", suspects.seen[place]
        names = source.name(index), _label(source, index), _suggested(source, suspects, place)
        table.append((place + 1, *names, *numbers))
    return table


def draw(source: Source, suspects: Suspects, path: Path) -> None:
    """Draw a sheet of the most suspicious images."""
    shown = []
    for place, index in enumerate(suspects.indices[:SHOWN].tolist()):
        margin = _margin(suspects, place, 2)
        number = f"margin {margin}" if margin else f"loss {suspects.losses[place]:.2f}"
        shown.append((index, _label(source, index), _suggested(source, suspects, place), number))
    plots.suspicious(source, shown, path)


def _margin(suspects: Suspects, place: int, digits: int) -> str:
    return "" if suspects.margins is None else f"{suspects.margins[place]:.{digits}f}"


def _label(source: Source, index: int) -> str:
    if not source.multi_label:
        return source.classes[source.labels[index]]
    return ", ".join(source.classes[place] for place in np.flatnonzero(source.labels[index]))


def _suggested(source: Source, suspects: Suspects, place: int) -> str:
    if suspects.others is None:
        return ""
    index, other = suspects.indices[place], suspects.others[place]
    sign = ("-" if source.labels[index][other] else "+") if source.multi_label else ""
    return f"{sign}{source.classes[other]}"
