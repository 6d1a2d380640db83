"""The table that all benchmarks share: one `Row` per comparison, and `show`, which prints them; and their command line."""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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


def script(docstring: str, measure: Callable[[bool, bool], Any], table: Callable[[Any], list[Row]]) -> None:
    """The command line of a script: prints `table` of what `measure(quick, brief)` gives, and writes that to --output."""
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it works: little of everything")
    parser.add_argument("--brief", action="store_true", help="fewer repetitions, as for `make bench`")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    arguments = parser.parse_args()
    result = measure(arguments.quick, arguments.brief)
    show(table(result))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2, default=asdict) + "\n")
