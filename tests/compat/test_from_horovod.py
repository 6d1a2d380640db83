"""docs/coming_from_elsewhere.md: scripts for Horovod, and the recipe's copy, train what the plain script trains on one process.

With the whole training set as the batch the order of samples does not matter, so the weights must
agree. With the scripts' own batches the samples are shuffled differently, and the accuracies are
close.
"""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.harness.debian import require_package
from tests.harness.fashion_mnist import PACKAGE, save_fashion_mnist, unpack
from tests.harness.launching import ROOT
from tests.recipes.copied import apply

PAGE = (ROOT / "docs/coming_from_elsewhere.md").read_text()
FOLDER = ROOT / "docs/from_horovod"
IMAGES = 6000  # of each part
SCRIPTS = {"train": [], "compressed": ["--fp16"], "two_models": [], "elastic": []}
BATCHES = {"plain": "EPOCHS, BATCH, RATE = 2, 128, 0.05"}
BATCHES |= dict.fromkeys(SCRIPTS, "EPOCHS, BATCH, RATE = 2, 64, 0.025")
WEIGHTS = {"two_models": "torch.nn.Sequential(encoder, *head)"}  # the others: model
# Runs scripts one after the other in the same process, each in a folder of its own.
RUN = """
import os, runpy, sys, time
sys.path.insert(0, sys.argv[1])
from torchvision import datasets
import compat.horovod as hvd
for script, *words in [line.split() for line in sys.argv[2:]]:
    folder = script.removesuffix(".py")
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    output, sys.stdout = sys.stdout, open(f"output {os.environ.get('RANK', 0)}", "w")
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
    sys.stdout.close()
    sys.stdout = output
    hvd.shutdown()
"""


def write(folder: Path, name: str, batch: str) -> Path:
    """A copy of a script with other numbers, which leaves its weights."""
    file = FOLDER / f"{'train' if name == 'compressed' else name}.py"
    source = file.read_text()
    assert source.count(BATCHES[name]) == 1
    source = source.replace(BATCHES[name], batch)
    saved = f"torch.save({WEIGHTS.get(name, 'model')}.state_dict(), 'weights.pt')\n"
    source += f"if hvd.rank() == 0:\n    {saved}" if name != "plain" else saved
    (folder / f"{name}.py").write_text(source)
    return folder / f"{name}.py"


def run(launch, folder: Path, data: Path, batches: dict[str, str]) -> None:
    """Run the plain script on one process and the others on two."""
    folder.mkdir()
    scripts = {name: write(folder, name, batches[name]) for name in BATCHES}
    lines = [f"{scripts[name]} {data} {' '.join(words)}" for name, words in SCRIPTS.items()]
    (folder / "run.py").write_text(RUN)
    plain = launch.start_python(folder / "run.py", FOLDER, f"{scripts['plain']} {data}")
    launch("multi_cpu", folder / "run.py", FOLDER, *lines, timeout=1200)
    plain.finish(1200)


def accuracy(folder: Path, name: str) -> float:
    return float(re.findall(r"epoch 1: accuracy (\d\.\d+)", (folder / name / "output 0").read_text())[-1])


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    require_package(PACKAGE)
    folder = tmp_path_factory.mktemp("fashion")
    unpack(folder, IMAGES)
    return folder


@pytest.mark.smoke
def test_the_eight_adaptations_are_in_the_script() -> None:
    rows = re.findall(r"^\| (\d)\. [^|]+\| (.+?) \|", PAGE, re.M)
    assert [number for number, _ in rows] == [*"12345678"]
    source = (FOLDER / "train.py").read_text()
    for _, cell in rows:
        for code in re.findall("`(.+?)`", cell):
            assert code in source


def test_with_the_whole_set_as_the_batch_weights_are_those_of_the_plain_script(launch, data, tmp_path) -> None:
    plain, each = f"EPOCHS, BATCH, RATE = 2, {IMAGES}, 0.05", f"EPOCHS, BATCH, RATE = 2, {IMAGES // 2}, 0.025"
    run(launch, tmp_path / "whole", data, {"plain": plain} | dict.fromkeys(SCRIPTS, each))
    plain = torch.load(tmp_path / "whole/plain/weights.pt")
    for name in SCRIPTS:
        weights = torch.load(tmp_path / "whole" / name / "weights.pt")
        assert weights.keys() == plain.keys()
        furthest = max((weights[key] - plain[key]).abs().max().item() for key in plain)
        assert furthest < (1e-3 if name == "compressed" else 1e-5), (name, furthest)


@pytest.mark.long
def test_the_scripts_and_the_recipe_are_as_accurate_as_the_plain_script(launch, run_several, tmp_path) -> None:
    require_package(PACKAGE)
    unpack(tmp_path)
    folder = tmp_path / "own"
    run(launch, folder, tmp_path, BATCHES)
    accuracies = {name: accuracy(folder, name) for name in BATCHES}
    [diff] = re.findall("```diff\n(@@.*?)```", PAGE, re.S)
    own_data = diff[diff.index("@@ build_data") : diff.index("@@ build_model")]
    diff = diff.replace(own_data, "").replace("from mine import Digits, Net", "from fashion import Net")
    (folder / "mine").mkdir()
    (folder / "mine/train.py").write_text(apply(diff, (ROOT / "recipes/cls.py").read_text()))
    save_fashion_mnist(folder / "saved")
    words = [folder / "mine/train.py", "--config", FOLDER / "fashion.yaml", "--data", folder / "saved", "--workers", 1]
    start = partial(launch, "multi_cpu", env={"PYTHONPATH": str(FOLDER)}, timeout=1200)
    [copied] = run_several(2, {"copy": words}, as_typed=True, launch=start).values()
    assert copied.outcome == "ok", copied
    accuracies["recipe"] = copied.column("eval/top1")[-1]
    print(accuracies)
    assert all(abs(found - accuracies["plain"]) < 0.02 for found in accuracies.values()), accuracies


@pytest.mark.alone
@pytest.mark.long
def test_a_step_takes_at_most_a_tenth_longer_than_ddp(launch) -> None:
    done = launch("multi_cpu", "benchmarks/horovod_optimizer.py", timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["difference of weights"] == 0.0 and result["ratio"] <= 1.1, result
