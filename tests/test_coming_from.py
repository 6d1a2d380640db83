"""docs/coming_from_elsewhere.md: its scripts of other systems and the copy that replaces them train the same model alike.

With the whole training set as the batch, the order of samples does not matter: a script on one process and the copy on two must
have the same losses. With the scripts' own batches, samples are shuffled differently and the accuracies are close.
"""

import importlib.util
import json
import re
from collections.abc import Mapping
from functools import partial
from itertools import pairwise

import pytest
from torch.utils.data.distributed import DistributedSampler

from tests.harness.launching import ROOT, free_port
from tests.recipes.copied import apply

PAGE = (ROOT / "docs/coming_from_elsewhere.md").read_text()
FOLDER = ROOT / "docs/coming_from"
PACKAGES = {"lightning_module": "pytorch_lightning", "mmengine_runner": "mmengine"}
SCRIPTS = ["data_parallel", "apex_amp", "cuda_amp", *PACKAGES]
EXACT = 1e-5  # of losses around 2, in float32
# apex amp with O0 changes nothing. It is on no package index.
APEX = """
import contextlib
@contextlib.contextmanager
def scale_loss(loss, optimizer):
    yield loss
def initialize(model, optimizer, opt_level): return model, optimizer
def master_params(optimizer): return [weight for group in optimizer.param_groups for weight in group["params"]]
def state_dict(): return {}
"""
# Runs scripts in forks of a process that has imported what they need: importing torch takes longer than they do.
RUN = """
import multiprocessing, os, runpy, sys
from importlib.util import find_spec
import sklearn.datasets, torch, torchvision.transforms
if find_spec("pytorch_lightning"):
    import pytorch_lightning
def run(script):
    folder = script.removesuffix(".py")
    os.makedirs(folder)
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    runpy.run_path(script, run_name="__main__")
for script in sys.argv[1:]:
    process = multiprocessing.get_context("fork").Process(target=run, args=[script])
    process.start()
    process.join()
"""


@pytest.mark.smoke
def test_the_listings_are_the_files() -> None:
    shown = dict(re.findall(r"<!-- from: (.+?) -->\n```python\n(.*?)```\n", PAGE, re.S))
    assert {ROOT / name for name in shown} == {*FOLDER.glob("*.py")}
    assert {name: (ROOT / name).read_text() for name in shown} == shown
    assert PAGE.count("```python") == len(shown)


@pytest.mark.smoke
def test_what_the_page_says_of_samplers() -> None:
    assert "1,437 images on 2 ranks become 1,438" in PAGE and "360 images on 7 ranks become 364" in PAGE
    train, val = DistributedSampler(range(1437), 2, 0), DistributedSampler(range(360), 7, 0, shuffle=False)
    assert train.total_size == 1438 and val.total_size == 364
    assert [*train] == [*train], "every epoch has the same order until set_epoch is called"


@pytest.fixture(scope="module")
def before(launch, tmp_path_factory) -> dict[str, str]:
    """By script and batch, as in "ddp 32": what it printed."""
    folder = tmp_path_factory.mktemp("before")
    (folder / "apex").mkdir()
    (folder / "apex/__init__.py").touch()
    (folder / "apex/amp.py").write_text(APEX)
    env = {"PYTHONPATH": f"{FOLDER}:{folder}", "MASTER_PORT": str(free_port())}
    found = {}
    scripts = [name for name in SCRIPTS if name not in PACKAGES or importlib.util.find_spec(PACKAGES[name])]
    for name in scripts:
        text = (FOLDER / f"{name}.py").read_text()
        assert text.count("EPOCHS, BATCH, RATE = 6, 64, 0.05") == 1
        (folder / f"{name} 64.py").write_text(text)
        (folder / f"{name} 1437.py").write_text(text.replace("6, 64, 0.05", "6, 1437, 0.05"))
    alike = {"apex_amp", "cuda_amp"}  # on a CPU they do with batch 64 just what data_parallel does
    runs = [folder / f"{name} {batch}.py" for name in scripts for batch in ([1437] if name in alike else [64, 1437])]
    launch.start_python("-c", RUN, *runs, env=env).finish(300)
    for path in runs:
        found[path.stem] = (path.with_suffix("") / "output").read_text()
    done = launch.start_python(FOLDER / "ddp.py", env=env, cwd=folder).finish(180)
    return found | {"ddp 32": done.stdout + done.stderr}


@pytest.fixture(scope="module")
def after(run_several, launch, tmp_path_factory) -> Mapping[int, list[dict]]:
    """By global batch: the rows of the copy's metrics.jsonl, from two processes."""
    folder = tmp_path_factory.mktemp("after")
    [diff] = re.findall("```diff\n(.*?)```", PAGE, re.S)
    (folder / "train.py").write_text(apply(diff, (ROOT / "recipes/cls.py").read_text()))
    plain = [folder / "train.py", "--config", FOLDER / "mine.yaml", "--workers", 1]
    cases = {"64": plain, "1437": [*plain, "--global_batch_size", 1437, "--log_every", 1]}
    start = partial(launch, "multi_cpu", env={"PYTHONPATH": str(FOLDER)})  # a script finds modules beside it by itself
    runs = run_several(2, cases, as_typed=True, launch=start)
    assert all(run.outcome == "ok" for run in runs.values()), runs
    texts = {int(name): (run.folder / "metrics.jsonl").read_text() for name, run in runs.items()}
    return {batch: [json.loads(line) for line in text.splitlines()] for batch, text in texts.items()}


def test_the_copy_repeats_the_losses_of_the_scripts(before, after) -> None:
    losses = [row["train/loss"] for row in after[1437]]
    assert len(losses) == 6 and all(later < earlier - 0.01 for earlier, later in pairwise(losses))
    assert ", ".join(f"{loss:.4f}" for loss in losses) in PAGE
    accuracies = [row["eval/top1"] for row in after[1437]]
    for name in ("data_parallel", "apex_amp", "cuda_amp", "lightning_module"):
        if f"{name} 1437" in before:
            text = before[f"{name} 1437"]
            assert [float(loss) for loss in re.findall(r"loss (\d\.\d+)", text)] == pytest.approx(losses, abs=EXACT), (
                text
            )
            assert [float(found) for found in re.findall(r"accuracy (\d\.\d+)", text)] == pytest.approx(
                accuracies, abs=1e-4
            )
    if "mmengine_runner 1437" in before:  # prints four digits
        text = before["mmengine_runner 1437"]
        assert [float(loss) for loss in re.findall(r" loss: (\d\.\d+)", text)] == pytest.approx(losses, abs=1e-4), text


def test_with_their_own_batches_scripts_and_copy_are_equally_good(before, after) -> None:
    last = {name: re.findall(r"accuracy:? (\d\.\d+)", text)[-1:] for name, text in before.items() if "1437" not in name}
    assert len(last) >= 2 and all(last.values()), before
    shares = [float(share) for [share] in last.values()] + [
        [row["eval/top1"] for row in after[64] if "eval/top1" in row][-1]
    ]
    assert 0.95 < min(shares) <= max(shares) < min(shares) + 0.025, last
