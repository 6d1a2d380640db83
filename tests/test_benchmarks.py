"""Benchmarks: every script runs, and its results have the promised form. How fast it is does not
matter to a test.
"""

import json
import subprocess

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
def test_the_bare_loop_of_a_detector_takes_the_recipes_steps(launch: Launcher) -> None:
    done = launch.start_python(["-c", NORMS]).finish()
    assert done.returncode == 0, done.stderr
    norms = json.loads(done.stdout)
    assert len(norms) == 10 and len(set(norms[:5])) == 5
    assert norms[:5] == pytest.approx(norms[5:], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "script, num_rows",
    [
        ("input_pipeline", 12),
        ("loop", 3),
        ("detection", 3),
        ("startup", 3),
        ("checkpoint", 1),
        ("shards", 11),
        ("whole_run", 4),
        ("gpu", 2),
    ],
)
def test_a_script_prints_its_rows(script: str, num_rows: int, launch: Launcher) -> None:
    done = launch.start_python([f"benchmarks/{script}.py", "--quick"]).finish(400)
    check_table(done, num_rows)


@pytest.mark.long
def test_a_sharded_loop_is_measured(launch: Launcher) -> None:
    done = launch("fsdp_cpu", ["benchmarks/sharded.py", "--quick"])
    check_table(done, num_rows=2)


def check_table(done: subprocess.CompletedProcess[str], num_rows: int) -> None:
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["ours", "peer", "ratio", "goal", "peer,", "unit"]
    # With SPDL, which the project does not require, there are more.
    assert len(rows) >= num_rows
