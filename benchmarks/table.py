"""The table that all benchmarks share: one `Row` per comparison, and `show`, which prints them."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Row:
    """One comparison. `ratio` above 1 means that ours is better; it compares repetitions of one run if there are any."""

    what: str
    unit: str
    ours: float
    peer: str
    theirs: float
    ratio: float
    limit: float | None = None  # a bound for any implementation, in the same unit
    goal: float | None = None  # for the ratio


def show(rows: Iterable[Row]) -> None:
    """Prints the rows; `!` marks a missed goal."""
    print(f"{'':50}{'ours':>10}{'peer':>10}{'bound':>10}{'ratio':>9}{'goal':>8}  peer")
    for row in rows:
        goal = f"{row.goal:.3g}" if row.goal else ""
        missed = " " if not row.goal or row.ratio >= row.goal else "!"
        limit = f"{row.limit:.4g}" if row.limit is not None else ""
        print(
            f"{row.what:50}{row.ours:10.4g}{row.theirs:10.4g}{limit:>10}{row.ratio:9.2f}{goal:>7}{missed} {row.peer}"
            + f", {row.unit}" * bool(row.unit)
        )
