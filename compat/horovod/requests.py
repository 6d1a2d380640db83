"""Requests: what a rank requests, and whether the ranks request the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WORLD = 0  # id of the process set of all ranks
JOIN = "<join>"
AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)

# Fields in which requests must be equal, with their names for people.
_AGREED_FIELDS = {
    "kind": "operations",
    "dtypes": "data types",
    "device": "kinds of device",
    "op": "reductions",
    "root": "root ranks",
    "prescale": "prescale factors",
    "postscale": "postscale factors",
    "ranks": "process sets",
    "label": "parameters",
    "fixed_shapes": "shapes",
}
_RAGGED = ("allgather", "alltoall")  # whose tensors may differ in the first dimension
_BY_ROWS = ("allgather", "alltoall", "reducescatter")  # whose tensors need a first dimension


@dataclass
class Request:
    """Ranks must agree about all fields, except for the rows of ragged kinds and their splits."""

    # Allreduce, allgather, broadcast, alltoall, reducescatter, barrier, join, add_process_set, ...
    kind: str
    name: str
    # One per tensor: a grouped collective has several.
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    device: str = "cpu"
    op: int = SUM
    root: int = 0  # rank in the world
    label: int = 0  # a checksum of the names of parameters
    prescale: float = 1.0
    postscale: float = 1.0
    splits: list[int] = field(default_factory=list)  # rows for each rank, of alltoall
    ranks: list[int] = field(default_factory=list)  # of the process set that is added or removed

    @property
    def fixed_shapes(self) -> list[list[int]]:
        """The dimensions that ranks must agree about; -1 stands for the first one of ragged kinds."""
        if self.kind not in _RAGGED:
            return self.shapes
        return [[-1] + shape[1:] if shape else [] for shape in self.shapes]

    @property
    def allows_joined(self) -> bool:
        """True if zeros of joined ranks are neutral: of sums and averages."""
        return self.kind == "allreduce" and self.op in (AVERAGE, SUM)


def find_disagreement(requests: Mapping[int, Request], members: Sequence[int], size: int) -> str:
    """Find what makes a collective of `members` impossible; "" if nothing does.

    All members, but for joined ranks, have requested it. `size` is the number of ranks in the
    world.
    """
    first_rank = min(requests)
    first = requests[first_rank]
    title = f"{first.kind} '{first.name}'"
    if len(members) < size:
        title += f" of process set {list(members)}"
    for rank, request in sorted(requests.items()):
        for name, description in _AGREED_FIELDS.items():
            expected = getattr(first, name)
            actual = getattr(request, name)
            if actual != expected:
                return (
                    f"{title}: mismatched {description}: {expected} on rank {first_rank}, "
                    f"{actual} on rank {rank}"
                )
    if first.kind in _BY_ROWS and [] in first.shapes:
        return f"{title}: rank {first_rank} gives a tensor of no dimensions, which has no rows"
    if first.kind == "broadcast" and first.root not in members:
        return f"{title}: root rank {first.root} is not in the process set {list(members)}"
    if first.kind == "add_process_set" and not set(first.ranks) <= set(range(size)):
        return f"{title}: there are {size} ranks, not all of {first.ranks}"
    joined = [rank for rank in members if rank not in requests]
    if joined and not first.allows_joined:
        return f"{title}: ranks {joined} have joined, and can only take part in sums and averages"
    return ""
