"""Augmentations on the device follow their papers, and are functions of the position: the same on
any layout.
"""

import pickle

import numpy as np
import pytest
import scipy.stats
import torch
from timm.data import mixup as timm_mixup
from torchvision.transforms.v2 import functional as F

from common.classification.augmentation import ColorJitter, Mixing, Normalize, RandomErasing

CPU = torch.device("cpu")
SIZE = (24, 40)
IMAGES = torch.rand(5, 3, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OUTSIDE, TOP, BOTTOM, LEFT, RIGHT, TARGET = range(6)


def build_erasing(
    seed: int, probability: float, size: tuple[int, int], dtype: torch.dtype = torch.float64
) -> RandomErasing:
    return RandomErasing(seed, probability, size, dtype, CPU)


KINDS = {
    "jitter": lambda seed, dtype: ColorJitter(seed, 0.4),
    "erasing": lambda seed, dtype: build_erasing(seed, 0.5, (32, 24), dtype),
    "mixing": lambda seed, dtype: Mixing(seed, 0.2, 1.0, (32, 24)),
}
AS_ALWAYS = {  # the first numbers, and those at two later positions
    "jitter": ([0.8586288, 1.2072643, 0.70257324], [0.837471, 0.9846779, 0.9896857]),
    "erasing": ([11, 23, 13, 18, 1, 18], [0, 0, 0, 0, 18, 16]),
    "mixing": ([0.7915179, 0, 0, 0, 0, 0.7915179], [1, 13, 32, 0, 16, 0.6041666]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_stay_as_they_have_always_been(kind: str, dtype) -> None:
    """Else a run that is resumed after an update would continue with other images."""
    augmentation = KINDS[kind](3, dtype)
    start = 6 if kind == "mixing" else 10**12
    resumed = np.array([start, start + 1])
    params = augmentation.sample(np.append([0, 1], resumed))
    middle = len(params) // 2
    assert params.dtype == np.float32
    assert np.array_equal(params[[0, middle]], np.array(AS_ALWAYS[kind], np.float32))
    assert np.array_equal(augmentation.sample(resumed), params[middle:])
    with_another_seed = KINDS[kind](4, dtype).sample(resumed)
    assert not np.array_equal(with_another_seed, augmentation.sample(resumed))
    images = torch.rand(4, 3, 32, 24).to(dtype, memory_format=torch.channels_last)
    one_hot = torch.eye(4, dtype=dtype)
    varied, targets = augmentation.apply(images, one_hot, torch.from_numpy(params))
    assert varied.dtype == targets.dtype == dtype
    assert varied.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_normalised_images_have_the_type_of_the_run(dtype, layout) -> None:
    config = {"mean": (0.1, 0.5, 0.9), "std": (0.2, 0.3, 0.4)}
    mean = torch.tensor(config["mean"], dtype=dtype)[:, None, None]
    std = torch.tensor(config["std"], dtype=dtype)[:, None, None]
    image = torch.randint(256, (4, 3, 5, 6), dtype=torch.uint8)
    before = image.clone()
    normalize = Normalize(config, dtype, CPU, layout == torch.channels_last)
    normalised = normalize(image)
    assert normalised.dtype == dtype
    assert normalised.is_contiguous(memory_format=layout)
    assert torch.equal(image, before)
    assert torch.allclose(normalised, (image / 255 - mean) / std, atol=1e-5)
    # Tensors may lie in the memory of a GPU, which a data worker that is not forked must not touch.
    for unpickled in pickle.loads(pickle.dumps([normalize, build_erasing(3, 0.5, (16, 16))])):
        assert not any(isinstance(value, torch.Tensor) for value in vars(unpickled).values())
        assert len(unpickled.sample(np.arange(4))) == 4


@pytest.mark.parametrize(
    "column, adjust", [(0, F.adjust_brightness), (1, F.adjust_contrast), (2, F.adjust_saturation)]
)
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.9])
def test_each_factor_does_the_same_as_torchvisions(column: int, adjust, factor: float) -> None:
    images = 255 * IMAGES
    targets = torch.eye(5)
    factors = torch.ones(5, 3)
    factors[1:4, column] = factor  # the others stay
    varied, same = ColorJitter(0, 0.4).apply(images, targets, factors)
    expected = []
    for image, image_factors in zip(IMAGES, factors, strict=True):
        expected.append(255 * adjust(image, image_factors[column].item()))
    assert torch.allclose(
        varied, torch.stack(expected), atol=0.05
    )  # torchvision's grey has four digits
    assert torch.allclose(varied[[0, 4]], images[[0, 4]])
    assert same is targets
    assert ColorJitter(0, 3.0).sample(np.arange(4_000)).min() >= 0


def test_erased_rectangles_are_those_of_the_paper() -> None:
    height = 64
    width = 48
    params = build_erasing(0, 0.25, (height, width)).sample(np.arange(4_000)).astype(int)
    top, bottom, left, right, down, across = params.T
    struck = bottom > top
    assert abs(struck.mean() - 0.25) < 4 * (0.25 * 0.75 / 4_000) ** 0.5
    assert (params[~struck, :4] == 0).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert bottom.max() <= height
    assert right.max() <= width
    area = ((bottom - top) * (right - left))[struck] / (height * width)
    ratio = ((bottom - top) / np.maximum(right - left, 1))[struck]
    assert 0.01 < area.min() < 0.05
    assert 0.3 < area.max() < 0.35
    assert 0.25 < ratio.min() < 0.45
    assert 2.5 < ratio.max() < 3.6
    assert set(down) == set(range(height))
    assert set(across) == set(range(width))


def test_only_the_rectangle_becomes_noise() -> None:
    augmentation = build_erasing(7, 0.5, (9, 7))
    noise = augmentation.noise
    # As always.
    assert noise.flatten()[:2].tolist() == pytest.approx([-0.08814115822, -1.00527238846], abs=1e-6)
    rows = [
        [0, 0, 0, 0, 3, 4],
        [2, 6, 1, 5, 0, 0],
        [0, 9, 0, 7, 2, 5],
        [8, 9, 6, 7, 8, 6],
        [0, 1, 0, 1, 0, 0],
    ]
    erased, _ = augmentation.apply(IMAGES, torch.eye(5), torch.tensor(rows).float())
    outside = torch.ones(9, 7, dtype=torch.bool)
    outside[2:6, 1:5] = False
    assert torch.equal(erased[0], IMAGES[0])
    assert torch.equal(erased[1][:, outside], IMAGES[1][:, outside])
    assert torch.equal(erased[1, :, 2:6, 1:5], noise[:, 2:6, 1:5])
    assert torch.equal(erased[2], noise.roll((-2, -5), (1, 2)))
    assert torch.equal(erased[3, :, 8, 6], noise[:, 16 % 9, 12 % 7])
    normal = build_erasing(0, 0.5, (64, 64)).noise
    assert normal.mean().abs() < 0.05
    assert abs(normal.std() - 1) < 0.05


@pytest.mark.parametrize("alphas", [(0.4, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_a_pair_is_mixed_as_timm_mixes_it(monkeypatch, alphas: tuple[float, float]) -> None:
    mixing = Mixing(1, *alphas, SIZE)
    params = mixing.sample(np.arange(80))
    images = torch.rand(80, 3, *SIZE, dtype=torch.float64)
    targets = torch.eye(5).double().repeat(16, 1)
    mixed, soft = mixing.apply(images, targets, torch.from_numpy(params))
    for i, row in enumerate(params):
        pair = slice(2 * i, 2 * i + 2)  # timm flips the batch, which for two images is our pair
        original = images[pair]
        flipped = original.flip(0)
        weight = float(row[TARGET])
        if row[OUTSIDE] == 1:
            box = tuple(int(edge) for edge in row[TOP : RIGHT + 1])
            monkeypatch.setattr(timm_mixup, "rand_bbox", lambda *_, box=box, **__: box)
            (top, bottom, left, right), weight = timm_mixup.cutmix_bbox_and_lam(original.shape, 0.5)
            expected = original.clone()
            expected[:, :, top:bottom, left:right] = flipped[:, :, top:bottom, left:right]
        else:
            expected = original * weight + flipped * (1 - weight)
        labels = targets[pair].argmax(1)
        assert torch.allclose(mixed[pair], expected, atol=1e-7)
        expected = timm_mixup.mixup_target(labels, targets.shape[1], weight, smoothing=0.0).double()
        assert torch.allclose(soft[pair], expected, atol=1e-6)


def test_mixup_shares_follow_their_beta_distribution() -> None:
    params = Mixing(3, 0.2, 0.0, SIZE).sample(np.arange(20_000))
    shares = params[:, TARGET]
    assert (params[:, OUTSIDE] == shares).all()
    assert (params[:, TOP : RIGHT + 1] == 0).all()
    assert scipy.stats.kstest(shares, scipy.stats.beta(0.2, 0.2).cdf).pvalue > 1e-3
    positions = 2**40 + np.arange(200)
    for alpha in (1e-3, 1e4):
        assert np.isfinite(Mixing(2**63 - 1, alpha, alpha, SIZE).sample(positions)).all()


def test_cutmix_boxes_follow_the_paper() -> None:
    """Sides go with sqrt(1 - lambda), lambda uniform; the centre is uniform, so that boxes are cut
    off at the border.
    """
    params = Mixing(3, 0.0, 1.0, (200, 200)).sample(np.arange(20_000))
    top, bottom, left, right = params[:, TOP : RIGHT + 1].T
    inside = (top > 0) & (bottom < 200) & (left > 0) & (right < 200)
    assert np.abs((bottom - top) - (right - left))[inside].max() <= 1  # the image's proportions
    random = np.random.default_rng(0)
    half = np.sqrt(1 - random.random(20_000)) / 2
    centres = random.random((2, 20_000))
    low = np.clip(centres - half, 0, 1)
    high = np.clip(centres + half, 0, 1)
    expected_shares = 1 - (high - low).prod(0)
    assert scipy.stats.ks_2samp(params[:, TARGET], expected_shares).pvalue > 1e-3
    params = Mixing(9, 0.5, 1.0, SIZE).sample(np.arange(20_000))
    cut = (params[:, OUTSIDE] == 1) & (params[:, BOTTOM] > 0)
    assert abs(cut.mean() - 0.5) < 4 * 0.5 / 10_000**0.5
