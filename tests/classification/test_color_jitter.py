"""Colour jitter does what torchvision's does, by factors that are a function of the position."""

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as F

from common.classification.color_jitter import ColorJitter

POSITIONS = np.arange(4_000)
IMAGES = torch.rand(5, 3, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 255


def test_draws_belong_to_positions() -> None:
    everything = ColorJitter(3, 0.4).draw(POSITIONS)
    assert everything.dtype == np.float32 and len(np.unique(everything, axis=0)) == 4_000
    assert np.array_equal(ColorJitter(3, 0.4).draw(POSITIONS[700:720]), everything[700:720])
    assert not np.array_equal(ColorJitter(4, 0.4).draw(POSITIONS), everything)


def test_draws_stay_what_they_have_always_been() -> None:
    """Else a run that is resumed after an update would continue with other images."""
    expected = [
        [0.8586288, 1.2072643, 0.70257324],
        [1.3050872, 1.0017653, 1.34402],
        [0.837471, 0.9846779, 0.9896857],
        [1.1315581, 1.2386816, 1.1502919],
    ]
    drawn = ColorJitter(3, 0.4).draw(np.array([0, 1, 10**12, 10**12 + 1]))
    assert np.array_equal(drawn, np.array(expected, np.float32))


def test_factors_vary_within_their_strength_and_are_never_negative() -> None:
    factors = ColorJitter(0, 0.4).draw(POSITIONS)
    assert factors.shape == (4_000, 3)
    assert factors.min(0) == pytest.approx(0.6, abs=0.01) and factors.max(0) == pytest.approx(1.4, abs=0.01)
    assert np.abs(np.corrcoef(factors.T) - np.eye(3)).max() < 0.06
    assert ColorJitter(0, 3.0).draw(POSITIONS).min() >= 0


@pytest.mark.parametrize(
    "column, function", [(0, F.adjust_brightness), (1, F.adjust_contrast), (2, F.adjust_saturation)]
)
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 1.9])
def test_each_factor_does_what_torchvisions_does(column: int, function, factor: float) -> None:
    factors, targets = torch.ones(5, 3), torch.eye(5)
    factors[1:4, column] = factor  # the others stay
    varied, same = ColorJitter(0, 0.4).apply(IMAGES, targets, factors)
    expected = torch.stack([255 * function(image / 255, factors[i, column].item()) for i, image in enumerate(IMAGES)])
    assert torch.allclose(varied, expected, atol=0.05)  # torchvision's grey has four digits
    assert torch.allclose(varied[[0, 4]], IMAGES[[0, 4]]) and same is targets
