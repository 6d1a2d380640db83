"""docs/coming_from_elsewhere.md: a script with DDP, and the copy in its place, train the same model.

With the whole training set as the batch, the order of samples does not matter: the script on one process and the copy on two
must have the same losses. With the script's own batch, samples are shuffled differently and the accuracies are close.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from itertools import pairwise

import pytest

from tests.harness.launching import ROOT, free_port
from tests.recipes.copied import apply

PAGE = (ROOT / "docs/coming_from_elsewhere.md").read_text()
FOLDER = ROOT / "tests/coming_from"
EXACT = 1e-5  # of losses around 2, in float32


@pytest.fixture(scope="module")
def before(launch, tmp_path_factory) -> dict[str, str]:
    """What the script prints, by batch of a process and number of processes."""
    folder = tmp_path_factory.mktemp("before")
    text = (FOLDER / "ddp.py").read_text()
    assert text.count("EPOCHS, BATCH, RATE, GPUS = 6, 32, 0.05, 2") == 1
    (folder / "whole.py").write_text(text.replace("6, 32, 0.05, 2", "6, 1437, 0.05, 1"))
    env = {"PYTHONPATH": str(FOLDER), "MASTER_PORT": str(free_port())}
    scripts = {"32 on two": FOLDER / "ddp.py", "1437 on one": folder / "whole.py"}
    ended = {name: launch.start_python(script, env=env, cwd=folder).finish(180) for name, script in scripts.items()}
    return {name: done.stdout + done.stderr for name, done in ended.items()}


@pytest.fixture(scope="module")
def after(run_several, launch, tmp_path_factory) -> Mapping[int, list[dict]]:
    """By global batch: the rows of the copy's metrics.jsonl, from two processes."""
    folder = tmp_path_factory.mktemp("after")
    [diff] = re.findall("```diff\n(@@.*?)```", PAGE, re.S)
    (folder / "train.py").write_text(apply(diff, (ROOT / "recipes/cls.py").read_text()))
    plain = [folder / "train.py", "--config", FOLDER / "mine.yaml", "--workers", 1]
    cases = {"64": plain, "1437": [*plain, "--global_batch_size", 1437, "--log_every", 1]}
    start = partial(launch, "multi_cpu", env={"PYTHONPATH": str(FOLDER)})  # a script finds modules beside it by itself
    runs = run_several(2, cases, as_typed=True, launch=start)
    assert all(run.outcome == "ok" for run in runs.values()), runs
    texts = {int(name): (run.folder / "metrics.jsonl").read_text() for name, run in runs.items()}
    return {batch: [json.loads(line) for line in text.splitlines()] for batch, text in texts.items()}


def test_the_copy_repeats_the_losses_of_the_script(before, after) -> None:
    losses = [row["train/loss"] for row in after[1437]]
    assert len(losses) == 6 and all(later < earlier - 0.01 for earlier, later in pairwise(losses))
    text = before["1437 on one"]
    assert [float(loss) for loss in re.findall(r"loss (\d\.\d+)", text)] == pytest.approx(losses, abs=EXACT), text
    accuracies = [row["eval/top1"] for row in after[1437]]
    assert [float(found) for found in re.findall(r"accuracy (\d\.\d+)", text)] == pytest.approx(accuracies, abs=1e-4)


def test_with_its_own_batch_script_and_copy_are_equally_good(before, after) -> None:
    share = float(re.findall(r"accuracy (\d\.\d+)", before["32 on two"])[-1])
    ours = [row["eval/top1"] for row in after[64] if "eval/top1" in row][-1]
    assert min(share, ours) > 0.95 and abs(share - ours) < 0.025
