"""Report of training images whose labels are likely wrong, as `common.training.audit` finds them."""

import csv
import io
from pathlib import Path

import numpy as np

from common.classification import plots
from common.data.source import Source
from common.durable import replace_file
from common.training.audit import Suspects

SHOWN = 24  # images on the sheet
COLUMNS = ("rank", "image", "label", "suggested", "mean_margin", "mean_loss", "times_seen")


def report(source: Source, suspects: Suspects, path: Path) -> None:
    """Write `suspicious.csv` of the run folder, and draw its worst images on a sheet at `path`, `pictures/suspicious.png`.

    Multi-label data: the suggestion is a class to add, `+cat`, or to take away, `-cat`.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    rows = []
    for place, index in enumerate(suspects.indices.tolist()):
        label = _label(source, index)
        suggested, margin = "", ""
        if suspects.margins is not None and suspects.others is not None:
            suggested, margin = _suggested(source, index, int(suspects.others[place])), f"{suspects.margins[place]:.6f}"
        numbers = margin, f"{suspects.losses[place]:.6f}", suspects.seen[place]
        writer.writerow([place + 1, source.name(index), label, suggested, *numbers])
        rows.append(
            (index, label, suggested, f"margin {suspects.margins[place]:.2f}" if margin else f"loss {numbers[1]}")
        )
    replace_file(path.parent.parent / "suspicious.csv", text.getvalue().encode())
    plots.suspicious(source, rows[:SHOWN], path)


def _label(source: Source, index: int) -> str:
    if not source.multi_label:
        return source.classes[source.labels[index]]
    return ", ".join(source.classes[place] for place in np.flatnonzero(source.labels[index]))


def _suggested(source: Source, index: int, other: int) -> str:
    if not source.multi_label:
        return source.classes[other]
    return f"{'-' if source.labels[index][other] else '+'}{source.classes[other]}"
