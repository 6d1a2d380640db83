"""docs/coming_from_elsewhere.md: scripts with DataParallel and DDP, and the copy in their place, train the same model.

With the whole training set as the batch, the order of samples does not matter: a script on one process and the copy on two must
have the same losses. With the scripts' own batches, samples are shuffled differently and the accuracies are close.
"""

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
FOLDER = ROOT / "tests/coming_from"
EXACT = 1e-5  # of losses around 2, in float32


@pytest.mark.smoke
def test_what_the_page_says_of_samplers() -> None:
    assert "1,437 images on 2 ranks become 1,438" in PAGE
    train = DistributedSampler(range(1437), 2, 0)
    assert train.total_size == 1438
    assert [*train] == [*train], "every epoch has the same order until set_epoch is called"


@pytest.fixture(scope="module")
def before(launch, tmp_path_factory) -> dict[str, str]:
    """By script and batch, as in "ddp 32": what it printed."""
    folder = tmp_path_factory.mktemp("before")
    text = (FOLDER / "data_parallel.py").read_text()
    assert text.count("EPOCHS, BATCH, RATE = 6, 64, 0.05") == 1
    (folder / "whole.py").write_text(text.replace("6, 64, 0.05", "6, 1437, 0.05"))
    env = {"PYTHONPATH": str(FOLDER), "MASTER_PORT": str(free_port())}
    scripts = {"data_parallel 64": FOLDER / "data_parallel.py", "data_parallel 1437": folder / "whole.py"}
    scripts["ddp 32"] = FOLDER / "ddp.py"
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
    text = before["data_parallel 1437"]
    assert [float(loss) for loss in re.findall(r"loss (\d\.\d+)", text)] == pytest.approx(losses, abs=EXACT), text
    accuracies = [row["eval/top1"] for row in after[1437]]
    assert [float(found) for found in re.findall(r"accuracy (\d\.\d+)", text)] == pytest.approx(accuracies, abs=1e-4)


def test_with_their_own_batches_scripts_and_copy_are_equally_good(before, after) -> None:
    last = [re.findall(r"accuracy (\d\.\d+)", before[name])[-1:] for name in ("data_parallel 64", "ddp 32")]
    assert all(last), before
    shares = [float(share) for [share] in last]
    shares.append([row["eval/top1"] for row in after[64] if "eval/top1" in row][-1])
    assert 0.95 < min(shares) <= max(shares) < min(shares) + 0.025, last
