"""A run listens to its own processes alone, and executes nothing that a stranger sends."""

import json
import re

import psutil

from tests.harness.machines import Node, Watched

WORDS = (
    "--image_size 16 --global_batch_size 24 --max_micro_batch_size 8 --workers 1 --tracker wandb "
    "--max_steps 100000 --log_every 1 --eval_every 100000 --checkpoint_every 100000"
).split()
OFFLINE = {"WANDB_MODE": "offline"}
LOOPBACK = {"127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"}
# Tries to connect to every port; prints what came of it.
KNOCK = """
import json, socket, sys
def knock(port):
    try:
        socket.create_connection((sys.argv[1], port), timeout=5).close()
    except OSError as error:
        return type(error).__name__
    return "open"
print(json.dumps({port: knock(int(port)) for port in sys.argv[2:]}))
"""
# Puts a pickle that makes a folder in the place of everything that lies in the store at address and
# port.
FORGE = """
import os, pickle, sys
from datetime import timedelta
from torch.distributed import TCPStore
class Payload:
    def __reduce__(self):
        return os.mkdir, (sys.argv[3],)
payload = pickle.dumps(Payload())
store = TCPStore(sys.argv[1], int(sys.argv[2]), timeout=timedelta(seconds=20))
keys = store.list_keys()
for key in keys:
    store.set(key, payload)
print("\\n".join(keys))
"""


def test_a_run_on_one_machine_listens_on_its_loopback_alone(nodes, tmp_path):
    """All of its processes: launcher, ranks, data workers, the tracker's service."""
    first, stranger = nodes(2)
    argv = WORDS + ["--output_dir", tmp_path, "--name", "run"]
    started = first.start("multi_cpu", ["recipes/cls.py"] + argv, env=OFFLINE)
    run = Watched(tmp_path / "run", [started])
    run.until(lambda: run.step() >= 4, "it trains")
    listening = first.listeners()
    launcher = psutil.Process(run.started[0].process.pid)
    ranks = [process.pid for process in launcher.children()]
    listeners = " ".join(users for _, _, users in listening)
    pids = set(map(int, re.findall(r"pid=(\d+)", listeners)))
    assert set(ranks) | {launcher.pid} <= pids, (listening, "the test looks at the wrong processes")
    assert {address for address, _, _ in listening} <= LOOPBACK, listening
    ports = sorted({port for _, port, _ in listening})
    knocked = stranger.start_python(["-c", KNOCK, first.address] + ports).finish()
    assert json.loads(knocked.stdout) == {str(port): "ConnectionRefusedError" for port in ports}, (
        knocked
    )


def forge(stranger: Node, address: str, port: int | str, marker) -> list[str]:
    done = stranger.start_python(["-c", FORGE, address, port, marker]).finish()
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_machines_execute_nothing_that_a_stranger_writes(nodes, tmp_path):
    """In the ranks' store the run writes over it; in the launchers' store it ends the run."""
    first, second, stranger = nodes(3)
    argv = WORDS + ["--output_dir", tmp_path, "--name", "run"]
    flags = ["--main_process_ip", first.address]
    started = [
        node.start("2node_cpu", ["recipes/cls.py"] + argv, flags=flags, env=OFFLINE)
        for node in (first, second)
    ]
    run = Watched(tmp_path / "run", started)
    marker = tmp_path / "executed"
    run.until(lambda: run.step() >= 4, "both train")
    for node in (first, second):
        outside = {address for address, _, _ in node.listeners()} - LOOPBACK
        assert outside == {node.address}, (outside, node.listeners())
    rank = psutil.Process(started[0].process.pid).children()[0]
    keys = forge(stranger, first.address, rank.environ()["MASTER_PORT"], marker)
    assert "heartbeat/0" in keys and len(keys) > 5
    step = run.step()
    run.until(lambda: run.step() > step + 20, "it goes on")
    keys = forge(stranger, first.address, 29500, marker)
    assert {"machines/none/machine/0", "machines/none/round"} <= set(keys), keys
    done = [each.finish(timeout=60) for each in started]
    assert not marker.exists(), "a stranger's code was executed"
    # Of the launcher that sees it first, and of the other.
    ends = {"is not from a launcher of this run": 1, "asked to stop: the run stops": 75}
    for node, each in zip((first, second), done, strict=True):
        lines = [line for line in each.stderr.splitlines() if line.startswith(f"{node.name}: ")]
        assert len(lines) == 1 and "Traceback" not in each.stderr, each.stderr
        assert [code for text, code in ends.items() if text in lines[0]] == [each.returncode], (
            each.stderr
        )
    assert any("is not from a launcher of this run" in each.stderr for each in done)
