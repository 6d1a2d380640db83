"""A script of the Horovod API runs under torchrun and mpirun. test_elastic.py has accelerate launch and plain Python."""

import json
from pathlib import Path

import pytest

from tests.harness.debian import require_package
from tests.harness.launching import Launcher, free_port

SCRIPT = """
import json, sys
import torch
import compat.horovod as hvd
hvd.init()
torch.manual_seed(hvd.rank())
first = hvd.broadcast(torch.rand(2), root_rank=0)
torch.manual_seed(0)
assert torch.equal(first, torch.rand(2))
reduced = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum)
numbers = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size(), int(reduced)]
with open(f"{sys.argv[1]}/{hvd.rank()}.json", "w") as file:
    json.dump(numbers, file)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port")


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    for name in ("torchrun", "mpirun", "machines"):
        (tmp_path / name).mkdir()
    return tmp_path / "script.py"


def answers(folder: Path) -> list[list[int]]:
    return [json.loads(file.read_text()) for file in sorted(folder.iterdir())]


def test_under_other_launchers(launch, script, tmp_path) -> None:
    """At the same time, so that they take no longer than one."""
    require_package("openmpi-bin")
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "3"]
    started = [
        launch.start_python(*TORCHRUN, free_port(), script, tmp_path / "torchrun"),
        Launcher(launch.home, mpirun).start_python(script, tmp_path / "mpirun"),
    ]
    for process in started:
        done = process.finish()
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert answers(tmp_path / "torchrun") == [[rank, 2, rank, 2, 1, 1] for rank in range(2)]
    assert answers(tmp_path / "mpirun") == [[rank, 3, rank, 3, 1, 3] for rank in range(3)]


@pytest.mark.long
def test_on_two_machines(nodes, script, tmp_path) -> None:
    """Machines that know their own names as 127.0.1.1 negotiate over the network between them."""
    first, second = nodes(2)
    flags = ["--main_process_ip", first.address, "--num_processes", 4]
    started = [node.start("2node_cpu", script, tmp_path / "machines", flags=flags) for node in (first, second)]
    for done in [process.finish() for process in started]:
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert answers(tmp_path / "machines") == [[rank, 4, rank % 2, 2, 2, 6] for rank in range(4)]
