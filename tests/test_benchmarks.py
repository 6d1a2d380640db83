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
def test_a_gpus_own_speed_and_every_way_of_feeding_it_are_measured(launch: Launcher, tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    done = launch.start_python("benchmarks/gpu.py", "--quick", "--compile", "--output", output).finish(400)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert {way: len(speeds) for way, speeds in result["speeds"].items()} == dict.fromkeys(
        ("resident", "by hand", "worker", "cache", "timm"), 2
    )
    resident, *files = result["rows"]
    # Twice timm's loader, or the model's own speed where that is less.
    assert resident["goal"] == 0.98
    assert all(row["goal"] == min(2.0, 0.98 * row["limit"] / row["theirs"]) for row in files)
    assert all(0 < row["ratio"] < 50 and row["limit"] > 0 for row in result["rows"])
    assert done.stdout.count("images/s") == len(result["rows"]) == 3


@pytest.mark.long
def test_a_step_in_shards_is_measured_on_two_processes(launch: Launcher, tmp_path: Path) -> None:
    output = tmp_path / "sharded.json"
    done = launch.start("fsdp_cpu", "benchmarks/sharded.py", "--quick", "--output", output).finish()
    assert done.returncode == 0, done.stderr
    [row] = json.loads(output.read_text())["rows"]
    assert row["goal"] == 0.97 and 0 < row["ratio"] < 50 and done.stdout.count("a bare loop") == 1
