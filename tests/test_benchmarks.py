"""Benchmarks: every script runs, and its results have the promised form. How fast it is does not matter to a test."""

import json
from pathlib import Path

import pytest

from tests.harness.launching import Launcher

# The gradient norms of the first steps of a recipe, and of the bare loop beside it.
NORMS = """
import sys
sys.path.insert(0, "benchmarks")
import detection, paired, torch

norm_of = torch.nn.utils.get_total_norm
norms = []
torch.nn.utils.get_total_norm = lambda *arguments: norms.append(norm_of(*arguments)) or norms[-1]
for loop in (paired.recipe("det", detection.flags), detection.bare):
    paired.measure(loop, paired.Setting("test_resnet", 64, 3, 2))
print([norm.item() for norm in norms])
"""


@pytest.mark.long
def test_the_bare_loop_around_a_detector_takes_the_steps_of_the_recipe(launch: Launcher) -> None:
    done = launch.start_python("-c", NORMS).finish()
    assert done.returncode == 0, done.stderr
    norms = json.loads(done.stdout)
    assert len(norms) == 10 and len(set(norms[:5])) == 5
    assert norms[:5] == pytest.approx(norms[5:], rel=1e-4)


@pytest.mark.long
def test_all_scripts_make_one_table(launch: Launcher, tmp_path: Path) -> None:
    scripts = ("input_pipeline", "loop", "detection", "startup", "checkpoint", "shards")
    script = launch.start_python("benchmarks/everything.py", "--quick", "--output", tmp_path)
    done = script.finish(900)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert tuple(result["scripts"]) == scripts and result["machine"]["cores"] > 0
    rows = sum(len(part["rows"]) for part in result["scripts"].values())
    assert rows >= 30 and done.stdout.count("\n") == rows + 3


@pytest.mark.long
def test_a_whole_run_is_measured_beside_those_of_other_libraries(launch: Launcher, tmp_path: Path) -> None:
    done = launch.start_python("benchmarks/whole_run.py", "--quick", "--output", tmp_path / "whole").finish(400)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "whole").read_text())["rows"]
    assert len(rows) == 2 and all(row["ratio"] > 0 for row in rows)


@pytest.mark.long
def test_scripts_for_gpus_run_on_cpus_too(launch: Launcher, tmp_path: Path) -> None:
    started = launch.start_python("benchmarks/gpu.py", "--quick", "--compile", "--output", tmp_path / "gpu.json")
    sharded = launch("fsdp_cpu", "benchmarks/sharded.py", "--quick", "--output", tmp_path / "sharded.json")
    gpu = started.finish(400)
    for done, name, count in ((gpu, "gpu", 3), (sharded, "sharded", 1)):
        assert done.returncode == 0, done.stderr
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert len(rows) == count and all(0 < row["ratio"] < 50 for row in rows)
