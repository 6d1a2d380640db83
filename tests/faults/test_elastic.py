"""A run continues as the same run when a process dies, when a machine is lost or asked to leave, and when it comes back."""

import json
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.harness.launching import Started
from tests.harness.machines import Node, Watched
from tests.harness.outcomes import Outcome
from tests.harness.paced import PACED

STEPS = 240
WORDS = (
    *("--image_size", 16, "--global_batch_size", 24, "--max_micro_batch_size", 12, "--workers", 1, "--tracker", "none"),
    *("--max_steps", STEPS, "--log_every", 1, "--eval_every", STEPS, "--checkpoint_every", 10, "--dtype", "float64"),
    *("--batch_norm", "group", "--norm_batch_size", 4, "--mixup", 0.2, "--drop_path", 0.2, "--hflip", 0.5),
)
# A machine may beat every other second only, and is heard of a second late.
LEAST_ONE = "at_least=1,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=6"
ELASTIC = ("--max_restarts", 3, "--rdzv_conf", LEAST_ONE)
LEAVES = "asked to stop{}: this machine leaves, the others continue; the same command lets it join again"
ALL_STOP = "the run stops; the same command on all machines resumes from the last checkpoint"


def launcher(started: Started) -> psutil.Process:
    return psutil.Process(started.process.pid)


def said_once(line: str, done: subprocess.CompletedProcess[str]) -> bool:
    """Whether `line` is there once, and no traceback; on a busy machine launchers also say for whom they wait."""
    return done.stderr.splitlines().count(line) == 1 and "Traceback" not in done.stderr


def resumed_without_a_loss(stdout: str, cause: str) -> None:
    """Whether the processes that were stopped by `cause` saved their last step, and the next ones went on from there."""
    stopped = re.findall(rf"stopped by {cause} at step (\d+): the run resumes from there", stdout)
    resumed = re.findall(r"resuming from step (\d+) of", stdout)
    assert stopped and set(stopped) <= set(resumed), (cause, stdout)


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "paced.py"
    path.write_text(PACED)
    return path


def test_run_outlives_processes_and_machines_and_takes_them_back(nodes, forks, recipe, tmp_path):
    """A process killed, a machine lost, back, asked to go, and back: the losses are those of one undisturbed process."""
    first, second = nodes(2)
    words = (*WORDS, "--output_dir", tmp_path)

    def start(node: Node) -> Started:
        flags = ["--main_process_ip", first.address, *ELASTIC]
        return node.start("2node_cpu", recipe, *words, "--name", "elastic", flags=flags)

    run = Watched(tmp_path / "elastic", [start(first), start(second)])
    run.until(lambda: run.step() >= 12, "both train")
    assert run.world_size() == 2

    before = run.start_number()
    psutil.Process(run.started[1].process.pid).children()[0].kill()
    took = {"a process killed": run.until(lambda: run.beyond(before), "all processes are replaced")}
    assert run.world_size() == 2
    run.until(lambda: run.step() >= 32, "both go on")

    before = run.start_number()
    second.kill()
    run.started.pop().finish()
    took["a machine lost"] = run.until(lambda: run.beyond(before), "the one that is left goes on")
    assert run.world_size() == 1
    alone = run.step()
    run.until(lambda: run.step() >= alone + 2, "it makes steps")

    before = run.start_number()
    run.started.append(start(second))
    took["a machine back"] = run.until(lambda: run.beyond(before), "it is taken back")
    assert run.world_size() == 2

    before = run.start_number()
    leaver = run.started.pop()
    launcher(leaver).terminate()
    took["a machine asked to go"] = run.until(lambda: run.beyond(before), "the one that is left goes on")
    assert run.world_size() == 1
    left = leaver.finish()
    assert left.returncode == 75 and said_once(f"{second.name}: {LEAVES.format(' by SIGTERM')}", left), left.stderr
    before = run.start_number()
    run.started.append(start(second))
    took["a machine back again"] = run.until(lambda: run.beyond(before), "it is taken back again")
    assert run.world_size() == 2

    done = [each.finish() for each in run.started]
    assert [each.returncode for each in done] == [0, 0], done
    resumed_without_a_loss(done[0].stdout, "a change of machines")
    resumed_without_a_loss(done[0].stdout, "SIGTERM")
    asked = f"{first.name}: continuing without {second.name} ({second.address}): asked to stop"
    assert said_once(asked, done[0]), done[0].stderr
    print(took)

    one = forks(*words, "--name", "alone")
    assert one.code == 0, one.stderr
    elastic, one = (Outcome("ok", "", "", 0.0, tmp_path / name) for name in ("elastic", "alone"))
    assert [row["step"] for row in elastic.rows] == list(range(1, STEPS + 1))
    for key in ("train/loss", "eval/loss"):
        np.testing.assert_allclose(elastic.column(key), one.column(key), rtol=1e-8)


@pytest.mark.long
@pytest.mark.alone
def test_machines_of_several_processes_are_asked_to_go_in_every_way_and_come_back(nodes, forks, recipe, tmp_path):
    """Two processes on each; whoever is asked, all of its machine leave, and nothing of it counts as a restart."""
    first, second = nodes(2)
    # The rate is low: at the default one, rounding grows from 1e-16 to 1e-8 within 40 steps of a ResNet.
    words = (*WORDS, "--max_steps", 400, "--eval_every", 400, "--lr", 2e-4, "--output_dir", tmp_path)
    flags = ["--main_process_ip", first.address, "--num_processes", 4, "--max_restarts", 1, "--rdzv_conf", LEAST_ONE]

    def start(node: Node) -> Started:
        return node.start("2node_cpu", recipe, *words, "--name", "run", flags=flags)

    run = Watched(tmp_path / "run", [start(first), start(second)])
    took = {}
    for number, way in ((signal.SIGUSR1, "launcher"), (signal.SIGTERM, "process"), (signal.SIGKILL, "launcher")):
        run.until(lambda: run.step() >= 12 and run.world_size() == 4, "both train")
        before, asked_at = run.start_number(), run.step()
        leaver = run.started.pop()
        processes = launcher(leaver).children()
        (launcher(leaver) if way == "launcher" else processes[1]).send_signal(number)
        took[f"{number.name} to a {way}"] = run.until(partial(run.beyond, before), "the machine that is left goes on")
        assert run.world_size() == 2
        left = leaver.finish()
        psutil.wait_procs(processes, timeout=30)
        assert not any(process.is_running() for process in processes), way
        if number != signal.SIGKILL:
            by = f" by {number.name}" * (way == "launcher")
            assert left.returncode == 75 and said_once(f"{second.name}: {LEAVES.format(by)}", left), left.stderr
        before = run.start_number()
        run.started.append(start(second))
        run.until(partial(run.beyond, before), "it is taken back")
        assert run.step() > asked_at
    done = [each.finish() for each in run.started]
    assert [each.returncode for each in done] == [0, 0], done
    for cause in ("SIGUSR1", "SIGTERM", "the end of its launcher", "a change of machines"):
        resumed_without_a_loss(done[0].stdout, cause)
    print(took)
    assert forks(*words, "--name", "alone").code == 0
    elastic, one = (Outcome("ok", "", "", 0.0, tmp_path / name) for name in ("run", "alone"))
    assert [row["step"] for row in elastic.rows] == list(range(1, 401))
    np.testing.assert_allclose(elastic.column("train/loss"), one.column("train/loss"), rtol=1e-8)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("asked", ["both", "first", "process of the first", "second, all needed"])
def test_all_machines_stop_where_none_can_go_on(nodes, recipe, tmp_path, asked):
    """All are asked, or the one with the address is, or none can be spared: a checkpoint, and one line of each launcher."""
    first, second = nodes(2)
    flags = ["--main_process_ip", first.address, *(() if "needed" in asked else ELASTIC)]
    words = (recipe, *WORDS, "--output_dir", tmp_path, "--name", "run")
    run = Watched(tmp_path / "run", [node.start("2node_cpu", *words, flags=flags) for node in (first, second)])
    run.until(lambda: run.step() >= 12, "both train")
    one, two = map(launcher, run.started)
    asked_of = {"both": [one, two], "first": [one], "process of the first": one.children()}.get(asked, [two])
    for process in asked_of:
        process.terminate()
    done = [each.finish() for each in run.started]
    for machine, process, each in zip((first, second), (one, two), done, strict=True):
        by = " by SIGTERM" * (process in asked_of)
        assert each.returncode == 75, each
        assert said_once(f"{machine.name}: asked to stop{by}: {ALL_STOP}", each), each.stderr
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["status"], status["cause"]) == ("resumable", "SIGTERM")
    assert (tmp_path / f"run/checkpoints/step_{status['step']:08d}").is_dir()


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("backend", ["c10d", "machines"])
def test_torchrun_and_its_own_environment_do_as_well(nodes, recipe, tmp_path, backend):
    """On one machine torchrun, on the other `accelerate launch` with torchrun's variables; they lose one, and take it back."""
    first, second = nodes(2, names_are_loopback=False)  # c10d gives the name of a machine as its address
    words = (recipe, *WORDS, "--output_dir", tmp_path, "--name", "run")
    options = {"NNODES": "1:2", "RDZV_ENDPOINT": f"{first.address}:29501", "RDZV_ID": "run", "RDZV_CONF": LEAST_ONE}
    env = {"CUDA_VISIBLE_DEVICES": "-1"} | {f"PET_{name}": value for name, value in options.items()}
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", 1, "--rdzv_backend", backend, "--max_restarts", 3]
    flags = ["--multi_gpu", "--num_machines", 1, "--num_processes", 2, "--rdzv_backend", backend, "--max_restarts", 3]
    flags += ["--main_process_port", 0, "--mixed_precision", "no", "--dynamo_backend", "no"]

    def start(node: Node) -> Started:
        if node is first:
            return node.start_python(*torchrun, *words, env=env)
        return node.start_python("-m", "accelerate.commands.launch", *flags, *words, env=env)

    run = Watched(tmp_path / "run", [start(first), start(second)])
    run.until(lambda: run.step() >= 12 and run.world_size() == 3, "both train")
    before = run.start_number()
    second.kill()
    run.started.pop().finish()
    run.until(lambda: run.beyond(before) and run.world_size() == 1, "the one that is left goes on")
    run.started.append(start(second))
    run.until(lambda: run.world_size() == 3, "it is taken back")
    done = [each.finish() for each in run.started]
    assert [each.returncode for each in done] == [0, 0], done
    rows = Outcome("ok", "", "", 0.0, tmp_path / "run").rows
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("flags", [(), ELASTIC], ids=["fixed", "elastic"])
def test_a_machine_whose_cable_is_out_is_noticed_by_its_silence(nodes, recipe, tmp_path, flags):
    """No connection ends, so that no process notices: its launcher's heartbeats are missing."""
    first, second = nodes(2)
    words = (recipe, *WORDS, "--output_dir", tmp_path, "--name", "run")
    flags = ["--main_process_ip", first.address, *flags]
    run = Watched(tmp_path / "run", [node.start("2node_cpu", *words, flags=flags) for node in (first, second)])
    run.until(lambda: run.step() >= 12, "both train")
    before, began = run.start_number(), time.monotonic()
    second.unplug()
    if len(flags) > 2:
        run.started.pop()
        took = run.until(lambda: run.beyond(before), "the one that is left goes on")
        assert run.started[0].finish().returncode == 0
    else:
        left, cut = (each.finish(timeout=200) for each in run.started)
        took = time.monotonic() - began
        said = f"{first.name}: nothing is heard of {second.name} ({second.address}) any more"
        assert said in left.stderr and left.returncode == 1
        assert f"{second.name}: the main machine at {first.address}:29500 is gone" in cut.stderr and cut.returncode == 1
    print(f"all ended or went on after {took:.1f} s")
    assert took < 150


@pytest.mark.long
@pytest.mark.alone
def test_loss_of_the_main_machine_ends_the_others_and_loses_nothing(nodes, forks, recipe, tmp_path):
    """What is left says so; the same command, with another machine's address, goes on from the last checkpoint."""
    first, second = nodes(2)
    words = (*WORDS, "--output_dir", tmp_path)

    def start(main: Node) -> list[Started]:
        flags = ["--main_process_ip", main.address, *ELASTIC]
        nodes = [first, second] if main is first else [second]
        return [node.start("2node_cpu", recipe, *words, "--name", "run", flags=flags) for node in nodes]

    run = Watched(tmp_path / "run", start(first))
    run.until(lambda: run.step() >= 25, "both train")
    began = time.monotonic()
    first.kill()
    left = run.started[1].finish()
    took = time.monotonic() - began
    print(f"the other ended after {took:.1f} s")
    assert took < 60
    assert left.returncode == 1
    said = (
        f"{second.name}: the main machine at {first.address}:29500 is gone, or has ended, see what it said: start the"
    )
    assert left.stderr.splitlines()[-1].startswith(said), left.stderr
    done = start(second)[0].finish()
    assert done.returncode == 0, done.stderr
    assert "resuming from step 20 of" in done.stdout
    assert forks(*words, "--name", "alone").code == 0
    moved, one = (Outcome("ok", "", "", 0.0, tmp_path / name) for name in ("run", "alone"))
    assert [row["step"] for row in moved.rows] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(moved.column("train/loss"), one.column("train/loss"), rtol=1e-8)
