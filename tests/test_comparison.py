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
    launch = Launch(root / name, root / "digits", "cls.py, float64", num_processes, 24, **options)
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
# A run of det.py on two processes: two epochs of three steps each.
DETECTION = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, "benchmarks/comparison")
import measuring
from data import save_scenes
from launching import Launch, start
from subjects import ours

root = Path(sys.argv[1])
save_scenes(root / "scenes", 16)
launch = Launch(root / "run", root / "scenes", "det.py, float64", 2, 6)
start(launch, ours.train)
steps = measuring.read_steps(launch.log)
coco = json.loads((root / "scenes/annotations/instances_train2017.json").read_text())
print(json.dumps({
    "losses": [step.loss for step in steps],
    "samples": sorted(measuring.count_samples(steps).items()),
    "boxes": [annotation["bbox"] for annotation in coco["annotations"]],
    "evaluated": re.findall(ours.METRIC, (root / "run/runs/run/best/results.json").read_text()),
}))
"""
# A subject that can't run, beside the results of one that did.
RESULTS = """
import sys
sys.path.insert(0, "benchmarks/comparison")
import compare, pathlib

compare.FOLDER = pathlib.Path(sys.argv[1])
sys.argv[1:] = ["absent"]
compare.main()
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


def test_the_comparison_sees_samples_of_detectors(launch: Launcher, tmp_path) -> None:
    done = launch.start_python(["-c", DETECTION, tmp_path]).finish(180)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    paths = [str(tmp_path / f"scenes/train2017/{index:03}.png") for index in range(16)]
    # A batch is full: the last one of an epoch goes on with the first images of the next.
    assert [path for path, _ in results["samples"]] == paths
    assert sum(count for _, count in results["samples"]) == 6 * len(results["losses"])
    assert all(loss > 0 for loss in results["losses"])
    assert len(results["boxes"]) > 16
    assert all(box[2:] == [24, 24] and max(box[:2]) <= 72 for box in results["boxes"])
    assert results["evaluated"]


@pytest.mark.smoke
def test_the_comparison_adds_to_its_results(launch: Launcher, tmp_path) -> None:
    theirs = {"loss 1 to 2, 2 to 3": [[0.15, 2.34e-16], [0.2, 0.01]]}
    (tmp_path / "results.json").write_text(json.dumps({"theirs": theirs}))
    done = launch.start_python(["-c", RESULTS, tmp_path]).finish(120)
    assert done.returncode == 0, done.stderr
    absent = {"absent": "No module named 'subjects.absent'"}
    assert json.loads(done.stdout) == absent
    assert json.loads((tmp_path / "results.json").read_text()) == {"theirs": theirs} | absent
    assert (tmp_path / "chart.png").stat().st_size > 10_000
