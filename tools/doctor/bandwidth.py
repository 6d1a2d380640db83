"""Speed of an all-reduce within a machine and between machines, against the link."""

import timeit
from statistics import median

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from common.distributed.collectives import leave_process_group, node_group, subgroup
from tools.doctor.interfaces import find_interface, read_infiniband
from tools.doctor.table import Finding, judge
from tools.doctor.world import World

# By bytes; DDP's buckets have 25 MiB.
NUM_CALLS = {4 << 10: 20, 256 << 10: 10, 4 << 20: 5, 25 << 20: 3}
MAX_CALL_MS = 1000.0  # a size that would take longer for one call is left out
SLOW_MS = 5.0  # latency; neighbours in one data centre take 0.05 to 0.5 ms
# A fair share of the link's nominal speed. Gloo sends a pair's data over one TCP connection, which
# a core drives at 5 to 20 Gbit/s, so more than 10 Gbit/s is not expected of it.
NCCL_SHARE = 0.5
GLOO_SHARE = 0.2
GLOO_GBIT = 10.0


def measure_bandwidth(world: World) -> list[Finding]:
    """Form torch's process group; rows within a machine and between machines, measured by all ranks."""
    world_size = len(world.ranks)
    if world_size == 1:
        return []
    if any(world.exchange(world.is_cut)):
        return [Finding("network: bandwidth", "not run", "needs a process group")]
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    store = PrefixStore("group", world.store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world_size)
    try:
        nominal = {
            "network: within": 0.0,
            "network: between": min(world.exchange(_read_speed(backend))),
        }
        findings = []
        for check, group in (
            ("network: within", node_group()),
            ("network: between", subgroup(world.main_ranks)),
        ):
            results = world.exchange([world.hosts[world.rank], _measure(world.device, group)])
            results = [result for result in results if result[1]]
            if results:
                host, calls = min(results, key=lambda result: result[1][-1]["gbit"])
                findings.append(judge_link(check, backend, calls, nominal[check], host))
        return findings
    finally:
        leave_process_group()


def judge_link(check: str, backend: str, calls: list[dict], nominal: float, host: str) -> Finding:
    """Judge what was measured on the slowest machine, by size: a row.

    `nominal`: Gbit/s of the link; 0 if unknown.
    """
    latency = calls[0]["ms"]
    largest = calls[-1]
    size = f"{largest['bytes'] / 2**20:.3g} MiB in {largest['ms']:.3g} ms"
    measured = (
        f"{backend} all-reduce {largest['gbit']:.3g} Gbit/s ({size}), latency {latency:.2g} ms"
    )
    if nominal:
        measured += f"; the link has {nominal:.3g} Gbit/s"
    expected = NCCL_SHARE * nominal
    if backend == "gloo":
        expected = GLOO_SHARE * min(nominal, GLOO_GBIT)
    way_out = ""
    if largest["gbit"] < expected:
        way_out = (
            f"less than {expected:.3g} Gbit/s, a fair share of the link: look for other traffic, "
            "a limit of the switch or the virtual machine, errors (ip -s link) and the interface"
        )
    elif latency > SLOW_MS:
        way_out = (
            f"latency above {SLOW_MS:.0f} ms: every all-reduce waits so long; is the way long, "
            "through a VPN or a tunnel, or are the cores busy?"
        )
    place = host if check == "network: within" else "all"
    return judge(
        check, measured, bool(way_out), way_out, place=place, figures={"all-reduce": calls}
    )


def _measure(device: torch.device, group: dist.ProcessGroup | None) -> list[dict]:
    """Measure the time and bus bandwidth of an all-reduce, by size; [] outside of a group.

    Bus bandwidth is in bits per second over each link of a ring.
    """
    num_ranks = dist.get_world_size(group)
    calls: list[dict] = []
    if num_ranks < 2:
        return calls
    for size, repeats in NUM_CALLS.items():
        # The same on all ranks.
        if calls and calls[-1]["ms"] / calls[-1]["bytes"] * size > MAX_CALL_MS:
            break
        names = {
            "all_reduce": dist.all_reduce,
            "tensor": torch.ones(size // 4, device=device),
            "group": group,
        }
        call = "all_reduce(tensor, group=group); tensor[0].item()"  # which waits for the device
        times = timeit.repeat(call, globals=names, number=1, repeat=repeats + 1)
        # The time is that of the slowest rank; the first call, which connects, does not count.
        longest = torch.tensor(median(times[1:]), dtype=torch.float32, device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        seconds = longest.item()
        traffic = 2 * (num_ranks - 1) / num_ranks * size
        calls.append({"bytes": size, "ms": 1000 * seconds, "gbit": 8e-9 * traffic / seconds})
    return calls


def _read_speed(backend: str) -> float:
    """Nominal Gbit/s of what the backend takes on this machine; 0 if unknown."""
    infiniband = read_infiniband()
    if backend == "nccl" and infiniband:
        return infiniband
    return psutil.net_if_stats()[find_interface()].speed / 1000
