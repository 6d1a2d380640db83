"""Each check of the doctor tells good from bad by its threshold, and names the odd one."""

import resource
from types import SimpleNamespace

import pytest
import torch

from tools.doctor import bandwidth, gpus, interfaces, limits, versions
from tools.doctor.world import World


def test_limits_are_judged_by_what_a_run_needs(monkeypatch, tmp_path) -> None:
    given = dict.fromkeys((resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CPU), -1)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (given.get(what, -1), -1))
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    monkeypatch.setattr(limits.os, "geteuid", lambda: 1000)

    def found(world: World | None = None) -> dict[str, tuple[str, str]]:
        return {
            row.check.removeprefix("limits: "): (row.status, row.measured) for row in limits.limits(world or World())
        }

    assert found()["ulimits"][0] == "ok"
    given.update({resource.RLIMIT_NOFILE: 1000, resource.RLIMIT_NPROC: 50, resource.RLIMIT_CPU: 3600})
    assert found()["open files"][0] == found()["processes"][0] == found()["CPU seconds"][0] == "warning"
    assert found(World(world_size=1000, local_world_size=1))["open files"] == ("warning", "1000, less than 8000")
    assert found()["/dev/shm"][0] == "ok"
    gpus_here = World(world_size=2, local_world_size=2, device=torch.device("cuda", 0))
    for size, alone, joined in ((64, "ok", "warning"), (1, "failed", "failed"), (8192, "ok", "ok")):
        disk = SimpleNamespace(f_blocks=size, f_bavail=size, f_frsize=2**20)
        monkeypatch.setattr(limits.os, "statvfs", lambda _, disk=disk: disk)
        assert (found()["/dev/shm"][0], found(gpus_here)["/dev/shm"][0]) == (alone, joined), size
    given[resource.RLIMIT_MEMLOCK] = 2**16
    assert "locked memory" not in found()
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(limits, "_INFINIBAND", tmp_path)
    assert found()["locked memory"] == ("failed", "0 MiB")

    # A container of 3 GiB, 2.5 of them used, 1 of these by files that were read; 900 of its 1,000 threads exist.
    for name, text in {
        "memory.max": 3 * 2**30,
        "memory.current": 5 * 2**29,
        "memory.stat": "inactive_file 1073741824",
        "pids.max": 1000,
        "pids.current": 900,
    }.items():
        (tmp_path / name).write_text(f"{text}\n")
    given[resource.RLIMIT_NPROC] = -1
    assert found()["memory"] == ("warning", "1.5 of 3.0 GiB memory free (the container)")
    assert found()["processes"][1].startswith("100 more")
    monkeypatch.setattr(limits, "cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert found()["cores"][0] == "ok"
    assert found(World(world_size=2, local_world_size=2))["cores"][0] == "warning"


def test_other_work_is_named_with_its_share(monkeypatch) -> None:
    monkeypatch.setattr(limits, "used_by_others", lambda: 0.03)
    (row,) = limits.other_work(World())
    assert (row.status, row.measured) == ("ok", "other programs use at most 3% of the cores")
    monkeypatch.setattr(limits, "used_by_others", lambda: 0.97)
    (row,) = limits.other_work(World())
    assert row.status == "warning" and row.measured.startswith("other programs use 97% of the cores (load ")


def test_slow_links_and_long_ways_are_told_from_good_ones(monkeypatch) -> None:
    def judged(gbit: float, ms: float, link: float | None, backend: str = "gloo") -> list[str]:
        calls = [{"bytes": 4096, "ms": ms, "gbit": 0.1}, {"bytes": 25 << 20, "ms": 9.0, "gbit": gbit}]
        monkeypatch.setattr(bandwidth, "_measure", lambda *_: {"all-reduce": calls, "broadcast": calls})
        monkeypatch.setattr(bandwidth, "_link", lambda _: link)
        monkeypatch.setattr(bandwidth.dist, "get_backend", lambda: backend)
        return [row.way_out[:15] for row in bandwidth._compare(World(hosts=["a"]), "between machines", (0,), None)]

    assert judged(5, 0.1, 10) == judged(5, 0.1, 100) == judged(0.1, 0.1, None) == judged(60, 0.1, 100, "nccl") == [""]
    assert judged(1, 0.1, 10) == ["less than 2 Gbi"]
    assert judged(40, 0.1, 100, "nccl") == ["less than 50 Gb"]
    assert judged(5, 20, 10) == ["latency above 5"]


def test_gpus_that_do_not_reach_each_other_or_are_not_seen_are_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: 2 not in (a, b))
    row = gpus._peers(World(world_size=3, local_world_size=3))
    assert row.status == "warning" and row.measured == "not between 0-2, 1-2 of 3"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert gpus._peers(World(world_size=3, local_world_size=3)).status == "ok"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 470.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = gpus.gpus(World())
    assert found[0].status == "failed" and found[0].measured == "nvidia-smi shows 1 x NVIDIA H100, torch none"


def test_gpus_of_another_kind_are_named(monkeypatch) -> None:
    world = World(world_size=4, hosts=["a", "a", "b", "b"], device=torch.device("cuda", 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H100", total_memory=80 << 30)
    )
    monkeypatch.setattr(World, "exchange", lambda _, value: [value, value, value, value])
    assert gpus.same_gpus(world) == []
    monkeypatch.setattr(World, "exchange", lambda _, value: [value, value, ["A100", 40], ["A100", 40]])
    (row,) = gpus.same_gpus(World(world_size=4, hosts=["a", "a", "b", "b"], device=world.device))
    assert (row.status, row.place, row.measured) == ("warning", "b", "A100 40 GiB")
    assert row.way_out.startswith("the others have H100 80 GiB")


def test_the_odd_rank_is_named_by_what_most_have() -> None:
    world = World(world_size=4, hosts=["a", "a", "b", "b"])
    of_ranks = [{"timm": "1"}, {"timm": "1"}, {"timm": "1"}, {"timm": "2", "extra": "3"}]
    (row,) = versions._differing(world, "packages", of_ranks, "failed")
    assert row.place == "rank 3 (b)" and row.measured == "extra 3 instead of (absent), timm 2 instead of 1"
    assert versions._differing(world, "packages", [of_ranks[0]] * 4, "failed") == []


@pytest.mark.parametrize(
    "variable, value, taken",
    [
        ("NCCL_SOCKET_IFNAME", "eth", "eth0"),
        ("NCCL_SOCKET_IFNAME", "=eth", None),
        ("NCCL_SOCKET_IFNAME", "=eth1", "eth1"),
        ("NCCL_SOCKET_IFNAME", "^eth", "ib0"),
        ("GLOO_SOCKET_IFNAME", "eth", None),
        ("GLOO_SOCKET_IFNAME", "ib0", "ib0"),
    ],
)
def test_interfaces_are_chosen_as_the_libraries_do(variable: str, value: str, taken: str | None, monkeypatch) -> None:
    monkeypatch.setenv(variable, value)
    assert interfaces.chosen(variable, {"lo": [], "eth0": [], "eth1": [], "ib0": []}) == taken


def test_an_interface_that_is_absent_down_or_slower_than_another_is_named(monkeypatch, tmp_path) -> None:
    links = {"eth0": (True, 1000), "ib0": (True, 100000), "eth1": (False, 1000)}
    monkeypatch.setattr(interfaces, "addresses", lambda: {name: ["10.0.0.1"] for name in links})
    monkeypatch.setattr(interfaces, "link_speed", lambda name: links[name][1])
    stats = {name: SimpleNamespace(isup=up, mtu=1500) for name, (up, mbit) in links.items()}
    monkeypatch.setattr(interfaces.psutil, "net_if_stats", lambda: stats)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)

    def found(name: str) -> list[str]:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        rows = interfaces.interfaces(World(world_size=2, hosts=["a", "b"]))
        return [f"{row.status}: {row.measured} {row.way_out}" for row in rows]

    assert found("ib0") == ["ok: ib0 (10.0.0.1, 100 Gbit/s, MTU 1500) "]
    assert "export GLOO_SOCKET_IFNAME=ib0" in found("eth0")[0] and found("eth0")[0].startswith("warning: eth0")
    assert found("eth1")[0] == "failed: eth1 is down ip link set eth1 up"
    for name, (state, rate) in {"mlx5_0": ("4: ACTIVE", 200), "mlx5_1": ("1: DOWN", 400)}.items():
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate} Gb/sec (4X HDR)\n")
    monkeypatch.setattr(interfaces, "_INFINIBAND", tmp_path)
    assert found("ib0") == ["ok: ib0 (10.0.0.1, 100 Gbit/s, MTU 1500); InfiniBand mlx5_0 200 Gbit/s "]
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert interfaces.infiniband() == {}
    assert found("eth9")[0].startswith("failed: GLOO_SOCKET_IFNAME=eth9: this machine has eth0 10.0.0.1; ib0 ")


def test_a_host_name_that_others_can_not_use_is_named_unless_an_interface_is_chosen(monkeypatch) -> None:
    world = World(world_size=2, hosts=["a", "b"])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(interfaces.socket, "gethostbyname", lambda _: "127.0.1.1")
    assert interfaces.host_name(world)[0].status == "failed"
    assert interfaces.host_name(World())[0].status == "ok"  # one machine talks to itself
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert interfaces.host_name(world)[0].measured.endswith("is 127.0.1.1; the recipes take eth0 instead")

    def unknown(_: str) -> str:
        raise OSError

    monkeypatch.setattr(interfaces.socket, "gethostbyname", unknown)
    assert interfaces.host_name(world)[0].status == "warning"
