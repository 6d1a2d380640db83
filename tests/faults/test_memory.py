"""A run whose micro-batches do not fit into memory trains the same with smaller ones."""

import ctypes
import functools
import os
import resource
import sys

import numpy as np
import psutil
import pytest
import torch

from tests.harness.outcomes import Outcome
from tests.recipes.copied import copy

STEPS = 8
WORDS = (
    f"--tracker none --log_every 1 --max_steps {STEPS} --checkpoint_every 3 --eval_every 100 "
    "--global_batch_size 32 --max_micro_batch_size 32 --dtype float64 --batch_norm frozen"
).split()
# A recipe of which the last rank has no memory left for more than eight samples, from its fifth
# step on.
FULL = """
@@
+import os
 from collections.abc import Sequence
@@
+import psutil
 import torch
 import torch.nn.functional as F
@@
-from common.run import Run
+from common.run import Observer, Run
@@
+assert not psutil.Process().children(), "data workers of the process that this one has replaced"
+
+
+class Full(Observer):
+    def on_micro_batch(self, step, batch):
+        is_last_rank = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
+        if step >= 5 and len(batch.positions) > 8 and is_last_rank:
+            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
+
+
 def main() -> None:
@@ main
-    with Run(config) as run:  # joins the other ranks, claims runs/<name>/, handles signals
+    with Run(config, Full()) as run:
"""


def allow(megabytes: int) -> None:
    """From now on, no more than these. Where the run would start itself anew, which a fork can't,
    it ends with 99.
    """
    os.execv = lambda *_: sys.exit(99)
    # M_ARENA_MAX: threads share one, else each may take 64 MB of addresses, or not.
    ctypes.CDLL(None).mallopt(-8, 1)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20, resource.RLIM_INFINITY))


@pytest.fixture(scope="module")
def undisturbed(forks, tmp_path_factory) -> Outcome:
    folder = tmp_path_factory.mktemp("runs")
    done = forks(WORDS + ["--output_dir", folder, "--name", "run"])
    assert done.code == 0, done.stderr
    return Outcome(folder=folder / "run")


def test_the_largest_micro_batch_that_fits_is_found_by_a_trial(forks, stripes, tmp_path):
    """With a real limit on this process's memory; then one that is too small for a single sample."""
    argv = WORDS + ["--data", stripes, "--image_size", 128, "--max_steps", 2]
    argv += ["--output_dir", tmp_path]
    whole = forks(argv + ["--name", "whole"])
    assert whole.code == 0 and "32 = 1 process x 1 micro-step x 32 samples" in whole.stdout
    log = ""
    for _ in range(5):  # the trial before the first step may need a little less than the step
        less = forks(argv + ["--name", "less"], before=functools.partial(allow, 300))
        log += less.stdout
        if less.code != 99:
            break
    assert less.code == 0, less.stderr
    assert "do not fit into memory: 32 = 1 process x " in log and "x 1 micro-step " not in log
    unlimited = Outcome(folder=tmp_path / "whole")
    limited = Outcome(folder=tmp_path / "less")
    for key in ("train/loss", "eval/loss"):
        np.testing.assert_allclose(limited.column(key), unlimited.column(key), rtol=1e-8)

    none = forks(
        argv + ["--image_size", 1024, "--name", "none"], before=functools.partial(allow, 300)
    )
    message = "cls.py: not even micro-batches of 1 fit into memory: take a smaller"
    assert none.code == 2 and message in none.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_run_out_of_memory_continues_with_half_the_micro_batch(
    launch, undisturbed, tmp_path, processes
):
    """One process starts itself anew, several are started anew by their launcher; each step is there once."""
    script = copy(tmp_path / "cls_full.py", FULL)
    argv = WORDS + ["--output_dir", tmp_path, "--name", "run"]
    if processes == 1:
        done = launch("cpu", [script] + argv)
    else:  # of two processes on two cores none would have a worker
        argv += ["--workers", 1]
        done = launch("multi_cpu", [script] + argv, flags=["--max_restarts", 3])
    assert done.returncode == 0, done.stderr
    run = Outcome(folder=tmp_path / "run")
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(
        run.column("train/loss"), undisturbed.column("train/loss"), rtol=1e-8
    )
    assert run.read("status.json")["status"] == "finished"
    assert run.read("micro_batch.json") == {"cpu": 8}


def be_too_large() -> None:
    """In a fork: a model finds no room on its device, which no model does on a CPU; so torch's
    method is replaced.
    """

    def to(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    torch.nn.Module.to = to


def test_a_model_that_does_not_fit_is_refused_in_one_line(forks) -> None:
    ended = forks(["--max_steps", 1, "--name", "too_large"], before=be_too_large)
    [line] = [line for line in ended.stderr.splitlines() if "memory" in line]
    assert ended.code == 2
    assert "does not fit into the memory of a device" in line
    assert "accelerate_configs/fsdp_bf16.yaml" in line
