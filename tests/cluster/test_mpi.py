"""cluster/mpi/train.sh trains on two machines what one process trains, with Open MPI and with MPICH."""

import sys

import pytest

from tests.cluster.two_machines import WORDS, assert_same_losses
from tests.harness.debian import require_package
from tests.harness.launching import Started
from tests.harness.machines import Watched
from tests.harness.paced import PACED

ENV = {
    "PYTHON": sys.executable,
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "1",
    "GRACE": "2",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@pytest.mark.parametrize(
    "name, stops", [("Open MPI", False), pytest.param("MPICH", True, marks=pytest.mark.long)]
)
def test_two_machines_train_what_one_process_trains(name, stops, hosts, alone, tmp_path):
    """If it stops on the way, it saves at once, ends with 75 and leaves no process; the same
    command resumes it.
    """
    package, command = {
        "Open MPI": ("openmpi-bin", "mpirun.openmpi"),
        "MPICH": ("mpich", "mpirun.mpich"),
    }[name]
    require_package(package)
    hosts.provide("mpirun", f"/usr/bin/{command}")
    (tmp_path / "hosts.txt").write_text(
        "".join(f"{node.address} 1  # GPUs\n\n" for node in hosts.nodes)
    )
    (tmp_path / "cls_paced.py").write_text(PACED)
    argv = ["cluster/mpi/train.sh", tmp_path / "hosts.txt", tmp_path / "cls_paced.py"]
    argv += WORDS + ["--output_dir", tmp_path, "--name", "two"]

    def train() -> Started:
        return hosts.start(hosts.nodes[0], argv, ENV)

    if stops:
        run = Watched(tmp_path / "two", [train()])
        run.until(lambda: run.step() >= 2, "both train")
        run.started[0].process.terminate()
        stopped = run.started[0].finish()
        assert stopped.returncode == 75 and "stopped by SIG" in stopped.stdout, stopped
        assert hosts.nothing_is_left(), hosts.left_over()
    done = train().finish()
    assert done.returncode == 0, done.stderr
    assert f"2 processes on 2 nodes, cpu (gloo), fp64, started by {name}" in done.stdout
    assert ("resuming from step" in done.stdout) == stops
    assert hosts.nothing_is_left(), hosts.left_over()
    assert_same_losses(tmp_path / "two", alone)
