"""Is a detection run the same run on any layout, and does it go on where it stopped?

Scenes of several sizes, so that canvases differ from step to step; batches that don't divide by the ranks.
"""

from pathlib import Path

import numpy as np
import pytest

from common.config import parse
from tests.recipes.conftest import distance, parameters, statistics
from tests.recipes.several import load

STEPS = 6
pytestmark = pytest.mark.long
VARIED = (
    "--short_sides 80,96 --long_side 128 --scale_jitter 0.3 --hflip 0.3 --photometric 0.3 --clip 1 --ema_decay 0.9 "
    f"--max_steps {STEPS} --log_every 1 --eval_every 1000 --dtype float64"
)
CASES = {
    "fcos": "--detector fcos --batch_norm frozen --drop_path 0.1 --global_batch_size 7",
    "retinanet": "--detector retinanet --batch_norm group --norm_batch_size 2 --global_batch_size 8",
    "faster_rcnn": "--detector faster_rcnn --batch_norm group --norm_batch_size 2 --global_batch_size 8",
}
MICRO_BATCHES = {1: 8, 2: 2, 3: 4}  # processes -> the most samples that one takes at once


@pytest.fixture(scope="module")
def outcomes(run_several, tmp_path_factory):
    """Each case on each world; on three processes resumed half-way from the two-process run's checkpoint as well."""
    runs, results = tmp_path_factory.mktemp("runs"), {}
    for processes, most in MICRO_BATCHES.items():
        cases = {
            f"{name}-{processes}": [*f"{VARIED} {flags} --max_micro_batch_size {most}".split(), "--output_dir", runs]
            for name, flags in CASES.items()
        }
        if processes == 2:
            cases["half"] = [*cases["fcos-2"], "--checkpoint_every", STEPS // 2, "--keep_checkpoints", 9]
        if processes == 3:
            half = runs / "half/checkpoints" / f"step_{STEPS // 2:08d}"
            cases["resumed"] = [*cases["fcos-3"], "--resume", half]
        results |= run_several(processes, cases, recipe="recipes/det.py", timeout=600)
    assert {outcome.outcome for outcome in results.values()} == {"ok"}
    return results


@pytest.fixture(scope="module")
def start():
    """The weights of a case before its first step."""
    recipe = load(Path("recipes/det.py"))

    def build(name: str):
        return recipe.build_model(parse(recipe.Config, f"{VARIED} {CASES[name]}".split()), 10)[0].state_dict()

    return build


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_losses_weights_and_results_do_not_depend_on_the_layout(name, processes, outcomes, start) -> None:
    one, other = outcomes[f"{name}-1"], outcomes[f"{name}-{processes}"]
    losses = one.column("train/loss")
    assert len(losses) == STEPS and losses[-1] < losses[0]
    np.testing.assert_allclose(other.column("train/loss"), losses, rtol=1e-8)
    before = start(name)
    for file in ("model", "ema"):
        assert distance(parameters(one.tensors(file)), parameters(other.tensors(file)), before) < 1e-8
    if "group" in CASES[name]:
        assert distance(statistics(one.tensors()), statistics(other.tensors()), before) < 1e-8
    for key in ("eval/AP", "eval/AP50", "eval/AR100", "eval/ema_AR100", "eval/count"):
        assert other.rows[-1][key] == pytest.approx(one.rows[-1][key], abs=1e-9)


def test_a_run_goes_on_on_another_layout(outcomes, start) -> None:
    whole, resumed = outcomes["fcos-1"], outcomes["resumed"]
    np.testing.assert_allclose(resumed.column("train/loss"), whole.column("train/loss")[STEPS // 2 :], rtol=1e-8)
    assert distance(parameters(whole.tensors()), parameters(resumed.tensors()), start("fcos")) < 1e-8
