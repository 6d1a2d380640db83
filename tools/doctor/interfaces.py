"""Network interfaces that gloo and NCCL take, and whether machines reach each other's ports through them."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil

from common.launching.network import LOOPBACK, is_loopback
from tools.doctor.finding import Finding
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
    shown = "; ".join(f"{each} {', '.join(of) or 'without address'}" for each, of in present.items())
    figures = {"interfaces": {each: _describe(each) | {"addresses": of} for each, of in present.items()}}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if os.environ.get(variable) and not chosen(variable, present):
            measured = f"{variable}={os.environ[variable]}: this machine has {shown}"
            return [Finding(name, "failed", measured, "unset it or name one of these", figures=figures)]
    taken = chosen("GLOO_SOCKET_IFNAME", present)
    if not taken:
        return [Finding(name, "warning", f"unknown which is taken of {shown}", figures=figures)]
    link = _describe(taken)
    if not link["up"]:
        return [Finding(name, "failed", f"{taken} is down", f"ip link set {taken} up", figures=figures)]
    speed = f", {_speed(link)}" if link["mbit"] else ""
    measured = f"{taken} ({', '.join(present[taken]) or 'no address'}{speed}, MTU {link['mtu']})"
    if devices := infiniband():
        measured += f"; InfiniBand {', '.join(f'{each} {rate} Gbit/s' for each, rate in devices.items())}"
    best = max(present, key=lambda each: link_speed(each) or 0)
    if not is_single(world) and (link_speed(best) or 0) > (link["mbit"] or 10**9):
        way_out = f"{best} has {_speed(_describe(best))}: export GLOO_SOCKET_IFNAME={best} NCCL_SOCKET_IFNAME={best}"
        return [Finding(name, "warning", measured, f"{way_out} if it joins the machines", figures=figures)]
    return [Finding(name, "ok", measured, figures=figures)]


def host_name(world: World) -> list[Finding]:
    """What this machine's own name resolves to. The recipes avoid a loopback address; other programs announce it to others."""
    try:
        address = socket.gethostbyname(world.host)
    except OSError:
        address = ""
    if not address:
        way_out = f"add '{_outward()} {world.host}' to /etc/hosts; gloo without GLOO_SOCKET_IFNAME fails"
        return [Finding("network: host name", "warning", f"{world.host} is not known on this machine", way_out)]
    if is_loopback(address) and not is_single(world):
        taken = os.environ.get("GLOO_SOCKET_IFNAME")
        measured = f"{world.host} is {address}" + (f"; the recipes take {taken} instead" if taken else "")
        way_out = f"others can't reach it: put '{_outward()} {world.host}' into /etc/hosts or export GLOO_SOCKET_IFNAME"
        return [Finding("network: host name", "ok" if taken else "failed", measured, "" if taken else way_out)]
    return [
        Finding("network: host name", "ok", f"resolves to {'a loopback' if is_loopback(address) else 'its'} address")
    ]


def same_mtu(world: World) -> list[Finding]:
    """A row for each machine whose interface has another MTU or speed than that of rank 0's."""
    taken = chosen("GLOO_SOCKET_IFNAME", addresses())
    of_ranks = world.exchange([taken, _describe(taken) if taken else {}])
    if not world.is_main:
        return []
    rows = []
    first = of_ranks[0][1]
    for ranks in world.machines[1:]:
        link = of_ranks[ranks[0]][1]
        host = world.hosts[ranks[0]]
        if link.get("mtu") != first.get("mtu"):
            measured = f"MTU {link.get('mtu')}, {world.hosts[0]} has {first.get('mtu')}"
            way_out = f"large packets get lost or are split: ip link set {of_ranks[ranks[0]][0]} mtu {first.get('mtu')}"
            rows.append(Finding("network: MTU", "warning", measured, way_out, host, {"mtu": link.get("mtu")}))
        if link.get("mbit") != first.get("mbit"):
            measured = f"{_speed(link)}, {world.hosts[0]} has {_speed(first)}"
            way_out = "all machines wait for the slowest link: check cable, port and driver"
            rows.append(Finding("network: speed", "warning", measured, way_out, host, {"mbit": link.get("mbit")}))
    return rows


def ports(world: World) -> list[Finding]:
    """Connects to ports that the system chose, as torch's own connections are, from each machine to the others."""
    if is_single(world):
        return []
    with ExitStack() as stack:
        own = _own_address()
        count = PORTS if world.is_local_main else 0
        listeners = [stack.enter_context(socket.create_server((own, 0))) for _ in range(count)]
        offers = world.exchange([own, [each.getsockname()[1] for each in listeners]])
        machines = world.machines
        place = next(number for number, ranks in enumerate(machines) if world.rank in ranks)
        others = [ranks[0] for ranks in machines[place + 1 :] + machines[:place]]
        others = others[:PARTNERS] if world.is_local_main else []
        targets = [(rank, offers[rank][0], port) for rank in others for port in offers[rank][1]]
        with ThreadPoolExecutor(max(1, len(targets))) as pool:
            results = [*pool.map(lambda target: connect(target[1], target[2]), targets)]
        failures = [(rank, port, why) for (rank, _, port), why in zip(targets, results, strict=True) if why]
        of_ranks = world.exchange(failures)  # the listeners stay open until all have tried
    world.is_cut |= any(of_ranks)
    if not world.is_main:
        return []
    rows = []
    for rank, failed in enumerate(of_ranks):
        for other in dict.fromkeys(to for to, *_ in failed):
            tried = [(port, why) for to, port, why in failed if to == other]
            whys = ", ".join(dict.fromkeys(why for _, why in tried))
            measured = (
                f"{world.hosts[rank]} -> {world.hosts[other]} ({offers[other][0]}): {len(tried)} of {PORTS} ports {whys}, "
                f"such as {tried[0][0]}"
            )
            way_out = (
                "firewall: let all TCP ports between the machines through, both ways; torch takes any that is free"
            )
            figures = {"from": world.hosts[rank], "to": world.hosts[other], "failed": tried}
            rows.append(Finding("network: ports", "failed", measured, way_out, figures=figures))
    return rows or [
        Finding("network: ports", "ok", f"{PORTS} system-chosen ports open between all machines, both ways")
    ]


def connect(host: str, port: int) -> str:
    """Why a connection fails, as "filtered (no answer)", "refused" or the system's words; "" if it is made."""
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
    return {
        name: [each.address for each in entries if each.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


def chosen(variable: str, present: dict[str, list[str]]) -> str | None:
    """The first interface that a variable of gloo or NCCL selects; None if none fits or it is not set.

    NCCL reads a list of prefixes; `=` means exact names, `^` all but these. Gloo reads a list of names.
    """
    value = os.environ.get(variable, "")
    if not value:
        return None
    exact = variable.startswith("GLOO") or value.startswith(("=", "^="))
    words = value.lstrip("^=").split(",")
    fits = [name for name in present if any(name == word if exact else name.startswith(word) for word in words)]
    if value.startswith("^"):
        fits = [name for name in present if name not in fits and name != "lo"]
    return next(iter(fits), None)


def link_speed(name: str) -> int | None:
    """Nominal speed of an interface in Mbit/s; None if it has none, as the loopback, or does not tell."""
    try:
        mbit = int((_NET / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return mbit if mbit > 0 else None


def infiniband() -> dict[str, int]:
    """Active InfiniBand (or RoCE) devices with their rate in Gbit/s; none if NCCL is told not to use them."""
    found = {}
    if os.environ.get("NCCL_IB_DISABLE", "0") in ("0", "") and _INFINIBAND.is_dir():
        for port in sorted(_INFINIBAND.glob("*/ports/*")):
            if "ACTIVE" in (port / "state").read_text():
                found[port.parents[1].name] = int(float((port / "rate").read_text().split()[0]))
    return found


def is_single(world: World) -> bool:
    """Whether all processes are on one machine."""
    return world.local_world_size == world.world_size and len(world.machines) == 1


def _own_address() -> str:
    """The address that gloo announces."""
    present = addresses()
    taken = chosen("GLOO_SOCKET_IFNAME", present)
    return next(iter(present.get(taken or "", [])), LOOPBACK)


def _outward() -> str:
    return next((each for of in addresses().values() for each in of if not is_loopback(each)), "ADDRESS")


def _describe(name: str) -> dict:
    stats = psutil.net_if_stats().get(name)
    return {"up": bool(stats and stats.isup), "mtu": stats.mtu if stats else None, "mbit": link_speed(name)}


def _speed(link: dict) -> str:
    return f"{link['mbit'] / 1000:g} Gbit/s" if link.get("mbit") else "unknown speed"
