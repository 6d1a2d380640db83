"""What varies on the device is a function of the position, and as common as asked."""

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as F

from common.classification.device_transforms import draw_colours, draw_erasing, erase, noise_table, vary_colours

POSITIONS = np.arange(4_000)
IMAGES = torch.rand(5, 3, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 255


def test_draws_belong_to_positions() -> None:
    for draw in (lambda where: draw_colours(where, 3, 0.4), lambda where: draw_erasing(where, 3, 0.5, 32, 24)):
        everything = draw(POSITIONS)
        assert everything.dtype == np.float32 and len(np.unique(everything, axis=0)) > 1_900
        assert np.array_equal(draw(POSITIONS[700:720]), everything[700:720])
    assert not np.array_equal(draw_colours(POSITIONS, 4, 0.4), draw_colours(POSITIONS, 3, 0.4))


def test_colours_vary_within_their_strength_and_never_below_black() -> None:
    factors = draw_colours(POSITIONS, 0, 0.4)
    assert factors.shape == (4_000, 3)
    assert factors.min(0) == pytest.approx(0.6, abs=0.01) and factors.max(0) == pytest.approx(1.4, abs=0.01)
    assert np.abs(np.corrcoef(factors.T) - np.eye(3)).max() < 0.06
    assert draw_colours(POSITIONS, 0, 3.0).min() >= 0


@pytest.mark.parametrize(
    "column, function", [(0, F.adjust_brightness), (1, F.adjust_contrast), (2, F.adjust_saturation)]
)
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 1.9])
def test_each_factor_does_what_torchvisions_does(column: int, function, factor: float) -> None:
    factors = torch.ones(5, 3)
    factors[1:4, column] = factor  # the others stay
    varied = vary_colours(IMAGES, factors)
    expected = torch.stack([255 * function(image / 255, factors[i, column].item()) for i, image in enumerate(IMAGES)])
    assert torch.allclose(varied, expected, atol=0.05)  # torchvision's grey has four digits
    assert torch.allclose(varied[[0, 4]], IMAGES[[0, 4]])


def test_erased_rectangles_are_those_of_the_paper() -> None:
    height, width = 64, 48
    rows = draw_erasing(POSITIONS, 0, 0.25, height, width).astype(int)
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


def test_a_rectangle_shows_its_own_part_of_the_noise_and_the_rest_stays() -> None:
    noise = noise_table(7, (3, 9, 7), torch.device("cpu"), torch.float64)
    assert torch.equal(noise, noise_table(7, (3, 9, 7), torch.device("cpu"), torch.float64))
    draws = torch.tensor(
        [[0, 0, 0, 0, 3, 4], [2, 6, 1, 5, 0, 0], [0, 9, 0, 7, 2, 5], [8, 9, 6, 7, 8, 6], [0, 1, 0, 1, 0, 0]]
    )
    erased = erase(IMAGES, draws.float(), noise)
    assert torch.equal(erased[0], IMAGES[0])
    assert torch.equal(erased[1, :, 2:6, 1:5], noise[:, 2:6, 1:5])
    kept = torch.ones(9, 7, dtype=torch.bool)
    kept[2:6, 1:5] = False
    assert torch.equal(erased[1][:, kept], IMAGES[1][:, kept])
    assert torch.equal(erased[2], noise.roll((-2, -5), (1, 2)))
    assert torch.equal(erased[3, :, 8, 6], noise[:, 16 % 9, 12 % 7])
    large = noise_table(0, (3, 64, 64), torch.device("cpu"), torch.float32)
    assert large.mean().abs() < 0.05 and abs(large.std() - 1) < 0.05
