"""Clock: how far the clocks of the machines are apart, from pings over the store."""

import time
from datetime import timedelta

from torch.distributed import PrefixStore

from tools.doctor.finding import Finding
from tools.doctor.world import ANSWER_S, World

PINGS = 7
APART_MS = 1000.0  # logs of machines then can't be compared, and certificates and file times begin to fail


def clock(world: World) -> list[Finding]:
    """Rank 0 answers one machine after the other with its time; the ping with the shortest way there and back counts."""
    store = PrefixStore("clock", world.store) if world.store is not None else None
    measured = None
    for ranks in world.machines[1:]:
        first = ranks[0]
        for number in range(PINGS):
            if store is not None and world.is_main:
                store.wait([f"ping/{first}/{number}"], timedelta(seconds=ANSWER_S))
                store.set(f"pong/{first}/{number}", repr(time.time()))
            elif store is not None and world.rank == first:
                sent = time.time()
                store.set(f"ping/{first}/{number}", "")
                store.wait([f"pong/{first}/{number}"], timedelta(seconds=ANSWER_S))
                there, came = float(store.get(f"pong/{first}/{number}")), time.time()
                sample = (came - sent, (sent + came) / 2 - there)
                measured = min(measured or sample, sample)
    of_ranks = world.exchange(measured)
    if not world.is_main or len(world.machines) == 1:
        return []
    offsets = {world.hosts[rank]: round(1000 * pair[1], 1) for rank, pair in enumerate(of_ranks) if pair}
    rows = [
        Finding(
            "clock",
            "warning",
            f"{abs(offset):.0f} ms {'ahead of' if offset > 0 else 'behind'} {world.hosts[0]}",
            "start a time service there (chrony, systemd-timesyncd): logs and file times of the machines don't fit",
            host,
            {"offset_ms": offset},
        )
        for host, offset in offsets.items()
        if abs(offset) > APART_MS
    ]
    most = max(map(abs, offsets.values()))
    return rows or [Finding("clock", "ok", f"machines differ by at most {most:.0f} ms", figures={"offset_ms": offsets})]
