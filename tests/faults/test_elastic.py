"""A run continues as the same run when a process dies, when a machine is lost or asked to leave,
and when it comes back.
"""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.harness.launching import Started
from tests.harness.machines import Node, Watched
from tests.harness.outcomes import Outcome, read
from tests.harness.paced import PACED

STEPS = 160
WORDS = (
    "--image_size 16 --global_batch_size 24 --max_micro_batch_size 12 --workers 1 --tracker none "
    f"--max_steps {STEPS} --log_every 1 --eval_every {STEPS} --checkpoint_every 10 --dtype float64 "
    "--batch_norm group --norm_batch_size 4 --mixup 0.2 --drop_path 0.2 --hflip 0.5"
).split()
# A machine may beat every other second only, and is heard of a second late.
AT_LEAST_ONE = "at_least=1,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=6"
ELASTIC = ["--max_restarts", 3, "--rdzv_conf", AT_LEAST_ONE]
LEAVES = (
    "asked to stop{}: this machine leaves, the others continue; the same command lets it join again"
)
ALL_STOP = "the run stops; the same command on all machines resumes from the last checkpoint"


def get_launcher(started: Started) -> psutil.Process:
    return psutil.Process(started.process.pid)


def is_printed_once(line: str, done: subprocess.CompletedProcess[str]) -> bool:
    """Whether `line` is there once, and no traceback; on a busy machine launchers also say for whom
    they wait.
    """
    return done.stderr.splitlines().count(line) == 1 and "Traceback" not in done.stderr


@pytest.fixture
def start(tmp_path) -> Callable[..., Started]:
    """`start(node, main, flags)` starts the run on a machine."""
    (tmp_path / "cls_paced.py").write_text(PACED)

    def start_on(node: Node, main: Node, flags: list) -> Started:
        argv = [tmp_path / "cls_paced.py"] + WORDS + ["--output_dir", tmp_path, "--name", "run"]
        return node.start("2node_cpu", argv, flags=["--main_process_ip", main.address] + flags)

    return start_on


def await_training(tmp_path: Path, started: list[Started]) -> Watched:
    run = Watched(tmp_path / "run", started)
    run.until(lambda: run.step() >= 12, "both train")
    assert run.world_size() == len(started)
    return run


@contextmanager
def assert_continues(run: Watched, after: str, machines: int) -> Iterator[None]:
    """After the block the run makes steps on so many machines; prints how long that took."""
    before = run.start_number()
    began = time.monotonic()
    yield
    run.until(lambda: run.beyond(before), f"the run goes on after {after}")
    assert run.world_size() == machines
    print(f"after {after}: {time.monotonic() - began:.1f} s")


def assert_undisturbed(forks, tmp_path: Path) -> None:
    """The run is the one of a single process: each step is there once, with the same loss."""
    assert forks(WORDS + ["--output_dir", tmp_path, "--name", "alone"]).code == 0
    run, alone = (Outcome(folder=tmp_path / name) for name in ("run", "alone"))
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    for key in ("train/loss", "eval/loss"):
        np.testing.assert_allclose(run.column(key), alone.column(key), rtol=1e-8)


def test_run_outlives_processes_and_machines_and_takes_them_back(nodes, forks, start, tmp_path):
    """A process killed, a machine lost, back, and asked to go: the losses are the ones of a single
    process.
    """
    first, second = nodes(2)
    run = await_training(tmp_path, [start(node, first, ELASTIC) for node in (first, second)])

    with assert_continues(run, "a process killed", machines=2):
        get_launcher(run.started[1]).children()[0].kill()
    with assert_continues(run, "a machine lost", machines=1):
        second.kill()
        run.started.pop().finish()
    alone = run.step()
    run.until(lambda: run.step() >= alone + 2, "it makes steps")
    with assert_continues(run, "a machine back", machines=2):
        run.started.append(start(second, first, ELASTIC))
    with assert_continues(run, "a machine asked to go", machines=1):
        leaver = run.started.pop()
        get_launcher(leaver).terminate()
    left = leaver.finish()
    line = f"{second.name}: {LEAVES.format(' by SIGTERM')}"
    assert left.returncode == 75 and is_printed_once(line, left), left.stderr

    done = run.started[0].finish()
    assert done.returncode == 0, done
    # The last step was saved, and the next processes went on from it.
    for cause in ("a change of machines", "SIGTERM"):
        stopped = re.findall(
            rf"stopped by {cause} at step (\d+): the run resumes from there", done.stdout
        )
        resumed = re.findall(r"resuming from step (\d+) of", done.stdout)
        assert stopped and set(stopped) <= set(resumed), (cause, done.stdout)
    line = f"{first.name}: continuing without {second.name} ({second.address}): asked to stop"
    assert is_printed_once(line, done), done.stderr
    assert_undisturbed(forks, tmp_path)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("signals", ["both", "first", "process of the first", "second, all needed"])
def test_all_machines_stop_where_none_can_go_on(nodes, start, tmp_path, signals):
    """All are asked, or the one with the address is, or none can be spared: a checkpoint, and one
    line of each launcher.
    """
    first, second = nodes(2)
    flags = [] if "needed" in signals else ELASTIC
    run = await_training(tmp_path, [start(node, first, flags) for node in (first, second)])
    launchers = [get_launcher(started) for started in run.started]
    signalled = {
        "both": launchers,
        "first": launchers[:1],
        "process of the first": launchers[0].children(),
    }.get(signals, launchers[1:])
    for process in signalled:
        process.terminate()
    done = [each.finish() for each in run.started]
    for machine, process, each in zip((first, second), launchers, done, strict=True):
        cause = " by SIGTERM" if process in signalled else ""
        assert each.returncode == 75, each
        line = f"{machine.name}: asked to stop{cause}: {ALL_STOP}"
        assert is_printed_once(line, each), each.stderr
    status = read(tmp_path / "run/status.json")
    assert (status["status"], status["cause"]) == ("resumable", "SIGTERM")
    assert (tmp_path / f"run/checkpoints/step_{status['step']:08d}").is_dir()


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("flags", [[], ELASTIC], ids=["fixed", "elastic"])
def test_a_machine_whose_cable_is_out_is_noticed_by_its_silence(nodes, start, tmp_path, flags):
    """No connection ends, so that no process notices: its launcher's heartbeats are missing."""
    first, second = nodes(2)
    run = await_training(tmp_path, [start(node, first, flags) for node in (first, second)])
    began = time.monotonic()
    if flags:
        with assert_continues(run, "a cable is out", machines=1):
            second.unplug()
            run.started.pop()
        assert time.monotonic() - began < 150
        assert run.started[0].finish().returncode == 0
        return
    second.unplug()
    left, cut = (each.finish(timeout=200) for each in run.started)
    assert time.monotonic() - began < 150
    line = f"{first.name}: nothing is heard of {second.name} ({second.address}) any more"
    assert line in left.stderr and left.returncode == 1
    assert (
        f"{second.name}: the main machine at {first.address}:29500 is gone" in cut.stderr
        and cut.returncode == 1
    )


@pytest.mark.long
@pytest.mark.alone
def test_loss_of_the_main_machine_ends_all_and_loses_nothing(nodes, forks, start, tmp_path):
    """The other machine reports it. The same command with another machine's address resumes from
    the last checkpoint.
    """
    first, second = nodes(2)
    run = await_training(tmp_path, [start(node, first, ELASTIC) for node in (first, second)])
    run.until(lambda: run.step() >= 25, "both train")
    began = time.monotonic()
    first.kill()
    left = run.started[1].finish()
    assert time.monotonic() - began < 60 and left.returncode == 1
    line = (
        f"{second.name}: the main machine at {first.address}:29500 is gone, or has ended, see "
        "what it said: start the"
    )
    assert left.stderr.splitlines()[-1].startswith(line), left.stderr
    done = start(second, second, ELASTIC).finish()
    assert done.returncode == 0, done.stderr
    assert "resuming from step 20 of" in done.stdout
    assert_undisturbed(forks, tmp_path)
