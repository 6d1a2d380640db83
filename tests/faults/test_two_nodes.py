"""What keeps two machines apart is reported soon, in one line. That they train what one trains:
test_elastic.py.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.harness.debian import require_package
from tests.harness.launching import ROOT, Started, add_small_defaults
from tests.harness.machines import Node

WORDS = (
    "--image_size 16 --global_batch_size 24 --max_micro_batch_size 8 --workers 1 --tracker none "
    "--max_steps 12 --eval_every 6 --checkpoint_every 6"
).split()
# A recipe of which one rank takes long to end, as on a busy machine.
LATE = """
import atexit, os, runpy, sys, time
if os.environ["RANK"] == os.environ["LATE_RANK"]:
    atexit.register(time.sleep, 4)
sys.argv[0] = "recipes/cls.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
JOIN_S = 15  # how long a launcher of these tests waits for the others
START_S = 45  # what starting takes on a busy machine


def start(
    nodes: Sequence[Node],
    argv: list,
    flags: Sequence[object] = (),
    lines: Sequence[list] = ([], []),
    recipe: str | Path = "recipes/cls.py",
    env: dict[str, str] | None = None,
) -> list[Started]:
    """Start the command of the README on each machine; each of `lines` is for one machine alone."""
    flags = ["--main_process_ip", nodes[0].address] + list(flags)
    return [
        node.start("2node_cpu", [recipe] + add_small_defaults(argv) + line, flags=flags, env=env)
        for node, line in zip(nodes, lines, strict=True)
    ]


def finish(started: Sequence[Started]) -> list[subprocess.CompletedProcess[str]]:
    return [each.finish() for each in started]


@pytest.mark.long
def test_machines_whose_clocks_differ_start_together(nodes, tmp_path):
    """As many processes as asked for, never fewer."""
    require_package("libfaketime")
    library = "/usr/$LIB/faketime/libfaketime.so.1"
    first, second = nodes(2)
    script = tmp_path / "world.py"
    script.write_text("import os, sys; open(sys.argv[1], 'a').write(os.environ['WORLD_SIZE'])")

    def start_at(port: int, seconds: int, argv: list) -> list[Started]:
        flags = ["--main_process_ip", first.address, "--main_process_port", port]
        env = {"LD_PRELOAD": library, "FAKETIME": f"{seconds:+}"}
        return [
            first.start("2node_cpu", argv, flags=flags),
            second.start("2node_cpu", argv, flags=flags, env=env),
        ]

    seconds = (-90, 3600)
    started = [
        start_at(30000, -90, [script, tmp_path / "-90"]),
        start_at(30001, 3600, [script, tmp_path / "3600"]),
    ]
    for by, (main, other) in zip(seconds, map(finish, started), strict=True):
        assert [main.returncode, other.returncode] == [0, 0] and not main.stderr + other.stderr, (
            by,
            main,
            other,
        )
    assert [(tmp_path / str(by)).read_text() for by in seconds] == ["22"] * 2


@pytest.mark.long
def test_a_machine_that_does_not_come_in_time_is_named(nodes):
    """Six launchers at once, each with a port of its own."""
    first, second = nodes(2)
    second.send_into_silence("10.77.0.8")
    missing = f"1 of 2 machines came within {JOIN_S} s: {first.name} ({first.address})"
    cases = {  # who waits, for which address, and what it says
        "missing machine": (first, first.address, missing),
        "missing main machine": (
            second,
            first.address,
            f"{first.address} is there, but nothing listens on port",
        ),
        "wrong address": (
            second,
            "10.77.0.9",
            "10.77.0.9:30002 can't be reached (No route to host)",
        ),
        "wrong network": (
            second,
            "10.99.0.1",
            "10.99.0.1:30003 can't be reached (Network is unreachable)",
        ),
        "wrong name": (second, "nowhere", "the name nowhere is not known on this machine"),
        "closed port": (second, "10.77.0.8", "10.77.0.8:30005 can't be reached (timed out)"),
    }
    began = time.monotonic()
    started = []
    for port, (node, address, _) in enumerate(cases.values(), 30000):
        flags = ["--main_process_ip", address, "--main_process_port", port]
        flags += ["--rdzv_conf", f"join_timeout={JOIN_S}"]
        started.append(node.start("2node_cpu", ["recipes/cls.py"], flags=flags))
    for (case, (node, _, message)), done in zip(cases.items(), finish(started), strict=True):
        lines = done.stderr.splitlines()
        assert done.returncode == 1 and "Traceback" not in done.stderr, (case, done.stderr)
        assert lines[-1].startswith(f"{node.name}: {message}"), (case, done.stderr)
        assert sum(f"up to {JOIN_S} s" in line for line in lines) == 1, (
            case,
            "it is also said early",
            done.stderr,
        )
    assert time.monotonic() - began < JOIN_S + START_S


@pytest.mark.long
def test_machines_that_differ_are_refused_with_what_differs(nodes, tmp_path):
    """Code, a package, a setting; both launchers end, and nothing is left."""
    code = ROOT / "common/data/batch_plan.py"
    package = Path(distribution("timm").locate_file("timm")).parent
    package = next(package.glob("timm-*.dist-info")) / "METADATA"
    changed_files = {code: tmp_path / "plan.py", package: tmp_path / "METADATA"}
    changed_files[code].write_text(code.read_text() + "# mine\n")
    changed_files[package].write_text(
        package.read_text().replace(f"Version: {distribution('timm').version}", "Version: 0.1")
    )
    first, second = nodes(2, own={1: changed_files})
    argv = WORDS + ["--output_dir", tmp_path / "runs"]
    began = time.monotonic()
    done = finish(start((first, second), argv, lines=(["--lr", 0.1], ["--lr", 0.2])))
    message = f"rank 1 on {second.name} is not as rank 0 on {first.name}: --lr 0.2 instead of 0.1, "
    message += (
        "common/data/batch_plan.py is another file, timm 0.1 instead of "
        f"{distribution('timm').version}"
    )
    for each in done:
        # And nothing else: no traceback of a launcher, no warning of an address that has no name.
        assert each.returncode == 2 and each.stderr == f"cls.py: {message}\n", each
    assert not (tmp_path / "runs").exists()
    assert time.monotonic() - began < START_S


@pytest.mark.long
def test_a_checkpoint_that_a_machine_lacks_is_not_gone_on_from(nodes, forks, tmp_path):
    """Without a folder that both see: one machine would go on from step 6 and the other begin anew,
    silently.
    """
    runs = tmp_path / "runs"
    empty = tmp_path / "empty"
    empty.mkdir()
    argv = WORDS + ["--output_dir", runs, "--name", "run"]
    assert forks(argv + ["--max_steps", 6]).code == 0
    first, second = nodes(2, own={1: {runs: empty}})
    recipe = tmp_path / "cls_late.py"
    recipe.write_text(LATE)
    done = finish(start((first, second), argv, recipe=recipe, env={"LATE_RANK": "0"}))
    path = runs / "run" / "checkpoints" / "step_00000006"
    for each in done:
        assert each.returncode == 2, each.stderr
        assert (
            f"cls.py: {path}: {second.name} does not have the one that {first.name} resumes from"
            in each.stderr
        )
    assert (
        "run is not seen from node1: to go on from its checkpoints, name an --output_dir that all "
        "see" in done[0].stdout
    )
    assert not list(empty.iterdir())
    shutil.rmtree(runs / "run")  # and the other way round, where processes may be restarted
    restarted = start(
        (first, second), argv, recipe=recipe, flags=["--max_restarts", 2], env={"LATE_RANK": "1"}
    )
    done = finish(restarted)
    for each in done:
        assert each.returncode == 2, each.stderr
        assert each.stderr.count("is not seen from node1") == 1, "a refused run is not tried again"
    assert not list(runs.iterdir())


@pytest.mark.long
def test_a_process_that_can_not_start_ends_all_launchers(nodes, tmp_path):
    """The others would wait for it in the process group."""
    first, second = nodes(2)
    began = time.monotonic()
    argv = WORDS + ["--output_dir", tmp_path]
    done = finish(start((first, second), argv, lines=([], ["--no_such_flag", 1])))
    assert [each.returncode for each in done] == [1, 2]
    assert done[1].stderr == "cls.py: unknown flag --no_such_flag; --help all lists all flags\n"
    assert re.fullmatch(
        f"{first.name}: the launcher of another machine has given up, .*\n", done[0].stderr
    ), done[0]
    assert time.monotonic() - began < START_S
