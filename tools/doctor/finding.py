"""Finding: what one check of the doctor measured, and the way out if it is not what a run needs."""

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "warning", "failed", "not run"]


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    `check` is a name such as "network: all-reduce"; `place` is what it is about: "all", "rank 3" or "host a".
    `measured` says the value with its unit. `way_out` is empty if all is well, else the cause and what to do, in one line.
    `figures` are the numbers behind it, for --json: plain numbers, strings, lists and dicts.
    """

    check: str
    status: Status
    measured: str
    way_out: str = ""
    place: str = "all"
    figures: dict = field(default_factory=dict)
