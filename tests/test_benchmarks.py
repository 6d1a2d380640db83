"""Benchmarks: every script runs, and its results have the promised form. How fast it is does not matter to a test."""

import json
import subprocess
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
for loop in (paired.build_recipe_loop("det", detection.build_flags), detection.train_bare):
    paired.measure_block(loop, paired.Setting("test_resnet", 64, 3, 2))
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
def test_all_scripts_make_one_table(launch: Launcher) -> None:
    done = launch.start_python("benchmarks/everything.py", "--quick").finish(900)
    assert done.returncode == 0, done.stderr
    for script in ("input_pipeline", "loop", "detection", "startup", "checkpoint", "shards"):
        assert f"benchmarks/{script}.py: " in done.stderr
    assert done.stdout.count("\n") >= 30  # a row each


@pytest.mark.long
@pytest.mark.parametrize("script, num_rows", [("whole_run", 2), ("gpu", 4)])
def test_scripts_outside_the_table_run_on_a_cpu(script: str, num_rows: int, launch: Launcher, tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    done = launch.start_python(f"benchmarks/{script}.py", "--quick", "--output", output).finish(400)
    check_rows(done, output, num_rows)


@pytest.mark.long
def test_a_sharded_loop_is_measured(launch: Launcher, tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    done = launch("fsdp_cpu", "benchmarks/sharded.py", "--quick", "--output", output)
    check_rows(done, output, num_rows=2)


def check_rows(done: subprocess.CompletedProcess[str], output: Path, num_rows: int) -> None:
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())
    assert len(rows) == num_rows
    assert all(row["ratio"] > 0 for row in rows)
