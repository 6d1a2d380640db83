"""benchmarks/comparison: its parts see what a trainer does (all of it takes minutes, and other packages)."""

import json

import pytest

from tests.harness.launching import Launcher

# Runs of cls.py on 101 digits: on one and two processes; killed after 7 of its steps, and resumed.
RUNS = """
import json, sys
from pathlib import Path
sys.path.insert(0, "benchmarks/comparison")
import measuring
from data import save_digits
from launching import Launch, start
from subjects import ours

root = Path(sys.argv[1])
save_digits(root / "digits", 101)

def run(name, num_processes, **options):
    launch = Launch(root / name, root / "digits", root, "cls.py, float64", num_processes, **options)
    start(launch, ours.train)
    return launch.log

logs = [run("one", 1), run("two", 2), run("killed", 2, kill_after=7), run("killed", 2, resume=True)]
one, two, killed, resumed = map(measuring.read_steps, logs)
evaluated = run("evaluated", 2, weights=root / "one")
saved_at = len(one) - len(resumed)
print(json.dumps({
    "steps": [len(one), len(two), len(killed)],
    "saved at": saved_at,
    "layouts": measuring.compare_losses(one, two),
    "resumed": measuring.compare_losses(two[saved_at:], resumed),
    "another loss": measuring.compare_losses(one, one[1:]),
    "samples": [sorted(measuring.count_samples(steps[:4]).values()) for steps in (one, two)],
    "same samples": [set(left.files) == set(right.files) for left, right in zip(one, two)],
    "evaluated": measuring.re.findall(ours.METRIC, (evaluated / "0.txt").read_text()),
}))
"""
ROWS = """
import sys
sys.path.insert(0, "benchmarks/comparison")
import compare, pathlib

values = [[[0.15, 2.34e-16], [0.2, 0.01]], ["24.75", "25.49"], "7/0", None]
result = dict(zip(compare.COLUMNS, values))
print(compare.format_row("theirs", result))
print(compare.format_row("absent", "No module named 'absent'"))
compare.draw_chart({"theirs": result, "absent": "no"}, pathlib.Path(sys.argv[1]))
compare.FOLDER = pathlib.Path(sys.argv[1]).parent
print(compare.compare("absent", None, 1))
"""


def test_the_comparison_sees_losses_samples_and_kills(launch: Launcher, tmp_path) -> None:
    done = launch.start_python(["-c", RUNS, tmp_path]).finish(180)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["steps"] == [9, 9, 7]
    assert results["saved at"] in (0, 5)  # it is written in the background
    assert results["layouts"] < 1e-12
    assert results["resumed"] == 0
    assert results["another loss"] > 1e-4
    assert results["samples"] == [[1] * 96] * 2
    assert results["same samples"] == [True] * 9
    assert len(results["evaluated"]) == 1


@pytest.mark.smoke
def test_the_comparison_prints_rows(launch: Launcher, tmp_path) -> None:
    done = launch.start_python(["-c", ROWS, tmp_path / "chart.png"]).finish(120)
    assert done.returncode == 0, done.stderr
    table_row, absent, missing = done.stdout.splitlines()
    assert (
        table_row == "| theirs | 1.5e-01, 2.3e-16, 2.0e-01, 1.0e-02 | 24.75, 25.49 | 7/0 | None |"
    )
    assert absent == "| absent | No module named 'absent' |"
    assert missing == """{'absent': "No module named 'subjects.absent'"}"""
    assert (tmp_path / "chart.png").stat().st_size > 10_000
