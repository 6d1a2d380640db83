"""One script of the Horovod API runs under accelerate launch, torchrun and Open MPI's mpirun, and as plain Python."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.debian import require_package
from tests.harness.launching import ROOT, Started, free_port, inherited

SCRIPT = ROOT / "tests" / "compat" / "script.py"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]


def answers(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.iterdir())]


def expected(size: int) -> list[dict]:
    gathered = [rank for rank in range(size) for _ in range(rank + 1)]
    return [
        {"numbers": [rank, size, rank, size, 1], "sum": sum(range(size)), "gathered": gathered, "launcher": None}
        for rank in range(size)
    ]


@pytest.mark.long
def test_on_two_machines(nodes, tmp_path: Path) -> None:
    """Machines that know their own names as 127.0.1.1 negotiate over the network between them."""
    first, second = nodes(2)
    flags = ["--main_process_ip", first.address, "--num_processes", 4]
    started = [node.start("2node_cpu", SCRIPT, tmp_path, flags=flags) for node in (first, second)]
    for done in [process.finish() for process in started]:
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    of_one = expected(4)
    for rank, answer in enumerate(of_one):
        answer["numbers"] = [rank, 4, rank % 2, 2, 2]
    assert answers(tmp_path) == of_one


def test_under_every_launcher(launch, tmp_path: Path) -> None:
    """At the same time, so that they take no longer than one."""
    require_package("openmpi-bin")
    folders = {name: tmp_path / name for name in ("accelerate", "torchrun", "mpirun", "python")}
    for folder in folders.values():
        folder.mkdir()
    started: dict[str, Started] = {
        "accelerate": launch.start("multi_cpu", SCRIPT, folders["accelerate"], flags=["--num_processes", 2]),
        "torchrun": launch.start_python(*TORCHRUN, "--master-port", free_port(), SCRIPT, folders["torchrun"]),
        "python": launch.start_python(SCRIPT, folders["python"]),
    }
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "3", sys.executable, SCRIPT]
    under_mpi = subprocess.run(
        [*mpirun, folders["mpirun"]],
        env=inherited() | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert under_mpi.returncode == 0, under_mpi.stderr
    for name, process in started.items():
        done = process.finish()
        assert done.returncode == 0, f"{name}: {done.stdout}\n{done.stderr}"
    for name, folder in folders.items():
        assert answers(folder) == expected({"mpirun": 3, "python": 1}.get(name, 2)), name
