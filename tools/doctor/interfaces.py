"""Network interfaces that gloo and NCCL take, and ports of other machines."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil

from common.launching.network import LOOPBACK
from tools.doctor.finding import Finding, differing, judged, speed
from tools.doctor.world import World

PORTS = 4  # system-chosen ports that each machine tries at each other
CONNECT_S = 2.0  # longer than any connection takes: SYN is repeated after 1 s
PARTNERS = 16  # machines that each one tries
_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def interfaces(world: World) -> list[Finding]:
    """What gloo and NCCL take on this machine; on a single machine that is the loopback."""
    if world.world_size == 1:
        return []
    name, present = "network: interfaces", addresses()
    shown = said(present)
    taken, named = chosen(present), os.environ.get("GLOO_SOCKET_IFNAME")
    if not taken and named:
        measured = f"GLOO_SOCKET_IFNAME={named}: this machine has {shown}"
        return [Finding(name, "failed", measured, "unset it or name one of these")]
    if not taken:
        return [Finding(name, "warning", f"unknown which is taken of {shown}", "export GLOO_SOCKET_IFNAME with one")]
    stats = psutil.net_if_stats().get(taken)
    if not stats or not stats.isup:
        return [Finding(name, "failed", f"{taken} is down", f"ip link set {taken} up")]
    words = [*present[taken], *([speed(own)] if (own := link_speed(taken)) else []), f"MTU {stats.mtu}"]
    fast = [f"InfiniBand {device} {rate} Gbit/s" for device, rate in infiniband().items()]
    measured = "; ".join([f"{taken} ({', '.join(words)})", *fast])
    best = max(present, key=lambda each: link_speed(each) or 0)
    fastest = link_speed(best) or 0.0
    is_slower = not world.is_one_machine and fastest > (own or 1e9)
    export = f"{best} has {speed(fastest)}: export GLOO_SOCKET_IFNAME={best} NCCL_SOCKET_IFNAME={best}"
    return [judged(name, measured, (is_slower, "warning", f"{export} if it joins the machines"))]


def same_mtu(world: World) -> list[Finding]:
    """A row for each machine whose interface has another MTU than most."""
    stats = psutil.net_if_stats().get(chosen(addresses()) or "")
    lost = "large packets get lost or are split: ip link set INTERFACE mtu SIZE"
    return differing(world, "network: MTU", "warning", lost, {"MTU": stats.mtu if stats else None})


def ports(world: World) -> list[Finding]:
    """Connects each machine to ports of the others that the system chose, as torch does."""
    if world.is_one_machine:
        return []
    with ExitStack() as stack:
        present = addresses()
        taken = chosen(present) or ""
        own = next(iter(present.get(taken, [])), LOOPBACK)  # as gloo announces
        count = PORTS if world.is_local_main else 0
        listeners = [stack.enter_context(socket.create_server((own, 0))) for _ in range(count)]
        offers = world.exchange([own, [each.getsockname()[1] for each in listeners]])
        firsts = [ranks[0] for ranks in world.machines]
        place = firsts.index(world.rank) if world.is_local_main else 0
        others = [*firsts[place + 1 :], *firsts[:place]][: PARTNERS * world.is_local_main]
        targets = [(rank, offers[rank][0], port) for rank in others for port in offers[rank][1]]
        with ThreadPoolExecutor(max(1, len(targets))) as pool:
            results = [*pool.map(lambda target: connect(*target[1:]), targets)]
        failures = [(rank, port, why) for (rank, _, port), why in zip(targets, results, strict=True) if why]
        of_ranks = world.exchange(failures)  # the listeners stay open until all have tried
    world.is_cut |= any(of_ranks)
    rows = []
    way_out = "firewall: let all TCP ports between the machines through, both ways; torch takes any that is free"
    for rank, failed in enumerate(of_ranks):
        for other in dict.fromkeys(to for to, *_ in failed):
            tried = [(port, why) for to, port, why in failed if to == other]
            whys = ", ".join(dict.fromkeys(why for _, why in tried))
            way = f"{world.hosts[rank]} -> {world.hosts[other]} ({offers[other][0]})"
            measured = f"{way}: {len(tried)} of {PORTS} ports {whys}, such as {tried[0][0]}"
            rows.append(Finding("network: ports", "failed", measured, way_out))
    measured = f"{PORTS} system-chosen ports open between all machines, both ways"
    return rows or [Finding("network: ports", "ok", measured)]


def connect(host: str, port: int) -> str:
    """Why a connection fails; "" if it is made."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
        return ""
    except TimeoutError:
        return "filtered (no answer)"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return error.strerror or str(error)


def addresses() -> dict[str, list[str]]:
    """The IPv4 addresses of each interface."""
    found = psutil.net_if_addrs().items()
    return {name: [each.address for each in entries if each.family == socket.AF_INET] for name, entries in found}


def said(present: dict[str, list[str]]) -> str:
    """Interfaces with their addresses, in words."""
    return ", ".join(f"{name} {' '.join(of) or 'without address'}" for name, of in present.items())


def chosen(present: dict[str, list[str]]) -> str | None:
    """The interface that gloo takes: the first that GLOO_SOCKET_IFNAME names. None if none is named or there."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return next((name for name in present if name in named), None)


def link_speed(name: str) -> float | None:
    """Nominal speed of an interface in Gbit/s; None if it has none, as the loopback, or does not tell."""
    try:
        mbit = int((_NET / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return mbit / 1000 if mbit > 0 else None


def infiniband() -> dict[str, int]:
    """Active InfiniBand (or RoCE) devices that NCCL may use, with their rate in Gbit/s."""
    found = {}
    if os.environ.get("NCCL_IB_DISABLE", "0") in ("0", ""):
        for port in sorted(_INFINIBAND.glob("*/ports/*")):
            if "ACTIVE" in (port / "state").read_text():
                found[port.parents[1].name] = int(float((port / "rate").read_text().split()[0]))
    return found
