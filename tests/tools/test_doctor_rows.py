"""Each row of the doctor tells good from bad by its threshold, and names the odd one; no process is
started.
"""

import os
from argparse import Namespace
from types import SimpleNamespace

import torch

from common.launching.launchers import Launch
from tools.doctor import bandwidth, interfaces, rehearsal
from tools.doctor.table import Finding, fold, show
from tools.doctor.world import World

CPU = torch.device("cpu")
TWO = World(Launch("x", world_size=2), Namespace(), CPU, ranks=range(2), hosts=["a", "b"])
FOUR = World(
    Launch("x", world_size=4), Namespace(), CPU, ranks=range(4), hosts=["a", "a", "b", "b"]
)


def test_equal_rows_are_one_and_others_name_ranks_or_hosts() -> None:
    def folded(values: str, place: str = "", *more: Finding) -> list[tuple[str, str]]:
        findings_by_rank = {}
        for rank, value in enumerate(values):
            findings_by_rank[rank] = (
                [] if value == "-" else [Finding("cores", "ok", value, place=place)]
            )
        findings_by_rank[2] += more
        return [(finding.place, finding.measured) for finding in fold(findings_by_rank, FOUR.hosts)]

    assert folded("8888") == folded("8---", "all") == [("all", "8")]
    assert folded("8844") == [("a", "8"), ("b", "4")]
    assert folded("8488") == [("rank 0 (a), rank 2 (b), rank 3 (b)", "8"), ("rank 1 (a)", "4")]
    assert folded("8888", "", Finding("gpu", "failed", "hot"))[1] == ("rank 2 (b)", "hot")


def test_the_table_is_short() -> None:
    many = [Finding("net", "ok", f"10.0.0.{number}", place=f"node{number}") for number in range(60)]
    assert len(show(many).splitlines()) < 10


def test_the_odd_rank_is_named_by_what_most_have(monkeypatch) -> None:
    for odd, text in ((1400, "MTU 1400 instead of 1500"), (1500, "")):
        monkeypatch.setattr(World, "exchange", lambda _, value, odd=odd: [1500, 1500, 1500, odd])
        rows = interfaces.compare_mtus(FOUR)
        assert [(row.place, row.measured) for row in rows] == (
            [("rank 3 (b)", text)] if text else []
        )


def test_slow_links_and_long_ways_are_told_from_good_ones() -> None:
    for backend, gbit, link, ms, way_out in (
        ("gloo", 5, 100, 0.1, ""),  # of which gloo's one connection uses a part
        ("gloo", 0.1, 0, 0.1, ""),
        ("nccl", 60, 100, 0.1, ""),
        ("nccl", 40, 100, 0.1, "less than 50 Gb"),
        ("gloo", 1, 10, 20, "less than 2 Gbi"),
        ("gloo", 5, 10, 20, "latency above 5"),
    ):
        calls = [
            {"bytes": 4096, "ms": ms, "gbit": 0.1},
            {"bytes": 25 << 20, "ms": 9.0, "gbit": gbit},
        ]
        row = bandwidth.judge_link("network: between", backend, calls, link, "a")
        assert (row.status, row.way_out[:15]) == (("warning", way_out) if way_out else ("ok", ""))


def test_an_interface_that_is_absent_down_or_slower_is_named(monkeypatch, tmp_path) -> None:
    links = {"eth0": (True, 1.0), "ib0": (True, 100.0), "eth1": (False, 1.0)}
    monkeypatch.setattr(interfaces, "read_address", lambda name: "10.0.0.1")
    stats = {
        name: SimpleNamespace(isup=up, mtu=1500, speed=1000 * speed)
        for name, (up, speed) in links.items()
    }
    monkeypatch.setattr(interfaces.psutil, "net_if_stats", lambda: stats)

    def judge(name: str) -> str:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        (row,) = interfaces.check_interface(TWO)
        return f"{row.status}: {row.measured} {row.way_out}"

    assert "export GLOO_SOCKET_IFNAME=ib0" in judge("eth0") and judge("eth0").startswith(
        "warning: eth0"
    )
    assert judge("eth1") == "failed: eth1 is down ip link set eth1 up"
    for name, (state, rate) in {"mlx5_0": ("4: ACTIVE", 200), "mlx5_1": ("1: DOWN", 400)}.items():
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate} Gb/sec (4X HDR)\n")
    monkeypatch.setattr(interfaces, "_INFINIBAND", tmp_path)
    assert judge("ib0") == "ok: ib0 (10.0.0.1, 100 Gbit/s, MTU 1500); InfiniBand 200 Gbit/s "
    assert judge("eth9").startswith("failed: GLOO_SOCKET_IFNAME=eth9: this machine has eth0, ib0, ")


def test_the_rehearsal_judges_waiting_lag_memory_and_disk() -> None:
    well = {
        "images_per_second": 160.0,
        "data_wait": 0.1,
        "samples": 64,
        "start_s": 5.0,
        "memory": 10**9,
        "lag": 0.05,
    }
    well |= {"checkpoint_bytes": 2**30, "slowest": 1, "room": 2e9, "free": 2**40}

    def odd(**changes: float) -> list[str]:
        rows = rehearsal.judge_rehearsal(well | changes, TWO)
        return [
            f"{row.check} {row.status} {row.place} {row.measured} {row.way_out}"
            for row in rows
            if row.way_out
        ]

    assert odd() == []
    (late,) = odd(lag=0.38)
    assert late.startswith("rehearsal: slowest warning rank 1 (b) ") and "38% of the time" in late
    (slow,) = odd(data_wait=0.5)
    assert "50% of the time waiting for data" in slow and "--workers" in slow
    assert [line[:26] for line in odd(room=1e9)] == ["rehearsal: memory warning "]
    assert (
        "rehearsal: checkpoint failed" in odd(checkpoint_bytes=0)[0]
        and "free 3.0 GiB" in odd(free=2**30)[0]
    )


def test_a_rehearsal_has_its_launch_and_names_a_failures_cause(
    monkeypatch,
) -> None:
    environ = {
        "SLURM_PROCID": "7",
        "TORCHELASTIC_RUN_ID": "x",
        "MASTER_ADDR": "far",
        "MASTER_PORT": "29500",
    }
    world = World(Launch("srun", 5, 2, 6, 3, 1, 2), Namespace(), CPU, ranks=range(6))
    monkeypatch.setattr(os, "environ", environ)
    actual = rehearsal.build_environ(world, 2000)
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR "
        "MASTER_PORT"
    ).split()
    assert [actual[name] for name in names] == ["5", "2", "6", "3", "1", "2", "far", "2000"]
    assert not {"SLURM_PROCID", "TORCHELASTIC_RUN_ID"} & actual.keys()
    stderr = 'Traceback:\n  File "x.py"\nRuntimeError: no kernel\non rank 0 (host)\n'
    assert rehearsal.find_cause(1, stderr) == "RuntimeError: no kernel"
    assert rehearsal.find_cause(-9, "") == "killed by SIGKILL: was it killed for want of memory?"
