"""cluster/ssh/train.sh trains on hosts that it reaches by ssh, outlives the loss of one, and leaves nothing behind on them."""

import json
import os
import signal

import pytest

from tests.cluster.two_machines import assert_same_losses
from tests.harness.launching import Started
from tests.harness.machines import Watched
from tests.harness.paced import PACED
from tests.harness.ssh import Hosts

STEPS = 160
WORDS = (
    *("--image_size", 16, "--global_batch_size", 24, "--max_micro_batch_size", 12, "--workers", 1, "--tracker", "none"),
    *("--max_steps", STEPS, "--log_every", 1, "--eval_every", STEPS, "--checkpoint_every", 10, "--dtype", "float64"),
    *("--batch_norm", "group", "--norm_batch_size", 4, "--hflip", 0.5, "--name", "run"),
)


@pytest.fixture
def hosts(nodes, tmp_path_factory) -> Hosts:
    return Hosts(nodes(2), tmp_path_factory.mktemp("ssh"))


@pytest.fixture
def train(hosts, tmp_path):
    """`train()` starts the script on the first host, with a list of both."""
    first, second = hosts.nodes
    (tmp_path / "paced.py").write_text(PACED)
    (tmp_path / "hosts.txt").write_text(f"# main machine first\n{first.address}\n\nroot@{second.address}  # spot\n")
    command = ["cluster/ssh/train.sh", tmp_path / "hosts.txt", "--config_file", "accelerate_configs/2node_cpu.yaml"]
    words = [*command, tmp_path / "paced.py", *WORDS, "--output_dir", tmp_path]

    def start(*more: object, **env: str) -> Started:
        return hosts.start(first, [*words, *more], {"RETRY": "2"} | env)

    return start


def test_a_lost_host_comes_back_and_ctrl_c_stops_all(hosts, train, forks, tmp_path):
    """The losses are those of one undisturbed process; then the finished run is made longer, stopped, and resumed."""
    _, second = hosts.nodes
    run = Watched(tmp_path / "run", [train()])
    run.until(lambda: run.step() >= 12, "both train")
    assert run.world_size() == 2
    before = run.start_number()
    second.kill()
    run.until(lambda: run.beyond(before), "the first continues")
    assert run.world_size() == 1
    before = run.start_number()
    hosts.serve(second)
    run.until(lambda: run.beyond(before), "the second is back")
    assert run.world_size() == 2
    done = run.started[0].finish()
    assert done.returncode == 0, done.stderr
    assert f"{second.name}: " in done.stderr or f"{second.address}: ended with 255" in done.stderr
    assert all(line.startswith(("node0: ", "node1: ")) for line in done.stdout.splitlines()), done.stdout
    assert hosts.nothing_is_left(), hosts.left_over()
    rows = (tmp_path / "run/metrics.jsonl").read_text()

    run.started = [train("--max_steps", 2000)]
    run.until(lambda: run.step() >= STEPS + 12, "both train again")
    os.killpg(run.started[0].process.pid, signal.SIGINT)  # as a terminal does
    stopped = run.started[0].finish()
    assert stopped.returncode == 75, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert hosts.nothing_is_left(), hosts.left_over()

    one = forks(*WORDS, "--output_dir", tmp_path / "alone")
    assert one.code == 0, one.stderr
    (tmp_path / "first").mkdir()
    (tmp_path / "first/metrics.jsonl").write_text(rows)
    assert_same_losses(tmp_path / "first", tmp_path / "alone/run", STEPS)


@pytest.mark.long
def test_the_end_of_the_script_ends_the_run_on_all_hosts(hosts, train, tmp_path):
    """Killed without a chance to say so, as when its machine fails; the hosts save a checkpoint all the same."""
    run = Watched(tmp_path / "run", [train()])
    run.until(lambda: run.step() >= 12, "both train")
    run.started[0].process.kill()
    run.started[0].finish()
    assert hosts.nothing_is_left(), hosts.left_over()
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["status"], status["cause"]) == ("resumable", "SIGTERM")


@pytest.mark.long
def test_a_refusal_ends_the_run_and_a_bad_list_is_refused(hosts, train, tmp_path):
    """With 2, and without starting anything again."""
    refused = train("--lr", "-1", RETRY="30").finish()
    assert refused.returncode == 2 and "starting again" not in refused.stderr, refused
    assert "node0: cls.py: --lr -1" in refused.stderr and "Traceback" not in refused.stderr
    (tmp_path / "hosts.txt").write_text("# nobody\n")
    assert train().finish().returncode == 2
