"""The doctor runs every check on every rank, whatever one of them does, and ends in one table."""

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from common.errors import Refused
from tests.harness.launching import free_port
from tools.doctor.__main__ import arguments
from tools.doctor.finding import Finding
from tools.doctor.session import examine
from tools.doctor.table import HERE, ON_MACHINE, fold, show

FAULTY = """
import os, sys, time
sys.path.insert(0, os.getcwd())
from tools.doctor import session
from tools.doctor.finding import Finding
from tools.doctor.session import Check

def fails_alone(world):
    if world.rank == 1:
        raise OSError("no such disk")
    return [Finding("alone", "ok", "a disk")]

def fails_in_exchange(world):
    if world.rank == 1:
        raise OSError("lost in exchange")
    world.exchange(world.rank)

def adds(world):
    return [Finding("adds", "ok", f"sum {sum(world.exchange(1))}")]

def hangs(world):
    if world.rank == 1:
        time.sleep(1000)
    world.exchange(0)

def dies(world):
    if world.rank == 1:
        os._exit(9)
    world.exchange(0)

session.CHECKS[:] = [
    Check("alone", fails_alone, exchanges=False),
    Check("exchange", fails_in_exchange),
    Check("adds", adds),
    Check("hangs", hangs, limit=2.0) if sys.argv.pop() == "hangs" else Check("dies", dies),
    Check("adds later", adds),
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
        assert "lost in exchange" in failed["exchange"]
        assert [row["measured"] for (check, _), row in rows.items() if check == "adds"] == ["sum 2"]
        host = rows[("adds", "all")] and json.loads(file.read_text())["hosts"][1]
        assert rows["alone", f"rank 1 ({host})"]["status"] == "failed"
        assert rows["alone", f"rank 0 ({host})"]["status"] == "ok"
    assert "stuck in hangs" in rows_of(hung)["hangs", f"rank 1 ({host})"]["way_out"]
    assert rows_of(hung)["hangs", f"rank 0 ({host})"]["measured"] == "waited 2 s for other ranks"
    assert rows_of(dead)["dies", f"rank 1 ({host})"]["measured"] == "no answer"
    table = done[0].stdout
    assert re.search(r"^failed +exchange +rank 1 .*: raised\n +-> OSError: lost in exchange", table, re.M), table
    assert table.count("OSError: lost in exchange") == 1 and "a run will fail here" in table
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


def test_a_plan_that_is_stopped_says_so_and_leaves_nothing(launch, tmp_path) -> None:
    words = ["--plan", "recipes/cls.py", "--output_dir", tmp_path, "--workers", "0"]
    started = launch.start_python("-m", "tools.doctor", *words)
    until = time.monotonic() + 120
    while not (trials := psutil.Process(started.process.pid).children(recursive=True)) and time.monotonic() < until:
        time.sleep(0.1)
    started.process.send_signal(signal.SIGINT)
    done = started.finish()
    assert done.returncode == 1 and re.search(r"^not run +plan +stopped by SIGINT$", done.stdout, re.M), done.stdout
    assert "not everything was checked: " in done.stdout and "will work" not in done.stdout
    assert trials and not psutil.wait_procs(trials, 5)[1] and not [*tmp_path.iterdir()]


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
    assert show([Finding("limits", "ok", "8")], False, partly=True).endswith("what was checked is well: 1 ok")
    idle = [Finding(name, "not run", "needs a process group") for name in ("speed", "clock")]
    assert show(idle, coloured=False).count("needs a process group: speed, clock") == 1
    assert "not everything was checked: " in show(idle, coloured=False)
