"""For all benchmarks: turns of several ways, the table with a `Row` per comparison, the command line."""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
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


def take_turns(ways: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """What each way returns in each turn. Turns go through the ways forwards and backwards."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            taken[name].append(ways[name]())
    return taken


def compare(what: str, unit: str, taken: Mapping[str, list], peer: str, ours: str = "ours", **more: Any) -> Row:
    """The row of two ways: their medians, and the median ratio of a turn. More is better of units ".../s"."""
    mine, theirs = taken[ours], taken[peer]
    pairs = zip(mine, theirs, strict=True)
    ratio = statistics.median(a / b if unit.endswith("/s") else b / a for a, b in pairs)
    return Row(what, unit, statistics.median(mine), peer, statistics.median(theirs), ratio, **more)


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


def script(docstring: str, measure: Callable[[bool, bool], tuple[list[Row], Any]]) -> None:
    """The command line of a script: prints the rows that `measure(quick, brief)` gives.

    With --output it writes them and its other figures to a JSON file: {"rows": ..., "figures": ...}.
    """
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it works: little of everything")
    parser.add_argument("--brief", action="store_true", help="fewer repetitions, as for `make bench`")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    arguments = parser.parse_args()
    rows, figures = measure(arguments.quick, arguments.brief)
    if os.environ.get("RANK", "0") != "0":
        return
    show(rows)
    if arguments.output:
        result = {"rows": [asdict(row) for row in rows], "figures": figures}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
