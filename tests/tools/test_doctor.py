"""The doctor runs every check on every rank, whatever one of them does, and ends in one table; its
trials really train.
"""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest
import torch

from common.errors import Refused
from common.launching.launchers import Launch
from tests.harness.launching import find_free_port
from tests.harness.runs import start_tool
from tests.harness.waiting import Limit
from tools.doctor import rehearsal
from tools.doctor.__main__ import build_parser
from tools.doctor.session import examine
from tools.doctor.world import World

FAULTY = """
import os, sys, time
sys.path.insert(0, os.getcwd())
from tools.doctor import session
from tools.doctor.table import Finding
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


def build_environment(
    rank: int, world_size: int, port: int, address: str = "127.0.0.1"
) -> dict[str, str]:
    """What a person exports for a process of its own machine, who starts the ranks by hand."""
    environ = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    world = {
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    cpu = {
        "CUDA_VISIBLE_DEVICES": "-1",
        "ACCELERATE_MIXED_PRECISION": "no",
        "WANDB_MODE": "offline",
    }
    return {name: str(value) for name, value in (environ | world | cpu).items()}


def read_findings(file: Path) -> dict[tuple[str, str], dict]:
    """The findings in a file of --json, by check and place."""
    return {(row["check"], row["place"]): row for row in json.loads(file.read_text())["findings"]}


def test_a_check_that_fails_on_one_rank_keeps_no_other(launch, tmp_path) -> None:
    script = tmp_path / "faulty.py"
    dead = tmp_path / "dead.json"
    hung = tmp_path / "hung.json"
    script.write_text(FAULTY)
    dying = launch.start("multi_cpu", [script, "--json", dead, "dies"])
    port = find_free_port()
    one_machine = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    started = [dying]
    for rank in range(2):
        env = build_environment(rank, 2, port) | one_machine | {"LOCAL_RANK": str(rank)}
        started.append(launch.start_python([script, "--json", hung, "hangs"], env=env))
    done = [each.finish() for each in started]
    assert [each.returncode for each in done] == [1, 1, 1] and dead.exists(), done
    for file in (dead, hung):
        rows = read_findings(file)
        failed = {
            check: row["way_out"] for (check, _), row in rows.items() if row["status"] == "failed"
        }
        assert "OSError: no such disk" in failed["alone"]
        assert "lost in exchange" in failed["exchange"]
        assert [row["measured"] for (check, _), row in rows.items() if check == "adds"] == ["sum 2"]
        host = rows[("adds", "all")] and json.loads(file.read_text())["hosts"][1]
        assert rows["alone", f"rank 1 ({host})"]["status"] == "failed"
        assert rows["alone", f"rank 0 ({host})"]["status"] == "ok"
    assert "stuck in hangs" in read_findings(hung)["hangs", f"rank 1 ({host})"]["way_out"]
    assert (
        read_findings(hung)["hangs", f"rank 0 ({host})"]["measured"] == "waited 2 s for other ranks"
    )
    assert read_findings(dead)["dies", f"rank 1 ({host})"]["measured"] == "no answer"
    table = done[0].stdout
    assert re.search(
        r"^failed +exchange +rank 1 .*: raised\n +-> OSError: lost in exchange", table, re.M
    ), table
    assert table.count("OSError: lost in exchange") == 1 and "a run will fail here" in table
    assert max(map(len, table.splitlines())) <= 100 and "\033" not in table


def test_processes_that_can_not_meet_say_who_waits_for_what(launch, tmp_path) -> None:
    port = find_free_port()
    files = [tmp_path / f"{rank}.json" for rank in range(2)]
    argv = ["-m", "tools.doctor", "--wait", 1, "--only", "launch,network", "--json"]
    # Nobody listens at the second's port.
    ports = (find_free_port(), port)
    started = [
        launch.start_python(argv + [files[rank]], env=build_environment(rank, 2, ports[rank]))
        for rank in range(2)
    ]
    assert [each.finish().returncode for each in started] == [1, 1]
    waits, knocks = (read_findings(file)["network: meeting", "all"] for file in files)
    assert "rank 1 of 2 did not come within 1 s; there are ranks of " in waits["way_out"]
    assert (
        f"can't meet the others at 127.0.0.1:{port}" in knocks["measured"]
        and "nothing listens" in knocks["way_out"]
    )


def test_checks_are_chosen_by_their_first_words(forks, tmp_path) -> None:
    argv = ["--only", "network,launch", "--json", tmp_path / "report.json"]
    done = start_tool(forks, 1, "doctor", argv)[0].end()
    report = json.loads((tmp_path / "report.json").read_text())
    check_names = {row["check"].partition(":")[0] for row in report["findings"]}
    assert done.code in (0, 1) and check_names == {"launch"}
    assert report["processes"] == 1 and report["seconds"] < 60
    ended = [rank.end() for rank in start_tool(forks, 2, "doctor", ["--wait", "soon"])]
    (line,) = "".join(rank.stderr for rank in ended).splitlines()  # of both ranks
    assert (
        {rank.code for rank in ended} == {2}
        and line.startswith("doctor: ")
        and "--wait" in line
        and "--help" in line
    )
    for check_names, text in (
        (["--only", "lungs"], "--only lungs: take launch, "),
        (["no.py"], "no.py is not there"),
    ):
        with pytest.raises(Refused, match=text):
            examine(build_parser().parse_args(check_names))


def has_flag(process: psutil.Process, flag: str) -> bool:
    """True if the process runs with this flag; False also if it has just ended."""
    try:
        return flag in process.cmdline()
    except psutil.Error:
        return False


def test_a_rehearsal_that_is_stopped_says_so_and_leaves_nothing(launch, tmp_path) -> None:
    argv = "--only rehearsal recipes/cls.py --data digits --workers 0 --output_dir".split()
    argv.append(tmp_path)
    started = launch.start_python(["-m", "tools.doctor"] + argv)
    for _ in Limit(120).turns():
        runs = psutil.Process(started.process.pid).children(recursive=True)
        # Imports start processes, too.
        if any(has_flag(process, "--max_steps") for process in runs):
            break
    started.process.send_signal(signal.SIGINT)
    done = started.finish()
    assert done.returncode == 1 and re.search(
        r"^not run +rehearsal +stopped by SIGINT$", done.stdout, re.M
    ), done.stdout
    assert "not everything was checked: " in done.stdout and "will work" not in done.stdout
    assert not psutil.wait_procs(runs, 5)[1] and not list(tmp_path.iterdir())


def test_a_rehearsal_trains_and_leaves_nothing(launch, tmp_path) -> None:
    argv = ["--output_dir", str(tmp_path / "runs"), "--global_batch_size", "16"]
    (tmp_path / "runs").mkdir()
    flags = ["--config", "recipes/presets/digits.yaml"] + argv
    tool = ["-m", "tools.doctor", "--only", "rehearsal", "--json", tmp_path / "report.json"]
    done = launch("multi_cpu", tool + ["recipes/cls.py"] + flags, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {
        check: row
        for (check, _), row in read_findings(tmp_path / "report.json").items()
        if check != "rehearsal: slowest"
    }
    assert rows.keys() == {"rehearsal: steps", "rehearsal: memory", "rehearsal: checkpoint"}
    figures = rows["rehearsal: steps"]["figures"]
    assert figures["samples"] == 16
    assert figures["checkpoint_bytes"] > 10**6 and figures["memory"] > 2**27
    options = build_parser().parse_args(["recipes/cls.py"] + flags + ["--model", "no_such_model"])
    (row,) = rehearsal.rehearse(World(Launch("python"), options, torch.device("cpu"), ranks=[0]))
    assert row.status == "failed" and "did not make 4 steps" in row.measured
    assert "no_such_model" in row.way_out
    assert not any((tmp_path / "runs").iterdir())
