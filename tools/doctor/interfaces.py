"""Network interfaces that gloo and NCCL take, and ports of other machines."""

import os
import socket
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil

from common.launching.network import LOOPBACK
from tools.doctor.table import Finding, judge, name_ranks
from tools.doctor.world import World

PORTS = 4  # system-chosen ports that each machine tries at each other
CONNECT_S = 2.0  # longer than any connection takes: SYN is repeated after 1 s
PARTNERS = 16  # machines that each one tries
_INFINIBAND = Path("/sys/class/infiniband")


def check_interface(world: World) -> list[Finding]:
    """What gloo and NCCL take on this machine; on a single machine that is the loopback."""
    check = "network: interfaces"
    name = find_interface()
    if not name:  # one process, or no route to rank 0, which `meet` has reported
        return []
    interfaces = psutil.net_if_stats()
    if name not in interfaces:
        measured = f"GLOO_SOCKET_IFNAME={name}: this machine has {', '.join(interfaces)}"
        return [Finding(check, "failed", measured, "unset it or name one of these")]
    if not interfaces[name].isup:
        return [Finding(check, "failed", f"{name} is down", f"ip link set {name} up")]
    # 0 if it does not tell.
    speeds = {each: interface.speed / 1000 for each, interface in interfaces.items()}
    speed = f", {speeds[name]:.3g} Gbit/s" if speeds[name] else ""
    measured = f"{name} ({read_address(name)}{speed}, MTU {interfaces[name].mtu})"
    infiniband = read_infiniband()
    if infiniband:
        measured += f"; InfiniBand {infiniband:.3g} Gbit/s"
    best = max(speeds, key=speeds.__getitem__)
    is_one_machine = world.launch.local_world_size == world.launch.world_size
    is_slower = not is_one_machine and speeds[best] > (speeds[name] or 1.0)
    exports = f"GLOO_SOCKET_IFNAME={best} NCCL_SOCKET_IFNAME={best}"
    way_out = f"{best} has {speeds[best]:.3g} Gbit/s: export {exports} if it joins the machines"
    return [judge(check, measured, is_slower, way_out)]


def compare_mtus(world: World) -> list[Finding]:
    """A row for the machines whose interface has another MTU than most."""
    interface = psutil.net_if_stats().get(find_interface())
    mtus = world.exchange(interface.mtu if interface else 0)
    usual = statistics.mode(mtus)
    odd_ranks = [rank for rank in world.ranks if mtus[rank] != usual]
    if not odd_ranks:
        return []
    measured = f"MTU {mtus[odd_ranks[0]]} instead of {usual}"
    way_out = "large packets get lost or are split: ip link set INTERFACE mtu SIZE"
    return [
        Finding("network: MTU", "warning", measured, way_out, name_ranks(odd_ranks, world.hosts))
    ]


def try_ports(world: World) -> list[Finding]:
    """Connect each machine to ports of the others that the system chose, as torch does."""
    main_ranks = world.main_ranks
    if len(main_ranks) < 2:
        return []
    partners: list[int] = []
    with ExitStack() as stack:
        address = read_address(find_interface())  # as gloo announces
        ports = []
        if world.rank in main_ranks:
            index = main_ranks.index(world.rank)
            partners = (main_ranks[index + 1 :] + main_ranks[:index])[:PARTNERS]
            for _ in range(PORTS):
                listener = stack.enter_context(socket.create_server((address, 0)))
                ports.append(listener.getsockname()[1])
        offers = world.exchange([address, ports])

        def try_machine(rank: int) -> str:
            address, ports = offers[rank]
            try:
                for port in ports:
                    socket.create_connection((address, port), CONNECT_S).close()
            except OSError as error:
                return (
                    f"{world.hosts[world.rank]} -> {world.hosts[rank]}: port {port} of {address}: "
                    f"{error}"
                )
            return ""

        with ThreadPoolExecutor(PARTNERS) as pool:
            failures = [text for text in pool.map(try_machine, partners) if text]
        world.is_cut |= any(world.exchange(failures))  # the listeners are open until all have tried
    if world.is_cut:
        way_out = (
            "firewall: let all TCP ports between the machines through, both ways; torch takes any "
            "that is free"
        )
        return [Finding("network: ports", "failed", text, way_out, "all") for text in failures]
    return [
        Finding(
            "network: ports",
            "ok",
            f"{PORTS} system-chosen ports open between all machines, both ways",
        )
    ]


def read_address(name: str) -> str:
    """The first IPv4 address of an interface."""
    for entry in psutil.net_if_addrs().get(name, []):
        if entry.family == socket.AF_INET:
            return entry.address
    return LOOPBACK


def find_interface() -> str:
    """Find the interface that gloo takes: the first that GLOO_SOCKET_IFNAME names.

    `choose_interface` sets this variable.
    """
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def read_infiniband() -> float:
    """Nominal Gbit/s of the fastest InfiniBand (or RoCE) port that NCCL may use; 0 if none is active."""
    rates = [0.0]
    if os.environ.get("NCCL_IB_DISABLE", "0") in ("0", ""):
        for port in _INFINIBAND.glob("*/ports/*"):
            if "ACTIVE" in (port / "state").read_text():
                rate = (port / "rate").read_text().split()[0]  # of "200 Gb/sec (4X HDR)"
                rates.append(float(rate))
    return max(rates)
