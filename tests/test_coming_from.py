"""docs/coming_from_elsewhere.md: a script with DDP, and the copy in its place, train the same model.

With the whole training set as the batch, the order of samples does not matter: the script on one
process and the copy on two must have the same losses.
"""

import re

import numpy as np
import pytest

from tests.harness.launching import ROOT, find_free_port
from tests.harness.outcomes import Outcome
from tests.recipes.copied import apply

PAGE = (ROOT / "docs/coming_from_elsewhere.md").read_text()
FOLDER = ROOT / "tests/coming_from"
EXACT = 1e-5  # of losses around 2, in float32


def test_the_copy_repeats_the_losses_of_the_script(launch, tmp_path) -> None:
    text = (FOLDER / "ddp.py").read_text()
    assert text.count("EPOCHS, BATCH, RATE, GPUS = 6, 32, 0.05, 2") == 1
    (tmp_path / "whole.py").write_text(text.replace("6, 32, 0.05, 2", "6, 1437, 0.05, 1"))
    env = {"PYTHONPATH": str(FOLDER), "MASTER_PORT": str(find_free_port())}
    script = launch.start_python([tmp_path / "whole.py"], env=env, cwd=tmp_path)
    [diff] = re.findall("```diff\n(@@.*?)```", PAGE, re.S)
    (tmp_path / "train.py").write_text(apply(diff, (ROOT / "recipes/cls.py").read_text()))
    argv = [tmp_path / "train.py", "--config", FOLDER / "mine.yaml"]
    argv += "--global_batch_size 1437 --log_every 1 --workers 1 --tracker none".split()
    argv += ["--output_dir", tmp_path, "--name", "run"]
    # A script finds modules beside it by itself.
    done = launch("multi_cpu", argv, env={"PYTHONPATH": str(FOLDER)})
    assert done.returncode == 0, done
    run = Outcome(folder=tmp_path / "run")
    losses = run.column("train/loss")
    assert len(losses) == 6 and np.diff(losses).max() < -0.01
    done = script.finish(180)
    printed = done.stdout + done.stderr
    printed_losses = list(map(float, re.findall(r"loss (\d\.\d+)", printed)))
    assert printed_losses == pytest.approx(losses, abs=EXACT), printed
    accuracies = list(map(float, re.findall(r"accuracy (\d\.\d+)", printed)))
    assert accuracies == pytest.approx(run.column("eval/top1"), abs=1e-4)
