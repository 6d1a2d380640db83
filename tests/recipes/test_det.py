"""A detection run is the same run on any layout, also after kills, and its evaluation counts every image once.

Scenes of several sizes, so that canvases differ from step to step; some ranks have no box; batches that don't divide by
the ranks.
"""

import functools
import signal

import numpy as np
import pytest

from tests.harness.outcomes import assert_same_training, start_of
from tests.harness.resumed import assert_same_run, kill_at_step

STEPS = 8
VARIED = (
    "--short_sides 80,96 --long_side 128 --hflip 0.3 --photometric 0.3 --iou_crop 0.3 "
    "--zoom_out 0.3 --mosaic 0.3 --mixup 0.3 --group_window 2 --width 32 --clip 1 --ema_decay 0.9"
)
EXACT = f"{VARIED} --max_steps {STEPS} --log_every 1 --eval_every 1000 --checkpoint_every {STEPS // 2} --dtype float64"
GROUP = "--batch_norm group --norm_batch_size 2 --global_batch_size 8"
CASES = {
    "fcos": "--detector fcos --batch_norm frozen --drop_path 0.1 --global_batch_size 7 --cache 80",
    "faster_rcnn": f"--detector faster_rcnn {GROUP} --sync_short_sides",
    "thawing": f"--detector fcos {GROUP} --freeze_stages 2 --unfreeze_epochs 1,2 "
    "--backbone_lr_factor 0.5 --neck_lr_factor 2 --head_lr_factor 1.5",
    "rf_detr": "--detector rf_detr --model RF_DETR --width 128 --drop_path 0.2 --global_batch_size 7 --lr 2e-3 "
    "--short_sides 64,96,128 --long_side 800",
    "retinanet": f"--detector retinanet {GROUP}",
    "rtdetr_v2": "--detector rtdetr_v2 --batch_norm frozen --global_batch_size 7 --lr 2e-4 --short_sides 64,96 --long_side 800",
    "deimv2": "--detector deimv2 --batch_norm frozen --global_batch_size 7 --lr 1e-3 --short_sides 64,96 --long_side 800",
}
RESUMED = {"fcos": 2, "rf_detr": 1}  # on three processes, halfway, from a run on so many
MICRO_BATCHES = {1: 8, 2: 2, 3: 4}  # processes -> the most samples that one takes at once
QUICK = ("fcos-1", "fcos-2", "fcos-resumed", "faster_rcnn-1", "faster_rcnn-3", "thawing-1", "thawing-2")
QUICK += ("rf_detr-1", "rf_detr-resumed")
COMPARED = [f"{name}-{where}" for name in CASES for where in (2, 3, *["resumed"] * (name in RESUMED))]


@pytest.fixture(scope="module")
def outcomes(run_several, scenes, rf_detr, tmp_path_factory, thorough):
    """Each case on every world, as far as the tests that run look at it."""
    runs, results = tmp_path_factory.mktemp("runs"), {}
    for processes, most in MICRO_BATCHES.items():
        cases = {}
        for name, flags in CASES.items():
            words = (
                f"{EXACT} {flags} --max_micro_batch_size {most} --workers {min(processes - 1, 1)} --keep_checkpoints 9"
            )
            words = ["--data", scenes, "--output_dir", runs, *words.replace("RF_DETR", str(rf_detr)).split()]
            cases[f"{name}-{processes}"] = words
            if processes == 3 and name in RESUMED:
                half = runs / f"{name}-{RESUMED[name]}/checkpoints/step_{STEPS // 2:08d}"
                cases[f"{name}-resumed"] = [*words, "--resume", half]
        cases = {name: words for name, words in cases.items() if thorough or name in QUICK}
        results |= run_several(processes, cases, recipe="recipes/det.py", timeout=600)
    assert not {name: run.text for name, run in results.items() if run.outcome != "ok"}
    return results


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in COMPARED]
)
def test_losses_weights_and_results_do_not_depend_on_the_layout(name, outcomes) -> None:
    detector = name.split("-")[0]
    one, other = outcomes[f"{detector}-1"], outcomes[name]
    assert len(one.column("train/loss")) == STEPS and one.rows[-1]["eval/count"] == 7, "every image once"
    parts = [key for key in one.rows[0] if key.startswith("train/loss_")]
    assert {"train/loss_class", "train/loss_box"} <= set(parts)
    np.testing.assert_allclose(sum(one.column(part) for part in parts), one.column("train/loss"), rtol=1e-12)
    assert len(other.rows) == (STEPS // 2 if "resumed" in name else STEPS)
    assert_same_training(one, other, start_of(one))


def test_a_run_killed_again_and_again_is_bit_equal(forks, scenes, tmp_path) -> None:
    """After a step that nothing follows, before an evaluation, and before a checkpoint."""

    def train(name: str, before=None):
        words = [*VARIED.split(), "--data", scenes, "--output_dir", tmp_path, "--name", name, "--tracker", "none"]
        words += [*"--detector faster_rcnn --batch_norm group --norm_batch_size 2 --global_batch_size 4".split()]
        words += [*"--max_micro_batch_size 2 --max_steps 6 --checkpoint_every 2 --eval_every 3".split()]
        return forks(*words, "--log_every", 1, "--workers", 0, recipe="det", before=before)

    assert train("whole").code == 0
    for step in (3, 4, 5):
        died = train("killed", functools.partial(kill_at_step, step))
        assert died.code == -signal.SIGKILL, died.stderr
    assert train("killed").code == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole", steps=6)
