"""The watchdog names the process that hangs while the others wait for their devices, before torch
gives up.
"""

import json
import re

import pytest

from tests.recipes.copied import copy

PATIENCE = 15
# Rank 1 hangs in step 5, having said what the timeouts are.
HANGING = """\
@@ main
         for step in run.steps():
+            if step == 4 and rank() == 1:
+                hang()
@@ main
+def hang():
+    import json, os, signal, threading
+    import torch.distributed as dist
+
+    devices = {"gloo": "cpu", "nccl": "cuda"}
+    groups = dist.distributed_c10d._world.pg_map.items()
+    options = [group._get_backend(torch.device(devices[kind])).options for group, (kind, _) in groups]
+    print("GROUPS", json.dumps([[each.backend, each._timeout.total_seconds()] for each in options]))
+    print("MONITOR", os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"], flush=True)
+    if "STOP" in os.environ:
+        os.kill(os.getpid(), signal.SIGSTOP)
+    threading.Event().wait()
+
+
 def main() -> None:
@@
 from common.run import Run
+from common.distributed.collectives import rank
"""


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["stuck", pytest.param("stopped", marks=pytest.mark.long)])
def test_the_process_that_hangs_is_named(gpus, tmp_path, how):
    """The others wait for their devices, over NCCL. No group would give up before."""
    script = copy(tmp_path / "cls_hanging.py", HANGING)
    argv = "--tracker none --workers 1 --batch_norm node --log_every 1 --max_steps 50".split()
    argv += ["--collective_timeout", PATIENCE, "--output_dir", tmp_path, "--name", "run"]
    env = {"STOP": "1"} if how == "stopped" else {}
    done = gpus.start("multi_gpu", [script] + argv, devices=2, env=env).finish()
    assert done.returncode == 1
    [groups] = re.findall("^GROUPS (.*)", done.stdout, re.MULTILINE)
    timeouts = json.loads(groups)
    assert sorted(kind for kind, _ in timeouts) == ["gloo", "nccl", "nccl"]
    min_seconds = min(seconds for _, seconds in timeouts)
    monitor_seconds = float(re.search("^MONITOR (.*)", done.stdout, re.MULTILINE)[1])
    assert min_seconds == monitor_seconds >= 2 * PATIENCE + 60
    named = re.findall(
        r"^(?!vm).*: (?:rank (\d) \(process \d+ on \S+\)) ", done.stderr, re.MULTILINE
    )
    assert named == ["1"], done.stderr
    if how == "stuck":
        assert "keeps the others waiting: step 5, training\nrank 1 is at\n" in done.stderr
        assert ", in hang\n" in done.stderr
    else:
        assert "gives no sign of life" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["cause"].startswith("rank 1 ")
