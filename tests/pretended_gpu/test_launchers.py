"""Under mpirun, each process takes a GPU of its own, or the launch is refused."""

import json
import os

import pytest

from tests.harness.debian import require_package
from tests.harness.launching import ROOT, Launcher

PROBE = """
import json, os, sys
from pathlib import Path
import torch
from common.launching import launch
def main():
    accelerator = launch.start()
    total = accelerator.reduce(torch.ones(1, device=accelerator.device), "sum").item()
    here = [str(accelerator.device), total, launch.describe(accelerator, "float32")]
    Path(sys.argv[1], str(accelerator.process_index)).write_text(json.dumps(here))
launch.run(main)
"""


@pytest.mark.parametrize("visible", [2, 1])
def test_each_process_takes_a_gpu_of_its_own(launch, gpus, tmp_path, visible) -> None:
    require_package("openmpi-bin")
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    mpirun = Launcher(launch.home, ["mpirun.openmpi", *as_root, "--oversubscribe", "-n", "2"])
    env = gpus.environment | {"PRETENDED_GPUS": str(visible), "PYTHONPATH": str(ROOT)}
    done = mpirun.start_python(ROOT / "tests/pretended_gpu/run.py", script, tmp_path, env=env).finish(180)
    if visible == 1:
        said = [line for line in done.stderr.splitlines() if "same GPU" in line]
        assert done.returncode == 2 and len(said) == 1 and "rank 1 has the same GPU as rank 0" in said[0], done
        return
    assert done.returncode == 0, done
    table = "2 processes on 1 node, Pretended GPU (nccl), fp32 (TF32), started by Open MPI"
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [
        [f"cuda:{rank}", 2.0, table] for rank in "01"
    ]
