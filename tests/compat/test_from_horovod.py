"""docs/coming_from_elsewhere.md: scripts for Horovod train what the plain script trains on one process.

With the whole training set as the batch the order of samples does not matter, so the weights must agree.
"""

import re
from pathlib import Path

import pytest
import torch

from tests.harness.debian import require_package
from tests.harness.fashion_mnist import PACKAGE, unpack
from tests.harness.launching import ROOT

FOLDER = ROOT / "docs/from_horovod"
IMAGES = 6000  # of each part
SCRIPTS = {"train": [], "compressed": ["--fp16"], "elastic": []}
# Runs scripts one after the other in the same process, each in a folder of its own.
RUN = """
import os, runpy, sys
sys.path.insert(0, sys.argv[1])
import compat.horovod as hvd
for script, *words in [line.split() for line in sys.argv[2:]]:
    os.makedirs(script.removesuffix(".py"), exist_ok=True)
    os.chdir(script.removesuffix(".py"))
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
    hvd.shutdown()
"""


def write(folder: Path, name: str, numbers: str) -> Path:
    """A copy of a script with the whole set as the batch, which leaves its weights."""
    source = (FOLDER / f"{'train' if name == 'compressed' else name}.py").read_text()
    source, count = re.subn(
        "EPOCHS, BATCH, RATE = 2, .*", f"EPOCHS, BATCH, RATE = 2, {numbers}", source
    )
    assert count == 1
    source += "\nif __import__('os').environ.get('RANK', '0') == '0':\n"
    source += "    torch.save(model.state_dict(), 'weights.pt')\n"
    (folder / f"{name}.py").write_text(source)
    return folder / f"{name}.py"


@pytest.mark.smoke
def test_the_eight_adaptations_are_in_the_script() -> None:
    rows = re.findall(
        r"^\| (\d)\. [^|]+\| (.+?) \|", (ROOT / "docs/coming_from_elsewhere.md").read_text(), re.M
    )
    assert [number for number, _ in rows] == list("12345678")
    source = (FOLDER / "train.py").read_text()
    assert all(code in source for _, cell in rows for code in re.findall("`(.+?)`", cell))


@pytest.fixture(scope="module")
def folder(launch, tmp_path_factory) -> Path:
    """Where all scripts have trained: the plain one in one process, the others on two, which start once."""
    require_package(PACKAGE)
    folder = tmp_path_factory.mktemp("scripts")
    unpack(folder, IMAGES)
    (folder / "run.py").write_text(RUN)
    plain = f"{write(folder, 'plain', f'{IMAGES}, 0.05')} {folder}"
    other_files = [
        f"{write(folder, name, f'{IMAGES // 2}, 0.025')} {folder} {' '.join(SCRIPTS[name])}"
        for name in SCRIPTS
    ]
    alone = launch.start_python([folder / "run.py", FOLDER, plain])
    done = launch("multi_cpu", [folder / "run.py", FOLDER] + other_files, timeout=1200)
    assert done.returncode == alone.finish(1200).returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_weights_are_those_of_the_plain_script(folder, script) -> None:
    weights, expected = (torch.load(folder / name / "weights.pt") for name in (script, "plain"))
    assert weights.keys() == expected.keys()
    tolerance = 1e-3 if script == "compressed" else 1e-5
    for key, value in weights.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=tolerance)
