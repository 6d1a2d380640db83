"""Rows of the start table about the data."""

from collections.abc import Sequence

import numpy as np

from common.data.data_spec import fingerprint

_SHOWN = 5  # class names in a row of the table


def data_rows(data: str, train, val, samples: str = "images") -> dict[str, str]:
    """Rows of the start table about two sources, `source.Source` or `detection.data.annotated.Annotated`.

    `samples`: images, or boxes, which their `class_counts` count.
    """
    classes, counts = train.classes, train.class_counts
    rows = {
        "data": f"{data}: {len(train):,} + {len(val):,} images of {len(classes):,} classes",
        "classes": _names(classes),
        "trained on": train.part,
        "evaluated": val.part,
        "fingerprint": f"{fingerprint(train, val)}, names, sizes and labels are the same on all ranks; pixels are not compared",
    }
    if counts is not None:
        few, many = int(counts.argmin()), int(counts.argmax())
        rows[f"{samples} a class"] = f"{counts[few]:,} ({classes[few]}) to {counts[many]:,} ({classes[many]})"
    if len(never := np.flatnonzero(val.class_counts == 0)):
        rows["not evaluated"] = f"{_names([classes[place] for place in never])}: no {samples} to evaluate"
    others = [note for note in val.notes if note not in train.notes]
    return rows | {
        name: "; ".join(notes) for name, notes in (("train notes", train.notes), ("val notes", others)) if notes
    }


def _names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
