"""How are measurements shown, so that those of all scripts make one table? Shared by the scripts beside it."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Row:
    """One comparison. `ratio` above 1: ours is better; from turns in one run where there are turns."""

    what: str
    unit: str
    ours: float
    peer: str
    theirs: float
    ratio: float
    limit: float | None = None  # what nobody gets past, in the same unit
    goal: float | None = None  # of the ratio


def show(rows: Iterable[Row]) -> None:
    """Print them."""
    print(f"{'':46}{'ours':>11}{'peer':>11}{'ratio':>8}{'goal':>7}{'limit':>10}  peer")
    for row in rows:
        goal = f"{row.goal:g}" if row.goal else ""
        missed = " " if not row.goal or row.ratio >= row.goal else "!"
        limit = f"{row.limit:.4g}" if row.limit is not None else ""
        print(
            f"{row.what:46}{row.ours:11.4g}{row.theirs:11.4g}{row.ratio:8.2f}{goal:>6}{missed}{limit:>10}  "
            f"{row.peer}, {row.unit}"
        )
