"""Each row of the doctor tells good from bad by its threshold, and names the odd one; no process is started."""

from types import SimpleNamespace

import torch

from common.launching.launchers import Launch
from tools.doctor import bandwidth, interfaces, rehearsal
from tools.doctor.finding import Finding, differing
from tools.doctor.table import HERE, ON_MACHINE, fold, show
from tools.doctor.world import World

TWO = World(world_size=2, hosts=["a", "b"])
FOUR = World(world_size=4, hosts=["a", "a", "b", "b"], device=torch.device("cuda", 0))


def test_equal_rows_are_one_and_others_name_ranks_or_hosts() -> None:
    def folded(values: str, where: str = HERE, *more: tuple[int, Finding]) -> list[tuple[str, str]]:
        rows = [(rank, Finding("cores", "ok", one, place=where)) for rank, one in enumerate(values) if one != "-"]
        return [(finding.place, finding.measured) for finding in fold([*rows, *more], FOUR.hosts)]

    assert folded("8888") == folded("8-8-", ON_MACHINE) == folded("8---", "all") == [("all", "8")]
    assert folded("8844") == folded("8-4-", ON_MACHINE) == [("a", "8"), ("b", "4")]
    assert folded("8488") == [("rank 0 (a), rank 2 (b), rank 3 (b)", "8"), ("rank 1 (a)", "4")]
    assert folded("8888", HERE, (2, Finding("gpu", "failed", "hot", place=HERE)))[1] == ("rank 2 (b)", "hot")


def test_the_table_is_short() -> None:
    many = [Finding("net", "ok", f"10.0.0.{number}", place=f"node{number}") for number in range(60)]
    assert len(show(many).splitlines()) < 10


def test_the_odd_rank_is_named_by_what_most_have(monkeypatch) -> None:
    usual = {"timm": "1", "torch": "2"}
    other = {"timm": "2", "extra": "3", "torch": "2"}
    for odd, text in ((other, "extra 3 instead of (absent), timm 2 instead of 1"), (usual, "")):
        monkeypatch.setattr(World, "exchange", lambda _, value, odd=odd: [value, value, value, odd])
        rows = differing(FOUR, "network: MTU", "warning", "set it", usual)
        assert [(row.place, row.measured) for row in rows] == ([("rank 3 (b)", text)] if text else [])


def test_slow_links_and_long_ways_are_told_from_good_ones() -> None:
    for backend, gbit, link, ms, way_out in (
        ("gloo", 5, 100, 0.1, ""),  # of which gloo's one connection uses a part
        ("gloo", 0.1, None, 0.1, ""),
        ("nccl", 60, 100, 0.1, ""),
        ("nccl", 40, 100, 0.1, "less than 50 Gb"),
        ("gloo", 1, 10, 20, "less than 2 Gbi"),
        ("gloo", 5, 10, 20, "latency above 5"),
    ):
        calls = [{"bytes": 4096, "ms": ms, "gbit": 0.1}, {"bytes": 25 << 20, "ms": 9.0, "gbit": gbit}]
        row = bandwidth.of_link("network: between", backend, calls, link)
        assert (row.status, row.way_out[:15]) == (("warning", way_out) if way_out else ("ok", ""))


def test_an_interface_that_is_absent_down_or_slower_is_named(monkeypatch, tmp_path) -> None:
    links = {"eth0": (True, 1.0), "ib0": (True, 100.0), "eth1": (False, 1.0)}
    monkeypatch.setattr(interfaces, "addresses", lambda: {name: ["10.0.0.1"] for name in links})
    monkeypatch.setattr(interfaces, "link_speed", lambda name: links[name][1])
    stats = {name: SimpleNamespace(isup=up, mtu=1500) for name, (up, _) in links.items()}
    monkeypatch.setattr(interfaces.psutil, "net_if_stats", lambda: stats)

    def found(name: str) -> str:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        (row,) = interfaces.interfaces(TWO)
        return f"{row.status}: {row.measured} {row.way_out}"

    assert "export GLOO_SOCKET_IFNAME=ib0" in found("eth0") and found("eth0").startswith("warning: eth0")
    assert found("eth1") == "failed: eth1 is down ip link set eth1 up"
    for name, (state, rate) in {"mlx5_0": ("4: ACTIVE", 200), "mlx5_1": ("1: DOWN", 400)}.items():
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate} Gb/sec (4X HDR)\n")
    monkeypatch.setattr(interfaces, "_INFINIBAND", tmp_path)
    assert found("ib0") == "ok: ib0 (10.0.0.1, 100 Gbit/s, MTU 1500); InfiniBand mlx5_0 200 Gbit/s "
    assert found("eth9").startswith("failed: GLOO_SOCKET_IFNAME=eth9: this machine has eth0 10.0.0.1, ib0 ")


def test_the_rehearsal_judges_waiting_lag_memory_and_disk() -> None:
    well = {"images_per_second": 160.0, "data_wait": 0.1, "samples": 64, "start_s": 5.0, "memory": 10**9, "lag": 0.05}
    well |= {"checkpoint_bytes": 2**30, "slowest": 1}

    def odd(room: float = 2e9, free: float = 2**40, **changes: float) -> list[str]:
        rows = rehearsal.rehearsed(well | changes, TWO, room, free)
        return [f"{row.check} {row.status} {row.place} {row.measured} {row.way_out}" for row in rows if row.way_out]

    assert odd() == []
    (late,) = odd(lag=0.38)
    assert late.startswith("rehearsal: slowest warning rank 1 (b) ") and "38% of the time" in late
    (slow,) = odd(data_wait=0.5)
    assert "50% of the time waiting for data" in slow and "--workers" in slow
    assert [line[:26] for line in odd(room=1e9)] == ["rehearsal: memory warning "]
    assert "rehearsal: checkpoint failed" in odd(checkpoint_bytes=0)[0] and "free 3.0 GiB" in odd(free=2**30)[0]


def test_a_rehearsal_has_the_numbers_of_its_launch_and_names_the_cause_of_a_failure() -> None:
    given = {"SLURM_PROCID": "7", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "far", "MASTER_PORT": "29500"}
    world = World(5, 6, 2, 3, 1, launch=Launch("srun", 5, 2, 6, 3, 1, 2), hosts=["a"] * 6)
    found = rehearsal.variables_of(world, 2000, given)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    assert [found[name] for name in names] == ["5", "2", "6", "3", "1", "2", "far", "2000"]
    assert not {"SLURM_PROCID", "TORCHELASTIC_RUN_ID"} & found.keys()
    said = 'Traceback:\n  File "x.py"\nRuntimeError: no kernel\non rank 0 (host)\n'
    assert rehearsal.cause_of(1, said) == "RuntimeError: no kernel"
    assert rehearsal.cause_of(-9, "") == "killed by SIGKILL: was it killed for want of memory?"
