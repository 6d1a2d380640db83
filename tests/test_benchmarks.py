"""Do the benchmarks run, and is what they show of the kind that is promised? (How fast it is, is no matter for a test.)"""

import json
import math
from pathlib import Path

from tests.conftest import Launcher


def run(launch: Launcher, script: str, output: Path) -> tuple[str, list[dict]]:
    """What `benchmarks/<script> --quick` prints and what it writes."""
    done = launch.start_python(f"benchmarks/{script}", "--quick", "--output", output).finish()
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(output.read_text())


def test_the_first_batch_of_ten_billion_samples_costs_what_one_of_ten_thousand_costs(
    launch: Launcher, tmp_path: Path
) -> None:
    printed, rows = run(launch, "stream.py", tmp_path / "stream.json")
    assert len(rows) == 3 and printed.count("\n") == 5
    many = next(row for row in rows if row["samples"] == 10**10)
    assert (many["sampler"], many["processes"]) == ("Stream", 4096)
    assert many["first_batch_ms"] < 1000 and many["memory_mib"] < 50  # a list of them: minutes and 80 GB


def test_recipe_and_bare_loop_are_both_measured(launch: Launcher, tmp_path: Path) -> None:
    printed, results = run(launch, "loop.py", tmp_path / "loop.json")
    assert "ms a step" in printed and "µs a sample" in printed
    assert [result["setting"]["batch_size"] for result in results] == [16, 8, 24]
    for result in results:
        for clock in ("wall", "cpu"):
            assert all(math.isfinite(figure) for figure in result[clock].values())
            assert 0.02 < result[clock]["throughput"] < 50  # two loops that do the same work, on however busy a machine
