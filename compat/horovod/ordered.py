"""Groups for collectives that all ranks begin in the same order, so that nothing needs to be negotiated.

Each purpose has a group of its own: what travels over it never meets the negotiated operations or another purpose's.
"""

from collections.abc import Hashable, Sequence

import torch.distributed as dist

_groups: dict[Hashable, dist.ProcessGroup] = {}
_world: dist.ProcessGroup | None = None


def ordered_group(purpose: Hashable, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """The group of `ranks` (all by default) for one purpose, made at the first call after init.

    The first call is a collective of these ranks, and they make the groups that they share in the same order.
    """
    global _world
    if _world is not dist.group.WORLD:
        _groups.clear()  # of a world that was shut down
        _world = dist.group.WORLD
    key = (purpose, tuple(ranks) if ranks else None)
    if key not in _groups:
        members = [*ranks] if ranks else [*range(dist.get_world_size())]
        _groups[key] = dist.new_group(members, use_local_synchronization=True, group_desc=f"horovod {purpose}")
    return _groups[key]
