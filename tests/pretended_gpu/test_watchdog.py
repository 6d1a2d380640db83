"""The watchdog names the process that hangs while the others wait for their devices, before torch gives up."""

import json
import re

import pytest

PATIENCE = 15
# A recipe whose rank 1 hangs when it takes its eighth batch; the micro-batch search and DDP's warm-up take three.
HANGING = """
import json, os, runpy, signal, sys, threading
import torch, torch.distributed as dist
from common.data import loader as loading
take, taken = loading.Prefetcher.__next__, []
def hang(feed):
    taken.append(feed)
    if len(taken) == 8 and os.environ["RANK"] == "1":
        groups = dist.distributed_c10d._world.pg_map.items()
        options = [group._get_backend(torch.device("cpu" if kind == "gloo" else "cuda")).options for group, (kind, _) in groups]
        print("GROUPS", json.dumps([[each.backend, each._timeout.total_seconds()] for each in options]))
        print("MONITOR", os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"], flush=True)
        if "STOP" in os.environ:
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()
    return take(feed)
loading.Prefetcher.__next__ = hang
sys.argv[0] = "recipes/cls.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["stuck", pytest.param("stopped", marks=pytest.mark.long)])
def test_the_process_that_hangs_is_named_where_the_others_wait_for_their_devices(gpus, tmp_path, how):
    """Over NCCL. The default group, the hosts' group and the machine's group would all give up much later."""
    script = tmp_path / "cls_hanging.py"
    script.write_text(HANGING)
    words = ("--tracker", "none", "--workers", 1, "--batch_norm", "node", "--log_every", 1, "--max_steps", 50)
    words = (*words, "--collective_timeout", PATIENCE, "--output_dir", tmp_path, "--name", "run")
    env = {"STOP": "1"} if how == "stopped" else {}
    done = gpus.start("multi_gpu", script, *words, devices=2, env=env).finish()
    assert done.returncode == 1
    [groups] = re.findall("^GROUPS (.*)", done.stdout, re.MULTILINE)
    of_groups = json.loads(groups)
    assert sorted(kind for kind, _ in of_groups) == ["gloo", "nccl", "nccl"]
    least = min(seconds for _, seconds in of_groups)
    assert least == float(re.search("^MONITOR (.*)", done.stdout, re.MULTILINE)[1]) >= 2 * PATIENCE + 60
    named = re.findall(r"^(?!vm).*: (?:rank (\d) \(process \d+ on \S+\)) ", done.stderr, re.MULTILINE)
    assert named == ["1"], done.stderr
    if how == "stuck":
        assert (
            "keeps the others waiting: step 5, training\nrank 1 is at\n" in done.stderr and ", in hang\n" in done.stderr
        )
    else:
        assert "gives no sign of life" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["cause"].startswith("rank 1 ")
