"""Speed of an all-reduce within a machine and between machines, against the link."""

import time
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from common.distributed.collectives import give_up_after, leave_process_group, subgroup
from tools.doctor.finding import Finding, judged, speed
from tools.doctor.interfaces import addresses, chosen, infiniband, link_speed
from tools.doctor.world import World

SIZES = {4 << 10: 20, 256 << 10: 10, 4 << 20: 5, 25 << 20: 3}  # bytes: calls; DDP's buckets have 25 MiB
LONGEST_S = 1.0  # a size that would take longer for one call is left out
SLOW_MS = 5.0  # latency; neighbours in one data centre take 0.05 to 0.5 ms
# A fair share of the link's nominal speed. Gloo sends a pair's data over one TCP connection, which a core drives at 5 to 20
# Gbit/s, so more than 10 Gbit/s is not expected of it.
FAIR, GLOO_GBIT = {"nccl": 0.5, "gloo": 0.2}, 10.0
GROUP = timedelta(seconds=45)  # longer than the check may take, whose own limit names the culprit


def bandwidth(world: World) -> list[Finding]:
    """Form torch's process group; rows within a machine and between machines, measured by all ranks."""
    if world.store is None:
        return []
    if any(world.exchange(world.is_cut)):
        return [Finding("network: bandwidth", "not run", "needs a process group")]
    give_up_after(GROUP)
    backend, store = "nccl" if world.device.type == "cuda" else "gloo", PrefixStore("group", world.store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=GROUP)
    try:
        # All machines measure at the same time; the slowest one is reported.
        within = [ranks for ranks in world.machines if len(ranks) > 1]
        rows = [_compare(world, "within", within)] if within else []
        between = [ranks[0] for ranks in world.machines]
        return [*rows, _compare(world, "between", [between])] if len(between) > 1 else rows
    finally:
        leave_process_group()


def _compare(world: World, where: str, groups: list[list[int]]) -> Finding:
    """Measure in each of these groups of ranks, and report the slowest."""
    joined = [(ranks, subgroup(ranks)) for ranks in groups]
    times = next((_measure(world, ranks, group) for ranks, group in joined if world.rank in ranks), None)
    of_ranks = world.exchange([times, _link(world) if where == "between" and times else None])
    found = [(times[-1]["gbit"], rank) for rank, (times, _) in enumerate(of_ranks) if times]
    rank, nominal = min(found)[1], min((link for _, link in of_ranks if link), default=None)
    host = f" on {world.hosts[rank]}" if where == "within" and len(world.machines) > 1 else ""
    return of_link(f"network: {where}", dist.get_backend(), of_ranks[rank][0], nominal, host)


def of_link(check: str, backend: str, slowest: list[dict], nominal: float | None, host: str = "") -> Finding:
    """The row for what was measured. `nominal`: what the link should do."""
    smallest, *_, largest = slowest
    measured = (
        f"{backend} all-reduce {speed(largest['gbit'])} ({largest['bytes'] / 2**20:.3g} MiB in {largest['ms']:.3g} ms), "
        f"latency {smallest['ms']:.2g} ms{host}" + (f"; the link has {speed(nominal)}" if nominal else "")
    )
    expected = FAIR[backend] * (min(nominal or 0, GLOO_GBIT) if backend == "gloo" else nominal or 0)
    traffic = (
        "look for other traffic, a limit of the switch or the virtual machine, errors (ip -s link) and the interface"
    )
    far = "is the way long, through a VPN or a tunnel, or are the cores busy?"
    return judged(
        check,
        measured,
        (largest["gbit"] < expected, "warning", f"less than {speed(expected)}, a fair share of the link: {traffic}"),
        (smallest["ms"] > SLOW_MS, "warning", f"latency above {SLOW_MS:.0f} ms: every all-reduce waits so long; {far}"),
        figures={"all-reduce": slowest},
    )


def _measure(world: World, ranks: list[int], group) -> list[dict]:
    """Time and bus bandwidth (bits per second over each link of a ring) of an all-reduce, by size."""
    found: list[dict] = []
    for size, repeats in SIZES.items():
        if found and found[-1]["ms"] / found[-1]["bytes"] * size > 1000 * LONGEST_S:  # the same on all ranks
            break
        times, tensor = [], torch.ones(size // 4, device=world.device)
        for _ in range(repeats + 1):
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            if world.device.type == "cuda":
                torch.accelerator.synchronize(world.device)
            times.append(time.perf_counter() - began)
        # Of the slowest rank; the first call, which connects, does not count.
        agreed = torch.tensor(median(times[1:]), dtype=torch.float32, device=world.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        seconds, traffic = float(agreed), 2 * (len(ranks) - 1) / len(ranks)
        found.append({"bytes": size, "ms": 1000 * seconds, "gbit": 8e-9 * traffic * size / seconds})
    return found


def _link(world: World) -> float | None:
    """Nominal Gbit/s of what the backend takes on this machine; None if unknown."""
    if world.device.type == "cuda" and (devices := infiniband()):
        return float(max(devices.values()))
    return link_speed(chosen(addresses()) or "")
