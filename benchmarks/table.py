"""For all benchmarks: turns of several ways, the table with a `Row` per comparison, the command line."""

import argparse
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Row:
    """One comparison. `ratio` above 1 means that ours is better; it compares repetitions of one run
    if there are any.
    """

    name: str
    unit: str
    ours: float
    peer: str
    peer_value: float
    ratio: float
    goal: float | None = None  # for the ratio


def take_turns(ways: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, list[Any]]:
    """What each way returns in each turn. Turns go through the ways forwards and backwards."""
    values: dict[str, list[Any]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(turns):
        order.reverse()
        for name in order:
            values[name].append(ways[name]())
    return values


def compare(
    name: str,
    unit: str,
    values: Mapping[str, list[float]],
    peer: str,
    ours: str = "ours",
    goal: float | None = None,
) -> Row:
    """The row of two ways: their medians, and the median ratio of a turn. More is better of units ".../s"."""
    ratios = []
    for value, peer_value in zip(values[ours], values[peer], strict=True):
        ratios.append(value / peer_value if unit.endswith("/s") else peer_value / value)
    median = statistics.median(values[ours])
    peer_median = statistics.median(values[peer])
    return Row(name, unit, median, peer, peer_median, statistics.median(ratios), goal)


def show(rows: Iterable[Row]) -> None:
    """Prints the rows; `!` marks a missed goal."""
    print(f"{'':65}{'ours':>10}{'peer':>10}{'ratio':>9}{'goal':>8}  peer, unit")
    for row in rows:
        goal = f"{row.goal:.3g}" if row.goal else ""
        mark = "!" if row.goal and row.ratio < row.goal else " "
        figures = f"{row.ours:10.4g}{row.peer_value:10.4g}{row.ratio:9.2f}{goal:>7}{mark}"
        print(f"{row.name:65}{figures} {row.peer}, {row.unit}")


def run_script(docstring: str, measure: Callable[[int, bool], list[Row]]) -> None:
    """The command line of a script: prints the rows of `measure(turns, quick)`, whose torch has one
    thread.
    """
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0])
    parser.add_argument(
        "--turns", type=int, default=5, help="repetitions (default: 5; `make bench`: 2)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="only check that it works: little of everything, once"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(1 if args.quick else args.turns, args.quick)
    if os.environ.get("RANK", "0") == "0":
        show(rows)
