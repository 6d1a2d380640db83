"""Under mpirun, each process takes a GPU of its own, or the launch is refused."""

import json
import os

import pytest

from tests.harness.debian import require_package
from tests.harness.launching import ROOT, Launcher

# `apart` stands for a launcher that shows another GPU to each process; the pretended runtime knows devices by number only.
PROBE = """
import json, os, sys
from pathlib import Path
import torch
from common.launching import launch
class Another:
    def __init__(self, properties):
        self.properties = properties
    def __getattr__(self, name):
        return os.environ["LOCAL_RANK"] if name == "uuid" else getattr(self.properties, name)
if sys.argv[2] == "apart":
    properties_of = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda *device: Another(properties_of(*device))
def main():
    accelerator = launch.start()
    total = accelerator.reduce(torch.ones(1, device=accelerator.device), "sum").item()
    here = [str(accelerator.device), total, launch.describe(accelerator, "float32")]
    Path(sys.argv[1], str(accelerator.process_index)).write_text(json.dumps(here))
launch.run(main)
"""


@pytest.mark.parametrize("visible, how", [(2, "all"), pytest.param(1, "apart", marks=pytest.mark.long), (1, "same")])
def test_each_process_takes_a_gpu_of_its_own(launch, gpus, tmp_path, visible, how) -> None:
    require_package("openmpi-bin")
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    mpirun = Launcher(launch.home, ["mpirun.openmpi", *as_root, "--oversubscribe", "-n", "2"])
    env = gpus.environment | {"PRETENDED_GPUS": str(visible), "PYTHONPATH": str(ROOT)}
    done = mpirun.start_python(ROOT / "tests/pretended_gpu/run.py", script, tmp_path, how, env=env).finish(180)
    if how == "same":
        said = [line for line in done.stderr.splitlines() if "same GPU" in line]
        assert done.returncode == 2 and len(said) == 1 and "rank 1 has the same GPU as rank 0" in said[0], done
        return
    assert done.returncode == 0, done
    table = "2 processes on 1 node, Pretended GPU (nccl), fp32 (TF32), started by Open MPI"
    devices = ["cuda:0", "cuda:1"] if how == "all" else ["cuda:0", "cuda:0"]
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [[device, 2.0, table] for device in devices]
