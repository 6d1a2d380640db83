"""cluster/ssh/train.sh trains on hosts that it reaches by ssh, outlives the loss of one, and leaves
nothing behind on them.
"""

import json
import os
import signal

import pytest

from tests.cluster.two_machines import assert_same_losses
from tests.harness.machines import Watched
from tests.harness.paced import PACED

STEPS = 160
WORDS = (
    "--image_size 16 --global_batch_size 24 --max_micro_batch_size 12 --workers 1 --tracker none "
    f"--max_steps {STEPS} --log_every 1 --eval_every {STEPS} --checkpoint_every 10 --dtype float64 "
    "--batch_norm group --norm_batch_size 4 --hflip 0.5 --name run"
).split()


@pytest.fixture
def train(hosts, tmp_path):
    """`train()` starts the script on the first host, with a list of both."""
    first, second = hosts.nodes
    (tmp_path / "cls_paced.py").write_text(PACED)
    (tmp_path / "hosts.txt").write_text(
        f"# main machine first\n{first.address}\n\nroot@{second.address}  # spot\n"
    )
    argv = ["cluster/ssh/train.sh", tmp_path / "hosts.txt"]
    argv += ["--config_file", "accelerate_configs/2node_cpu.yaml", tmp_path / "cls_paced.py"]
    argv += WORDS + ["--output_dir", tmp_path]
    return lambda: hosts.start(first, argv, {"RETRY": "2"})


def test_a_lost_host_comes_back(hosts, train, forks, tmp_path):
    """Its losses are the losses of one undisturbed process."""
    _, second = hosts.nodes
    run = Watched(tmp_path / "run", [train()])
    for event, size in ((None, 2), (second.kill, 1), (lambda: hosts.serve(second), 2)):
        before = run.start_number()
        if event:
            event()
        run.until(lambda: run.beyond(before, 0 if event else 12), f"{size} train")  # noqa: B023
        assert run.world_size() == size
    done = run.started[0].finish()
    assert done.returncode == 0, done.stderr
    assert f"{second.name}: " in done.stderr or f"{second.address}: ended with 255" in done.stderr
    assert all(line.startswith(("node0: ", "node1: ")) for line in done.stdout.splitlines()), (
        done.stdout
    )
    assert hosts.nothing_is_left(), hosts.left_over()
    reference = forks(WORDS + ["--output_dir", tmp_path / "alone"])
    assert reference.code == 0, reference.stderr
    assert_same_losses(tmp_path / "run", tmp_path / "alone/run", STEPS)


@pytest.mark.long
def test_the_end_of_the_script_ends_the_run_on_all_hosts(hosts, train, tmp_path):
    """Ctrl-C, as a terminal sends it; then SIGKILL, as when the script's machine fails."""
    for stop, code in ((signal.SIGINT, 75), (signal.SIGKILL, -9)):
        run = Watched(tmp_path / "run", [train()])
        before = run.step()
        run.until(lambda: run.step() >= before + 12, "both train")  # noqa: B023
        (os.killpg if stop == signal.SIGINT else os.kill)(run.started[0].process.pid, stop)
        stopped = run.started[0].finish()
        assert stopped.returncode == code and "Traceback" not in stopped.stderr, stopped
        assert hosts.nothing_is_left(), hosts.left_over()
        status = json.loads((tmp_path / "run/status.json").read_text())
        assert (status["status"], status["cause"]) == ("resumable", "SIGTERM")
