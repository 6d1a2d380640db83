"""cluster/mpi/train.sh, with Open MPI and MPICH, trains on two machines what one machine trains with two processes."""

import signal, time
from pathlib import Path
import numpy as np
import pytest

from tests.harness.machines import Watched
from tests.harness.outcomes import Outcome
from tests.harness.ssh import Hosts
from tests.harness.debian import require_package
import sys

WORDS = (
    *("--image_size", 16, "--global_batch_size", 24, "--max_micro_batch_size", 8, "--workers", 1, "--tracker", "none"),
    *("--log_every", 1, "--eval_every", 12, "--checkpoint_every", 6, "--dtype", "float64"),
    *("--batch_norm", "group", "--norm_batch_size", 4, "--hflip", 0.5),
)
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.parametrize("package, command", [("openmpi-bin", "mpirun.openmpi"), ("mpich", "mpirun.mpich")])
def test_x(nodes, tmp_path, tmp_path_factory, package, command):
    require_package(package)
    hosts = Hosts(nodes(2), tmp_path_factory.mktemp("ssh"))
    hosts.provide("mpirun", f"/usr/bin/{command}")
    first, second = hosts.nodes
    (tmp_path / "hosts.txt").write_text(f"{first.address} 1\n# spare\n{second.address} 1\n")
    env = AS_ROOT | {"PYTHON": sys.executable, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "1"}
    words = [
        "cluster/mpi/train.sh",
        tmp_path / "hosts.txt",
        "recipes/cls.py",
        *WORDS,
        "--output_dir",
        tmp_path,
        "--name",
        "two",
    ]
    run = Watched(tmp_path / "two", [hosts.start(first, [*words, "--max_steps", 12], env)])
    done = run.started[0].finish()
    print(done.stdout, done.stderr, done.returncode)
    print([hosts.left_over(n) for n in hosts.nodes])
    run.started = [hosts.start(first, [*words, "--max_steps", 5000], env)]
    run.until(lambda: run.step() > 20, "trains")
    t = time.time()
    run.started[0].process.terminate()
    done = run.started[0].finish()
    print(done.stdout, done.stderr, done.returncode)
    print(time.time() - t, [hosts.left_over(n) for n in hosts.nodes])
    assert 0
