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
    """Print them; a `!` marks a goal that is missed."""
    print(f"{'':50}{'ours':>10}{'peer':>10}{'limit':>10}{'ratio':>9}{'goal':>8}  peer")
    for row in rows:
        goal = f"{row.goal:.3g}" if row.goal else ""
        missed = " " if not row.goal or row.ratio >= row.goal else "!"
        limit = f"{row.limit:.4g}" if row.limit is not None else ""
        print(
            f"{row.what:50}{row.ours:10.4g}{row.theirs:10.4g}{limit:>10}{row.ratio:9.2f}{goal:>7}{missed} {row.peer}"
            + f", {row.unit}" * bool(row.unit)
        )
