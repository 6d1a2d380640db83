"""A script of the Horovod API runs under torchrun and mpirun. test_elastic.py has accelerate launch and plain Python."""

import json

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


def test_under_other_launchers(launch, tmp_path) -> None:
    """At the same time, so that they take no longer than one."""
    require_package("openmpi-bin")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for name in ("torchrun", "mpirun"):
        (tmp_path / name).mkdir()
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "3"]
    started = [
        launch.start_python(*TORCHRUN, free_port(), script, tmp_path / "torchrun"),
        Launcher(launch.home, mpirun).start_python(script, tmp_path / "mpirun"),
    ]
    for process in started:
        done = process.finish()
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for name, size, total in (("torchrun", 2, 1), ("mpirun", 3, 3)):
        answers = [json.loads((tmp_path / name / f"{rank}.json").read_text()) for rank in range(size)]
        assert answers == [[rank, size, rank, size, 1, total] for rank in range(size)]
