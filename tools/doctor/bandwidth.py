"""Speed of all-reduce and broadcast within a machine and between machines, against the link."""

import time
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from common.distributed.collectives import give_up_after, leave_process_group, subgroup
from tools.doctor.finding import Finding
from tools.doctor.interfaces import addresses, chosen, infiniband, link_speed
from tools.doctor.world import World

SIZES = (4 << 10, 256 << 10, 4 << 20, 25 << 20)  # bytes; DDP sums gradients in buckets of 25 MiB
BUDGET_S = 0.3  # for one size
LONGEST_S = 1.0  # a size that would take longer for one call is left out
SLOW_MS = 5.0  # latency; neighbours in one data centre take 0.05 to 0.5 ms
# A fair share of the link's nominal speed. Gloo sends a pair's data over one TCP connection, which a core drives at 5 to 20
# Gbit/s, so more than 10 Gbit/s is not expected of it.
FAIR, GLOO_GBIT = {"nccl": 0.5, "gloo": 0.2}, 10.0
GROUP = timedelta(
    seconds=45
)  # timeout of collectives: longer than the check may take, whose own limit names the culprit


def bandwidth(world: World) -> list[Finding]:
    """Form torch's process group; rows within a machine and between machines, measured by all ranks, reported by rank 0."""
    if world.store is None:
        return []
    if any(world.exchange(world.is_cut)):
        return [Finding("network: bandwidth", "not run", "needs a process group")] if world.is_main else []
    give_up_after(GROUP)
    backend, store = "nccl" if world.device.type == "cuda" else "gloo", PrefixStore("group", world.store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=GROUP)
    try:
        return _of_groups(world)
    finally:
        leave_process_group()


def _of_groups(world: World) -> list[Finding]:
    machines = world.machines
    rows = []
    fullest = max(machines, key=len)
    if len(fullest) > 1:
        # All machines measure at the same time; the slowest one is reported.
        groups = {tuple(ranks): subgroup(ranks) for ranks in machines if len(ranks) > 1}
        mine = next((ranks for ranks in groups if world.rank in ranks), None)
        rows += _compare(world, "within a machine", mine, groups.get(mine) if mine else None)
    if len(machines) > 1:
        first = tuple(ranks[0] for ranks in machines)
        group = subgroup(first)
        is_in = world.rank in first
        rows += _compare(world, "between machines", first if is_in else None, group if is_in else None)
    return rows


def _compare(world: World, where: str, ranks: tuple[int, ...] | None, group) -> list[Finding]:
    times = _measure(world, ranks, group) if ranks else None
    link = _link(world) if where == "between machines" else None
    of_ranks = [(rank, *found) for rank, found in enumerate(world.exchange([times, link])) if found[0]]
    if not world.is_main:
        return []
    backend = dist.get_backend()
    rank, slowest, _ = min(of_ranks, key=lambda found: found[1]["all-reduce"][-1]["gbit"])
    links = [link for *_, link in of_ranks if link]
    nominal = min(links) if links else None
    figures = {"backend": backend, "slowest": world.name(rank), "link_gbit": nominal} | slowest
    host = f" on {world.hosts[rank]}" if where == "within a machine" and len(world.machines) > 1 else ""
    name = {"within a machine": "network: within", "between machines": "network: between"}[where]
    largest, smallest = slowest["all-reduce"][-1], slowest["all-reduce"][0]
    broadcast = slowest["broadcast"][-1]
    measured = (
        f"{backend} all-reduce {_gbit(largest['gbit'])} ({largest['bytes'] / 2**20:.3g} MiB in {largest['ms']:.3g} ms), "
        f"latency {smallest['ms']:.2g} ms, broadcast {_gbit(broadcast['gbit'])}{host}"
    )
    rows = []
    if nominal:
        expected = FAIR[backend] * (min(nominal, GLOO_GBIT) if backend == "gloo" else nominal)
        measured += f"; the link has {_gbit(nominal)}"
        if largest["gbit"] < expected:
            way_out = (
                f"less than {_gbit(expected)}, a fair share of the link: look for other traffic, a limit of the switch or the "
                "virtual machine, errors (ip -s link) and the interface that is taken"
            )
            rows.append(Finding(name, "warning", measured, way_out, figures=figures))
    if smallest["ms"] > SLOW_MS:
        far = (
            "are the machines far apart, or does a VPN or tunnel lie between them?" if links else "are the cores busy?"
        )
        way_out = f"latency above {SLOW_MS:.0f} ms: every all-reduce waits so long; {far}"
        rows.append(Finding(name, "warning", measured, way_out, figures=figures))
    return rows or [Finding(name, "ok", measured, figures=figures)]


def _measure(world: World, ranks: tuple[int, ...], group) -> dict[str, list[dict]]:
    """Time and bus bandwidth of each collective by size. Bus bandwidth: bits per second over each link of a ring."""
    count = len(ranks)
    calls = {
        "all-reduce": (lambda tensor: dist.all_reduce(tensor, group=group), 2 * (count - 1) / count),
        "broadcast": (lambda tensor: dist.broadcast(tensor, ranks[0], group=group), 1.0),
    }
    found: dict[str, list[dict]] = {}
    for name, (call, traffic) in calls.items():
        rows = found.setdefault(name, [])
        per_byte = 0.0
        for size in SIZES:
            if per_byte * size > LONGEST_S:  # the same on all ranks: `seconds` is agreed
                break
            tensor = torch.ones(size // 4, device=world.device)
            seconds = _agreed(_seconds(world, call, tensor, 2), world, group)
            repeats = int(min(20, max(3, BUDGET_S / max(seconds, 1e-6))))
            seconds = _agreed(_seconds(world, call, tensor, repeats), world, group)
            per_byte = seconds / size
            rows.append({"bytes": size, "ms": 1000 * seconds, "gbit": 8e-9 * traffic * size / seconds})
    return found


def _seconds(world: World, call, tensor: torch.Tensor, repeats: int) -> float:
    """Median time of a call; the first one, which connects, does not count."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call(tensor)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - began)
    return median(times[1:])


def _agreed(seconds: float, world: World, group) -> float:
    """The longest time of any rank of the group, so that all go on alike."""
    agreed = torch.tensor(seconds, dtype=torch.float32, device=world.device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
    return float(agreed)


def _link(world: World) -> float | None:
    """Nominal Gbit/s of what the backend takes on this machine; None if unknown."""
    if world.device.type == "cuda" and (devices := infiniband()):
        return float(max(devices.values()))
    variable = "NCCL_SOCKET_IFNAME" if world.device.type == "cuda" else "GLOO_SOCKET_IFNAME"
    mbit = link_speed(chosen(variable, addresses()) or "")
    return mbit / 1000 if mbit else None


def _gbit(value: float) -> str:
    return f"{value:.3g} Gbit/s" if value >= 0.1 else f"{1000 * value:.3g} Mbit/s"
