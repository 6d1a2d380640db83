"""The doctor runs every check on every rank whatever one of them does, ends in one table, and judges by stated thresholds."""

import json
import re
import resource
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

from common.errors import Refused
from tests.harness.launching import free_port, inherited
from tools.doctor import bandwidth, gpus, interfaces, limits, tracker, versions
from tools.doctor.__main__ import arguments
from tools.doctor.finding import Finding
from tools.doctor.session import examine
from tools.doctor.table import HERE, ON_MACHINE, fold, show
from tools.doctor.world import World

FAULTY = """
import os, sys, time
import torch, torch.distributed as dist
sys.path.insert(0, os.getcwd())
from tools.doctor import checks
from tools.doctor.examination import Check
from tools.doctor.__main__ import arguments
from tools.doctor.finding import Finding

def fails_alone(world):
    if world.rank == 1:
        raise OSError("no such disk")
    return [Finding("alone", "ok", "a disk")]

def fails_in_exchange(world):
    if world.rank == 1:
        raise OSError("lost in exchange")
    world.exchange(world.rank)

def fails_in_collective(world):
    if world.rank == 1:
        raise OSError("lost in collective")
    dist.all_reduce(torch.ones(3))

def adds(world):
    dist.all_reduce(total := torch.ones(1))
    return [Finding("adds", "ok", f"sum {total.item():.0f}")]

def hangs(world):
    if world.rank == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(3))

def dies(world):
    if world.rank == 1:
        os._exit(9)
    dist.all_reduce(torch.ones(3))

checks.CHECKS[:] = [
    Check("alone", fails_alone),
    Check("exchange", fails_in_exchange, "store"),
    Check("collective", fails_in_collective, "group"),
    Check("adds", adds, "group"),
    Check("hangs", hangs, "group", limit=2.0) if sys.argv.pop() == "hangs" else Check("dies", dies, "group"),
    Check("adds later", adds, "group"),
]
from tools.doctor.__main__ import main
main()
"""


def exported(rank: int, world_size: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """What a person exports for a process of its own machine, who starts the ranks by hand."""
    place = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    world = {"WORLD_SIZE": world_size, "GROUP_WORLD_SIZE": world_size, "MASTER_ADDR": address, "MASTER_PORT": port}
    cpu = {"CUDA_VISIBLE_DEVICES": "-1", "ACCELERATE_MIXED_PRECISION": "no", "WANDB_MODE": "offline"}
    return {name: str(value) for name, value in (place | world | cpu).items()}


def rows_of(file: Path) -> dict[tuple[str, str], dict]:
    """The findings in a file of --json, by check and place."""
    return {(row["check"], row["place"]): row for row in json.loads(file.read_text())["findings"]}


# --- the frame


def test_a_check_that_raises_hangs_or_dies_on_one_rank_keeps_no_other_check_and_no_rank(launch, tmp_path) -> None:
    script, dead, hung = tmp_path / "faulty.py", tmp_path / "dead.json", tmp_path / "hung.json"
    script.write_text(FAULTY)
    dying = launch.start("multi_cpu", script, "--json", dead, "dies")
    port = free_port()
    one_machine = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    both = [
        launch.start_python(
            *(script, "--json", hung, "hangs"), env=exported(rank, 2, port) | one_machine | {"LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    done = [started.finish() for started in (dying, *both)]
    assert [each.returncode for each in done] == [1, 1, 1] and dead.exists(), done
    for file in (dead, hung):
        rows = rows_of(file)
        failed = {check: row["way_out"] for (check, _), row in rows.items() if row["status"] == "failed"}
        assert "OSError: no such disk" in failed["alone"]
        assert "lost in exchange" in failed["exchange"] and "lost in collective" in failed["collective"]
        assert [row["measured"] for (check, _), row in rows.items() if check == "adds"] == ["sum 2"]
        host = rows[("adds", "all")] and json.loads(file.read_text())["hosts"][1]
        assert rows["alone", f"rank 1 ({host})"]["status"] == "failed"
        assert rows["alone", f"rank 0 ({host})"]["status"] == "ok"
    assert "stuck in hangs" in rows_of(hung)["hangs", f"rank 1 ({host})"]["way_out"]
    assert rows_of(hung)["hangs", f"rank 0 ({host})"]["measured"] == "waited 2 s for other ranks"
    assert rows_of(dead)["dies", f"rank 1 ({host})"]["measured"] == "no answer"
    table = done[0].stdout
    assert re.search(r"^failed +collective +rank 1 .*: raised\n +-> OSError: lost in collective", table, re.M), table
    assert table.count("OSError: lost in collective") == 1 and "a run will fail here" in table
    assert max(map(len, table.splitlines())) <= 100 and "\033" not in table


def test_json_goes_to_stdout_alone_and_wrong_words_are_refused(launch) -> None:
    done = launch.start_python("-m", "tools.doctor", "--only", "limits,launch", "--json", "-").finish()
    found = json.loads(done.stdout)
    assert done.returncode in (0, 1) and {row["check"].partition(":")[0] for row in found["findings"]} == {
        "launch",
        "limits",
    }
    assert found["processes"] == 1 and found["seconds"] < 60
    for words, text in ((["--only", "lungs"], "--only lungs: take launch, "), (["no.py"], "no.py is not there")):
        with pytest.raises(Refused, match=text):
            examine(arguments().parse_args(words), {})


# --- the table


def test_equal_rows_are_one_and_others_name_ranks_or_hosts() -> None:
    hosts = ["a", "a", "b", "b"]

    def place(findings: list[tuple[int, Finding]]) -> list[tuple[str, str]]:
        return [(finding.place, finding.measured) for finding in fold(findings, hosts)]

    def of(*values: str, where: str = HERE) -> list[tuple[int, Finding]]:
        return [(rank, Finding("cores", "ok", value, place=where)) for rank, value in enumerate(values) if value]

    assert place(of("8", "8", "8", "8")) == [("all", "8")]
    assert place(of("8", "8", "4", "4")) == [("a", "8"), ("b", "4")]
    assert place(of("8", "4", "8", "8")) == [("rank 0 (a), rank 2 (b), rank 3 (b)", "8"), ("rank 1 (a)", "4")]
    assert place(of("8", "", "8", "", where=ON_MACHINE)) == [("all", "8")]
    assert place(of("8", "", "4", "", where=ON_MACHINE)) == [("a", "8"), ("b", "4")]
    # A row that only one rank has is not about all, unless rank 0 speaks for them.
    assert place([*of("8", "8", "8", "8"), (2, Finding("gpu", "failed", "hot", place=HERE))])[1] == (
        "rank 2 (b)",
        "hot",
    )
    assert place([(0, Finding("clock", "ok", "0 ms"))]) == [("all", "0 ms")]


def test_the_table_is_in_one_order_coloured_on_request_and_short() -> None:
    rows = [Finding("speed", "warning", "slow " * 40, "look " * 40), Finding("limits: cores", "ok", "8")]
    found = fold([(0, row) for row in rows], ["a"], ["limits", "speed"])
    lines = show(found, coloured=False).splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["ok", "warning"] and max(map(len, lines)) <= 100
    assert lines[-1] == "a run will work here: 1 ok, 1 warning"
    assert "\033[33mwarning" in show(found, coloured=True)
    many = [Finding("net", "ok", f"10.0.0.{number}", place=f"node{number}") for number in range(60)]
    assert len(show(many, coloured=False).splitlines()) < 10
    idle = [Finding(name, "not run", "needs a process group") for name in ("speed", "clock")]
    assert show(idle, coloured=False).count("needs a process group: speed, clock") == 1


# --- thresholds


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
    given[resource.RLIMIT_NOFILE] = 255
    assert found()["open files"][0] == "failed"
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
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4102444800")
    assert "SLURM ends the job in" in found()["time"][1]


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


# --- W&B


def test_the_tracker_is_reachable_logged_in_refused_silent_or_offline(monkeypatch, tmp_path) -> None:
    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            authorization = self.headers.get("Authorization", "")
            body = {"data": {"viewer": {"username": "ada"} if authorization else None}}
            self.send_response(401 if authorization.endswith("d3Jvbmc=") else 200)  # "...wrong"
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in [name for name in inherited() if name.lower().endswith("_proxy")] + ["WANDB_API_KEY", "WANDB_MODE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")

    def found() -> str:
        (row,) = tracker.tracker(World())
        return f"{row.status}: {row.measured}"

    assert found().endswith("is reachable, but nobody is logged in") and found().startswith("warning")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password right\n")
    assert found() == "ok: reachable, logged in as ada"
    monkeypatch.setenv("WANDB_API_KEY", "a wrong")
    assert "refuses the key (HTTP 401)" in found()
    server.shutdown()
    server.server_close()
    assert found().startswith("warning") and "can't be reached" in found()
    monkeypatch.setattr(tracker, "PATIENCE_S", 0.1)
    monkeypatch.setattr(tracker, "_ask", lambda *_: threading.Event().wait())
    assert "no answer within 0 s" in found()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert found() == "ok: offline (WANDB_MODE)"
