"""A detection run is the same run on any layout, also after kills, and its evaluation counts every image once.

Scenes of several sizes, so that canvases differ from step to step; some ranks have no box; batches that don't divide by
the ranks.
"""

import functools
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config.parsing import parse
from tests.harness.launching import small
from tests.harness.outcomes import distance, parameters, statistics
from tests.harness.resumed import STEPS as KILLED_STEPS
from tests.harness.resumed import assert_same_run, kill_at_step
from tests.harness.several import load

STEPS = 20
VARIED = (
    "--short_sides 80,96 --long_side 128 --scale_jitter 0.7-1.3 --hflip 0.3 --photometric 0.3 --iou_crop 0.3 "
    "--zoom_out 0.3 --mosaic 0.3 --mixup 0.3 --copy_paste 0.5 --rotate 20 --translate 0.1 "
    "--group_window 2 --width 32 --clip 1 --ema_decay 0.9"
)
EXACT = f"{VARIED} --max_steps {STEPS} --log_every 1 --eval_every 1000 --dtype float64"
CASES = {
    "fcos": "--detector fcos --batch_norm frozen --drop_path 0.1 --global_batch_size 7",
    "retinanet": "--detector retinanet --batch_norm group --norm_batch_size 2 --global_batch_size 8",
    "faster_rcnn": "--detector faster_rcnn --batch_norm group --norm_batch_size 2 --global_batch_size 8 --sync_short_sides",
    "thawing": "--detector fcos --batch_norm group --norm_batch_size 2 --global_batch_size 8 --freeze_stages 2 "
    "--unfreeze_epochs 2,4 --backbone_lr_factor 0.5 --neck_lr_factor 2 --head_lr_factor 1.5",
    "rtdetr_v2": "--detector rtdetr_v2 --batch_norm frozen --global_batch_size 7 --lr 2e-4 --short_sides 64,96 --long_side 800",
    "deimv2": "--detector deimv2 --batch_norm frozen --global_batch_size 7 --lr 1e-3 --short_sides 64,96 --long_side 800",
    "rf_detr": "--detector rf_detr --model RF_DETR --width 128 --drop_path 0.2 --global_batch_size 7 --lr 2e-3 "
    "--short_sides 64,96,128 --long_side 800",
}
CLASSES = tuple("0123456789")
LONG = {"retinanet", "rtdetr_v2", "deimv2"}  # left to the long tests, as all but FCOS on two processes
MICRO_BATCHES = {1: 8, 2: 2, 3: 4}  # processes -> the most samples that one takes at once


def is_long(name: str, processes: int) -> bool:
    return name in LONG or (processes == 2 and name not in ("fcos", "thawing"))


@pytest.fixture(scope="module")
def outcomes(run_several, scenes, rf_detr, tmp_path_factory, thorough):
    """Each case on every world, as far as the tests that run look at it.

    On three processes FCOS is resumed half-way from the two-process run's checkpoint as well, RF-DETR from one process's.
    """
    runs, results = tmp_path_factory.mktemp("runs"), {}
    for processes, most in MICRO_BATCHES.items():
        cases = {
            f"{name}-{processes}": [
                *("--data", scenes, "--output_dir", runs),
                *f"{EXACT} {flags} --max_micro_batch_size {most} --workers {min(processes - 1, 1)}".replace(
                    "RF_DETR", str(rf_detr)
                ).split(),
            ]
            for name, flags in CASES.items()
            if thorough or not is_long(name, processes)
        }
        if processes == 1:
            cases["rf_detr-1"] += ["--checkpoint_every", STEPS // 2, "--keep_checkpoints", 9]
        if processes == 2:
            cases["half"] = [*cases["fcos-2"], "--checkpoint_every", STEPS // 2, "--keep_checkpoints", 9]
        if processes == 3:
            for name, half in (("fcos", "half"), ("rf_detr", "rf_detr-1")):
                checkpoint = runs / half / "checkpoints" / f"step_{STEPS // 2:08d}"
                cases[f"{name}-resumed"] = [*cases[f"{name}-3"], "--resume", checkpoint]
        results |= run_several(processes, cases, recipe="recipes/det.py", timeout=600)
    assert {outcome.outcome for outcome in results.values()} == {"ok"}
    return results


@pytest.fixture(scope="module")
def start(rf_detr):
    """The weights of a case before its first step."""
    recipe = load(Path("recipes/det.py"))

    def build(name: str):
        words = f"{EXACT} {CASES[name]}".replace("RF_DETR", str(rf_detr)).split()
        config = parse(recipe.Config, small(words, "det"))
        return recipe.build_model(config, CLASSES, torch.device("cpu")).state_dict()

    return build


@pytest.mark.parametrize(
    "name, processes",
    [
        pytest.param(name, processes, marks=[pytest.mark.long] * is_long(name, processes))
        for name in CASES
        for processes in (2, 3)
    ],
)
def test_losses_weights_and_results_do_not_depend_on_the_layout(name, processes, outcomes, start) -> None:
    one, other = outcomes[f"{name}-1"], outcomes[f"{name}-{processes}"]
    losses = one.column("train/loss")
    assert len(losses) == STEPS and losses[-5:].mean() < losses[:5].mean()
    np.testing.assert_allclose(other.column("train/loss"), losses, rtol=1e-8)
    parts = [key for key in one.rows[0] if key.startswith("train/loss_")]
    assert {"train/loss_class", "train/loss_box"} <= set(parts)
    np.testing.assert_allclose(sum(one.column(part) for part in parts), losses, rtol=1e-12)
    for part in parts:
        np.testing.assert_allclose(other.column(part), one.column(part), rtol=1e-8, atol=1e-12)
    before = start(name)
    for file in ("model", "ema"):
        assert distance(parameters(one.tensors(file)), parameters(other.tensors(file)), before) < 1e-8
    if "group" in CASES[name]:
        assert distance(statistics(one.tensors()), statistics(other.tensors()), before) < 1e-8
    assert other.rows[-1]["eval/count"] == one.rows[-1]["eval/count"] == 7


@pytest.mark.parametrize("name", ["fcos", "rf_detr"])
def test_a_run_goes_on_on_another_layout(name, outcomes, start) -> None:
    whole, resumed = outcomes[f"{name}-1"], outcomes[f"{name}-resumed"]
    np.testing.assert_allclose(resumed.column("train/loss"), whole.column("train/loss")[STEPS // 2 :], rtol=1e-8)
    assert distance(parameters(whole.tensors()), parameters(resumed.tensors()), start(name)) < 1e-8


@pytest.mark.long
def test_an_evaluation_gives_the_same_numbers_to_the_last_digit_on_any_layout(run_several, scenes, tmp_path) -> None:
    """Seven images of several canvases, on one to four ranks, with another micro-batch on each; in float64."""
    preset = ["--config", "recipes/presets/det_digits.yaml"]
    learn = [*preset, "--output_dir", tmp_path, "--max_steps", 150]
    flags = [*preset, "--data", scenes, "--dtype", "float64", "--eval_only", tmp_path / "learnt" / "best"]
    said = {}
    for processes, most, before in ((2, 3, {"learnt": learn}), (1, 1, {}), (3, 8, {}), (4, 30, {})):
        again = [*flags, "--max_micro_batch_size", most]
        evaluated = run_several(processes, before | {"again": again}, recipe="recipes/det.py")["again"]
        said[processes] = json.loads(evaluated.stdout.splitlines()[-1])
    assert said[1]["count"] == 7 and 0.2 < said[1]["AP50"] < 1
    assert said[1] == said[2] == said[3] == said[4]


@pytest.mark.parametrize("detector", [pytest.param("fcos", marks=pytest.mark.long), "faster_rcnn"])
def test_a_run_killed_again_and_again_is_bit_equal_to_the_uninterrupted(detector, forks, scenes, tmp_path) -> None:
    def train(name: str, before=None):
        words = [*VARIED.split(), "--data", scenes, "--output_dir", tmp_path, "--name", name, "--tracker", "none"]
        words += ["--detector", detector, "--batch_norm", "group", "--norm_batch_size", 2, "--global_batch_size", 4]
        words += ["--max_micro_batch_size", 2, "--max_steps", KILLED_STEPS, "--checkpoint_every", 3, "--eval_every", 5]
        words += ["--log_every", 1, "--workers", 0]
        return forks(*words, recipe="det", before=before)

    assert train("whole").code == 0
    for step in (2, 4, 5, 8, KILLED_STEPS):
        died = train("killed", functools.partial(kill_at_step, step))
        assert died.code == -signal.SIGKILL, died.stderr
    assert train("killed").code == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
