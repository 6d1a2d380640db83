"""Finding: what one check of the doctor measured, and the way out if it is not what a run needs."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from tools.doctor.world import NAMED, World, places

Status = Literal["ok", "warning", "failed", "not run"]
GIB = 2**30


def speed(gbit: float) -> str:
    """In words: 10 Gbit/s, 50 Mbit/s."""
    return f"{gbit:.3g} Gbit/s" if gbit >= 0.1 else f"{1000 * gbit:.3g} Mbit/s"


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    `check` is a name such as "network: all-reduce"; `place` is what it is about: "all", "rank 3" or "host a".
    `measured` says the value with its unit. `way_out` is empty if all is well, else the cause and what to do, in one line.
    `figures` are the numbers behind a measurement, for --json and for other checks.
    """

    check: str
    status: Status
    measured: str
    way_out: str = ""
    place: str = "all"
    figures: dict = field(default_factory=dict)


def judged(
    check: str, measured: str, *troubles: tuple[bool, Status, str], place: str = "all", figures: dict | None = None
) -> Finding:
    """A row with the first trouble, of (whether it is there, status, way out); ok if there is none."""
    status, way_out = next(((status, way) for is_there, status, way in troubles if is_there), ("ok", ""))
    return Finding(check, status, measured, way_out, place, figures or {})


def differing(world: World, check: str, status: Status, way_out: str, value: dict[str, Any]) -> list[Finding]:
    """A row for each set of ranks whose `value` differs from most ranks', or rank 0's."""
    of_ranks = world.exchange(value)
    names = dict.fromkeys(sorted(name for theirs in of_ranks for name in theirs))
    by_texts: dict[str, list[int]] = {}
    usual = {name: Counter(theirs.get(name) for theirs in of_ranks).most_common(1)[0][0] for name in names}
    for rank, theirs in enumerate(of_ranks):
        pairs = [(name, theirs.get(name), usual[name]) for name in names if theirs.get(name) != usual[name]]
        if pairs:
            texts = [f"{name} {own or '(absent)'} instead of {most or '(absent)'}" for name, own, most in pairs]
            rest = f" and {len(pairs) - NAMED} more" if len(pairs) > NAMED else ""
            by_texts.setdefault(", ".join(texts[:NAMED]) + rest, []).append(rank)
    return [
        Finding(check, status, text, way_out, places(ranks, range(world.world_size), world.hosts))
        for text, ranks in by_texts.items()
    ]
