"""A detector learns the same from JPEGs on any layout, whether workers decode them or a cache keeps them.

The images are large, so that workers decode them at a reduced resolution.
"""

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.harness.drawings import draw_scenes
from tests.harness.outcomes import distance, parameters

STEPS = 4
FLAGS = (
    "--model test_resnet --levels 3-4 --convolutions 1 --hflip 0.3 --lr 2e-3 --warmup_epochs 0 "
    "--short_sides 80,96 --long_side 128 --scale_jitter 0.5-1.3 --iou_crop 0.3 --zoom_out 0.3 --width 32 "
    f"--batch_norm frozen --global_batch_size 6 --max_steps {STEPS} --log_every 1 --eval_every 1000 --dtype float64 "
    f"--checkpoint_every {STEPS // 2} --keep_checkpoints 9"
)
WAYS = {"decoded": "", "cached": "--cache 150"}


@pytest.fixture(scope="module")
def outcomes(run_several, tmp_path_factory):
    data, runs = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("runs")
    draw_scenes(data, "jpg", enlarged=4)
    results = {}
    for processes, most in {1: 4, 2: 2}.items():
        flags = [*("--data", data, "--output_dir", runs), *FLAGS.split(), "--max_micro_batch_size", most]
        cases = {f"{name}-{processes}": [*flags, *words.split()] for name, words in WAYS.items()}
        if processes == 2:
            half = ["--resume", runs / f"cached-1/checkpoints/step_{STEPS // 2:08d}"]
            cases["cached-2"] += half
            cases["changed"] = [*cases["decoded-2"], *half]
        results |= run_several(processes, cases, recipe="recipes/det.py", timeout=300)
    return results


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_weights_do_not_depend_on_the_layout(way, outcomes) -> None:
    """The run with a cache resumes the other one, halfway."""
    one, other = outcomes[f"{way}-1"], outcomes[f"{way}-2"]
    losses = one.column("train/loss")
    assert len(losses) == STEPS
    np.testing.assert_allclose(other.column("train/loss"), losses[STEPS // 2 * (way == "cached") :], rtol=1e-8)
    start = load_file(one.checkpoint.with_name(f"step_{STEPS // 2:08d}") / "model.safetensors")
    assert distance(parameters(one.tensors()), parameters(other.tensors()), start) < 1e-8


def test_each_way_shows_nearly_the_same(outcomes) -> None:
    """Boxes are at most a pixel off; other pixels would move the first loss."""
    decoded, cached = (outcomes[f"{way}-1"].column("train/loss") for way in WAYS)
    assert not np.array_equal(decoded, cached)
    np.testing.assert_allclose(cached[0], decoded[0], rtol=0.02)


def test_a_run_with_a_cache_is_not_resumed_without(outcomes) -> None:
    assert outcomes["changed"].outcome == "refused" and "cache" in outcomes["changed"].text
