"""MixUp and CutMix follow their papers and timm, mix neighbours of the stream, and do not depend on how a batch is split."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data import mixup as timm_mixup

from common.classification.image_sizes import StepSizes
from common.classification.mixing import Mixing

SIZE = 24, 40
OUTSIDE, TOP, BOTTOM, LEFT, RIGHT, TARGET = range(6)
ALPHAS = st.sampled_from([(0.2, 0.0), (0.0, 1.0), (0.8, 1.0), (1e-3, 1e-3), (1e4, 1e4)])


def batch(count: int, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    images = torch.rand(count, 3, *SIZE, dtype=torch.float64, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    return images, torch.nn.functional.one_hot(labels, classes).double()


@pytest.mark.smoke
@given(ALPHAS, st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(1, 12), st.data())
@settings(max_examples=50)
def test_a_batch_is_mixed_the_same_however_it_is_split(alphas, seed: int, first: int, pairs: int, data) -> None:
    positions = np.arange(2 * first, 2 * (first + pairs))
    mixing = Mixing(seed, *alphas, StepSizes((SIZE,)))
    draws = mixing.draw(positions)
    images, targets = batch(len(positions))
    whole = mixing.apply(images, targets, torch.from_numpy(draws))
    cut = 2 * data.draw(st.integers(0, pairs))
    for part in (slice(0, cut), slice(cut, None)):
        part_draws = torch.from_numpy(mixing.draw(positions[part]))
        for mine, theirs in zip(mixing.apply(images[part], targets[part], part_draws), whole, strict=True):
            assert torch.equal(mine, theirs[part])
    assert np.isfinite(draws).all()
    assert torch.allclose(whole[1].sum(1), torch.ones(len(positions), dtype=torch.float64))


def timm_pair(images: torch.Tensor, targets: torch.Tensor, row: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """What timm makes of two images, given the draw: it flips the batch, which for two is our pair."""
    labels, weight = targets.argmax(1), float(row[TARGET])
    if row[OUTSIDE] == 1:
        box = tuple(int(edge) for edge in row[TOP : RIGHT + 1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timm_mixup, "rand_bbox", lambda *_, **__: box)
            (top, bottom, left, right), weight = timm_mixup.cutmix_bbox_and_lam(images.shape, 0.5)
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = images.flip(0)[:, :, top:bottom, left:right]
    else:
        mixed = images * weight + images.flip(0) * (1 - weight)
    soft = timm_mixup.mixup_target(labels, targets.shape[1], weight, smoothing=0.0)
    return mixed, soft.double()


@pytest.mark.parametrize("alphas", [(0.4, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_a_pair_becomes_what_timm_would_make_of_it(alphas: tuple[float, float]) -> None:
    mixing = Mixing(1, *alphas, StepSizes((SIZE,)))
    draws = mixing.draw(np.arange(80))
    images, targets = batch(80)
    mixed, soft = mixing.apply(images, targets, torch.from_numpy(draws))
    for pair, row in enumerate(draws):
        here = slice(2 * pair, 2 * pair + 2)
        expected, expected_soft = timm_pair(images[here], targets[here], row)
        assert torch.allclose(mixed[here], expected, atol=1e-7)
        assert torch.allclose(soft[here], expected_soft, atol=1e-6)


def test_the_weight_of_a_target_is_the_share_of_its_pixels() -> None:
    count = 400
    cutmix = Mixing(5, 0.0, 1.0, StepSizes((SIZE,)))
    draws = torch.from_numpy(cutmix.draw(np.arange(count)))
    own = torch.arange(count, dtype=torch.float64)[:, None, None, None].expand(count, 3, *SIZE)
    mixed, soft = cutmix.apply(own, torch.eye(count, dtype=torch.float64), draws)
    for place in range(count):
        mine = (mixed[place, 0] == place).double().mean()
        assert soft[place, place].item() == pytest.approx(mine.item(), abs=1e-7)
        assert soft[place, place ^ 1].item() == pytest.approx(1 - mine.item(), abs=1e-7)


def test_draws_stay_what_they_have_always_been() -> None:
    """Else a run that is resumed after an update would continue with other pairs."""
    expected = [
        [0.7915179, 0, 0, 0, 0, 0.7915179],
        [1, 8, 32, 2, 23, 0.34375],
        [0.22685713, 0, 0, 0, 0, 0.22685713],
        [1, 13, 32, 0, 16, 0.6041666],
    ]
    assert np.array_equal(
        Mixing(3, 0.2, 1.0, StepSizes(((32, 24),))).draw(np.arange(8)), np.array(expected, np.float32)
    )


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixup_shares_follow_their_beta_distribution(alpha: float) -> None:
    draws = Mixing(3, alpha, 0.0, StepSizes((SIZE,))).draw(np.arange(20_000))
    assert (draws[:, OUTSIDE] == draws[:, TARGET]).all() and (draws[:, TOP : RIGHT + 1] == 0).all()
    assert scipy.stats.kstest(draws[:, TARGET], scipy.stats.beta(alpha, alpha).cdf).pvalue > 1e-3
    assert draws[:, TARGET].var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


def test_cutmix_boxes_follow_the_paper() -> None:
    """Sides go with sqrt(1 - lambda), lambda uniform; the centre is uniform, so that boxes are cut off at the border."""
    height, width = 200, 200
    draws = Mixing(3, 0.0, 1.0, StepSizes(((height, width),))).draw(np.arange(20_000))
    assert (draws[:, OUTSIDE] == 1).all()
    top, bottom, left, right = draws[:, TOP : RIGHT + 1].T
    inside = (top > 0) & (bottom < height) & (left > 0) & (right < width)
    assert np.abs((bottom - top) - (right - left))[inside].max() <= 1  # the image's proportions
    random = np.random.default_rng(0)
    half, centres = np.sqrt(1 - random.random(10**6)) / 2, random.random((2, 10**6))
    low, high = np.clip(centres - half, 0, 1), np.clip(centres + half, 0, 1)
    expected = 1 - (high - low).prod(0)
    assert draws[:, TARGET].mean() == pytest.approx(expected.mean(), abs=0.01)
    assert scipy.stats.ks_2samp(draws[:, TARGET], expected[:20_000]).pvalue > 1e-3


def test_with_both_on_each_pair_takes_one_at_even_odds() -> None:
    draws = Mixing(9, 0.5, 1.0, StepSizes((SIZE,))).draw(np.arange(20_000))
    cut = (draws[:, OUTSIDE] == 1) & (draws[:, BOTTOM] > 0)
    assert abs(cut.mean() - 0.5) < 4 * 0.5 / 10_000**0.5


def test_runs_of_other_seeds_and_other_pairs_mix_otherwise() -> None:
    draws = [Mixing(seed, 0.5, 1.0, StepSizes((SIZE,))).draw(np.arange(200)) for seed in (0, 1)]
    assert (draws[0][:, TARGET] != draws[1][:, TARGET]).mean() > 0.9
    assert len(np.unique(draws[0], axis=0)) == 100


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_and_memory_layout_of_the_batch_stay(dtype: torch.dtype) -> None:
    images, targets = batch(8)
    images = images.to(dtype, memory_format=torch.channels_last)
    mixing = Mixing(0, 0.5, 1.0, StepSizes((SIZE,)))
    mixed, soft = mixing.apply(images, targets.to(dtype), torch.from_numpy(mixing.draw(np.arange(8))))
    assert mixed.dtype == soft.dtype == dtype and mixed.is_contiguous(memory_format=torch.channels_last)
