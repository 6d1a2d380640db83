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
SIZE = 24, 40
IMAGES = torch.rand(5, 3, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OUTSIDE, TOP, BOTTOM, LEFT, RIGHT, TARGET = range(6)


def erasing(
    seed: int, probability: float, size: tuple[int, int], dtype: torch.dtype = torch.float64
) -> RandomErasing:
    return RandomErasing(seed, probability, size, dtype, CPU)


KINDS = {
    "jitter": lambda seed, dtype: ColorJitter(seed, 0.4),
    "erasing": lambda seed, dtype: erasing(seed, 0.5, (32, 24), dtype),
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
    later = np.array([6, 7]) if kind == "mixing" else np.array([10**12, 10**12 + 1])
    drawn = augmentation.sample(np.append([0, 1], later))
    assert drawn.dtype == np.float32
    assert np.array_equal(drawn[[0, len(drawn) // 2]], np.array(AS_ALWAYS[kind], np.float32))
    assert np.array_equal(augmentation.sample(later), drawn[len(drawn) // 2 :])
    assert not np.array_equal(KINDS[kind](4, dtype).sample(later), augmentation.sample(later))
    images = torch.rand(4, 3, 32, 24).to(dtype, memory_format=torch.channels_last)
    varied, targets = augmentation.apply(images, torch.eye(4, dtype=dtype), torch.from_numpy(drawn))
    assert varied.dtype == targets.dtype == dtype and varied.is_contiguous(
        memory_format=torch.channels_last
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_normalised_images_have_the_type_of_the_run(dtype, layout) -> None:
    config = {"mean": (0.1, 0.5, 0.9), "std": (0.2, 0.3, 0.4)}
    mean, std = (torch.tensor(config[key], dtype=dtype)[:, None, None] for key in ("mean", "std"))
    image = torch.randint(256, (4, 3, 5, 6), dtype=torch.uint8)
    before, normalize = image.clone(), Normalize(config, dtype, CPU, layout == torch.channels_last)
    normalised = normalize(image)
    assert normalised.dtype == dtype and normalised.is_contiguous(memory_format=layout)
    assert torch.equal(image, before) and torch.allclose(
        normalised, (image / 255 - mean) / std, atol=1e-5
    )
    # Tensors may lie in the memory of a GPU, which a data worker that is not forked must not touch.
    for there in pickle.loads(pickle.dumps([normalize, erasing(3, 0.5, (16, 16))])):
        assert not any(isinstance(value, torch.Tensor) for value in vars(there).values())
        assert len(there.sample(np.arange(4))) == 4


@pytest.mark.parametrize(
    "column, adjust", [(0, F.adjust_brightness), (1, F.adjust_contrast), (2, F.adjust_saturation)]
)
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.9])
def test_each_factor_does_the_same_as_torchvisions(column: int, adjust, factor: float) -> None:
    factors, targets, images = torch.ones(5, 3), torch.eye(5), 255 * IMAGES
    factors[1:4, column] = factor  # the others stay
    varied, same = ColorJitter(0, 0.4).apply(images, targets, factors)
    expected = torch.stack(
        [255 * adjust(image, factors[i, column].item()) for i, image in enumerate(IMAGES)]
    )
    assert torch.allclose(varied, expected, atol=0.05)  # torchvision's grey has four digits
    assert torch.allclose(varied[[0, 4]], images[[0, 4]]) and same is targets
    assert ColorJitter(0, 3.0).sample(np.arange(4_000)).min() >= 0


def test_erased_rectangles_are_those_of_the_paper() -> None:
    height, width = 64, 48
    rows = erasing(0, 0.25, (height, width)).sample(np.arange(4_000)).astype(int)
    top, bottom, left, right, down, across = rows.T
    struck = bottom > top
    assert abs(struck.mean() - 0.25) < 4 * (0.25 * 0.75 / 4_000) ** 0.5
    assert (rows[~struck, :4] == 0).all() and (top >= 0).all() and (left >= 0).all()
    assert bottom.max() <= height and right.max() <= width
    area = ((bottom - top) * (right - left))[struck] / (height * width)
    ratio = ((bottom - top) / np.maximum(right - left, 1))[struck]
    assert 0.01 < area.min() < 0.05 and 0.3 < area.max() < 0.35
    assert 0.25 < ratio.min() < 0.45 and 2.5 < ratio.max() < 3.6
    assert set(down) == set(range(height)) and set(across) == set(range(width))


def test_only_the_rectangle_becomes_noise() -> None:
    augmentation = erasing(7, 0.5, (9, 7))
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
    kept = torch.ones(9, 7, dtype=torch.bool)
    kept[2:6, 1:5] = False
    assert torch.equal(erased[0], IMAGES[0]) and torch.equal(erased[1][:, kept], IMAGES[1][:, kept])
    assert torch.equal(erased[1, :, 2:6, 1:5], noise[:, 2:6, 1:5])
    assert torch.equal(erased[2], noise.roll((-2, -5), (1, 2)))
    assert torch.equal(erased[3, :, 8, 6], noise[:, 16 % 9, 12 % 7])
    normal = erasing(0, 0.5, (64, 64)).noise
    assert normal.mean().abs() < 0.05 and abs(normal.std() - 1) < 0.05


@pytest.mark.parametrize("alphas", [(0.4, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_a_pair_is_mixed_as_timm_mixes_it(monkeypatch, alphas: tuple[float, float]) -> None:
    mixing = Mixing(1, *alphas, SIZE)
    rows = mixing.sample(np.arange(80))
    images, targets = (
        torch.rand(80, 3, *SIZE, dtype=torch.float64),
        torch.eye(5).double().repeat(16, 1),
    )
    mixed, soft = mixing.apply(images, targets, torch.from_numpy(rows))
    for pair, row in enumerate(rows):
        two = slice(2 * pair, 2 * pair + 2)  # timm flips the batch, which for two is our pair
        original, weight = images[two], float(row[TARGET])
        if row[OUTSIDE] == 1:
            box = tuple(int(edge) for edge in row[TOP : RIGHT + 1])
            monkeypatch.setattr(timm_mixup, "rand_bbox", lambda *_, box=box, **__: box)
            (top, bottom, left, right), weight = timm_mixup.cutmix_bbox_and_lam(original.shape, 0.5)
            expected = original.clone()
            expected[:, :, top:bottom, left:right] = original.flip(0)[:, :, top:bottom, left:right]
        else:
            expected = original * weight + original.flip(0) * (1 - weight)
        labels = targets[two].argmax(1)
        assert torch.allclose(mixed[two], expected, atol=1e-7)
        expected = timm_mixup.mixup_target(labels, targets.shape[1], weight, smoothing=0.0).double()
        assert torch.allclose(soft[two], expected, atol=1e-6)


def test_mixup_shares_follow_their_beta_distribution() -> None:
    rows = Mixing(3, 0.2, 0.0, SIZE).sample(np.arange(20_000))
    assert (rows[:, OUTSIDE] == rows[:, TARGET]).all() and (rows[:, TOP : RIGHT + 1] == 0).all()
    assert scipy.stats.kstest(rows[:, TARGET], scipy.stats.beta(0.2, 0.2).cdf).pvalue > 1e-3
    for alpha in (1e-3, 1e4):
        assert np.isfinite(
            Mixing(2**63 - 1, alpha, alpha, SIZE).sample(2**40 + np.arange(200))
        ).all()


def test_cutmix_boxes_follow_the_paper() -> None:
    """Sides go with sqrt(1 - lambda), lambda uniform; the centre is uniform, so that boxes are cut
    off at the border.
    """
    rows = Mixing(3, 0.0, 1.0, (200, 200)).sample(np.arange(20_000))
    top, bottom, left, right = rows[:, TOP : RIGHT + 1].T
    inside = (top > 0) & (bottom < 200) & (left > 0) & (right < 200)
    assert np.abs((bottom - top) - (right - left))[inside].max() <= 1  # the image's proportions
    random = np.random.default_rng(0)
    half, centres = np.sqrt(1 - random.random(20_000)) / 2, random.random((2, 20_000))
    low, high = np.clip(centres - half, 0, 1), np.clip(centres + half, 0, 1)
    assert scipy.stats.ks_2samp(rows[:, TARGET], 1 - (high - low).prod(0)).pvalue > 1e-3
    rows = Mixing(9, 0.5, 1.0, SIZE).sample(np.arange(20_000))
    cut = (rows[:, OUTSIDE] == 1) & (rows[:, BOTTOM] > 0)
    assert abs(cut.mean() - 0.5) < 4 * 0.5 / 10_000**0.5
