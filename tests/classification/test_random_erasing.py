"""Random erasing replaces rectangles as in its paper, a function of the position, and nothing else of an image."""

import numpy as np
import pytest
import torch

from common.classification.image_sizes import StepSizes
from common.classification.random_erasing import RandomErasing

POSITIONS = np.arange(4_000)
IMAGES = torch.rand(5, 3, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def erasing(seed: int, probability: float, size: tuple[int, int], dtype: torch.dtype = torch.float64) -> RandomErasing:
    return RandomErasing(seed, probability, StepSizes((size,)), dtype, torch.device("cpu"))


def test_draws_belong_to_positions() -> None:
    everything = erasing(3, 0.5, (32, 24)).draw(POSITIONS)
    assert everything.dtype == np.float32 and len(np.unique(everything, axis=0)) > 1_900
    assert np.array_equal(erasing(3, 0.5, (32, 24)).draw(POSITIONS[700:720]), everything[700:720])
    assert not np.array_equal(erasing(4, 0.5, (32, 24)).draw(POSITIONS), everything)


def test_draws_and_noise_stay_what_they_have_always_been() -> None:
    """Else a run that is resumed after an update would continue with other images."""
    expected = [[11, 23, 13, 18, 1, 18], [0, 0, 0, 0, 28, 20], [0, 0, 0, 0, 18, 16], [7, 15, 11, 22, 1, 11]]
    assert erasing(3, 0.5, (32, 24)).draw(np.array([0, 1, 10**12, 10**12 + 1])).tolist() == expected
    noise = erasing(7, 0.5, (9, 7)).noise.flatten()
    assert noise[:3].tolist() == pytest.approx(
        [-0.08814115822315216, -1.005272388458252, -1.0817806720733643], abs=1e-6
    )


def test_erased_rectangles_are_those_of_the_paper() -> None:
    height, width = 64, 48
    rows = erasing(0, 0.25, (height, width)).draw(POSITIONS).astype(int)
    top, bottom, left, right, down, across = rows.T
    struck = bottom > top
    assert abs(struck.mean() - 0.25) < 4 * (0.25 * 0.75 / 4_000) ** 0.5
    assert (rows[~struck, :4] == 0).all() and (top >= 0).all() and (left >= 0).all()
    assert bottom.max() <= height and right.max() <= width
    area = ((bottom - top) * (right - left))[struck] / (height * width)
    ratio = ((bottom - top) / np.maximum(right - left, 1))[struck]
    assert (
        0.01 < area.min() < 0.05 and 0.3 < area.max() < 0.35 and 0.25 < ratio.min() < 0.45 and 2.5 < ratio.max() < 3.6
    )
    assert set(down) == set(range(height)) and set(across) == set(range(width))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_rectangle_shows_its_own_part_of_the_noise_and_the_rest_stays(layout: torch.memory_format) -> None:
    augmentation = erasing(7, 0.5, (9, 7))
    noise = augmentation.noise
    assert torch.equal(noise, erasing(7, 0.5, (9, 7)).noise)
    draws = torch.tensor(
        [[0, 0, 0, 0, 3, 4], [2, 6, 1, 5, 0, 0], [0, 9, 0, 7, 2, 5], [8, 9, 6, 7, 8, 6], [0, 1, 0, 1, 0, 0]]
    )
    erased, _ = augmentation.apply(IMAGES.contiguous(memory_format=layout), torch.eye(5), draws.float())
    assert erased.is_contiguous(memory_format=layout)
    assert torch.equal(erased[0], IMAGES[0])
    assert torch.equal(erased[1, :, 2:6, 1:5], noise[:, 2:6, 1:5])
    kept = torch.ones(9, 7, dtype=torch.bool)
    kept[2:6, 1:5] = False
    assert torch.equal(erased[1][:, kept], IMAGES[1][:, kept])
    assert torch.equal(erased[2], noise.roll((-2, -5), (1, 2)))
    assert torch.equal(erased[3, :, 8, 6], noise[:, 16 % 9, 12 % 7])


def test_the_noise_is_normal() -> None:
    noise = erasing(0, 0.5, (64, 64)).noise
    assert noise.mean().abs() < 0.05 and abs(noise.std() - 1) < 0.05
