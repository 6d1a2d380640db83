"""Requests: what a rank asks for, and whether the ranks ask for the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WORLD = 0  # id of the process set of all ranks
JOIN = "<join>"
AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)

_AGREED = {
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
_BY_ROWS = (*_RAGGED, "reducescatter")  # whose tensors need a first dimension


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
        """The dimensions that ranks must agree about: not the first one of ragged kinds, for which
        -1 stands.
        """
        if self.kind not in _RAGGED:
            return self.shapes
        return [[-1, *shape[1:]] if shape else [] for shape in self.shapes]


def disagreement(requests: Mapping[int, Request], members: Sequence[int], size: int) -> str:
    """What makes a collective of `members` impossible that all of them, but for joined ranks, have
    asked for; "" if nothing.

    `size` is the number of ranks in the world.
    """
    (first, model), *others = sorted(requests.items())
    title = f"{model.kind} '{model.name}'" + f" of process set {[*members]}" * (len(members) < size)
    for rank, request in others:
        for name, words in _AGREED.items():
            here, there = getattr(model, name), getattr(request, name)
            if here != there:
                return (
                    f"{title}: mismatched {words}: {here} on rank {first}, {there} on rank {rank}"
                )
    if model.kind in _BY_ROWS and [] in model.shapes:
        return f"{title}: rank {first} gives a tensor of no dimensions, which has no rows"
    if model.kind == "broadcast" and model.root not in members:
        return f"{title}: root rank {model.root} is not in the process set {[*members]}"
    if model.kind == "add_process_set" and not {*model.ranks} <= {*range(size)}:
        return f"{title}: there are {size} ranks, not all of {model.ranks}"
    # A joined rank supplies zeros, which are neutral to sums and averages only.
    if len(requests) < len(members) and (
        model.kind != "allreduce" or model.op not in (AVERAGE, SUM)
    ):
        joined = [rank for rank in members if rank not in requests]
        return f"{title}: ranks {joined} have joined, and can only take part in sums and averages"
    return ""
