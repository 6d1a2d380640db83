"""All images of a step have one of --image_sizes, a function of seed and step; draws for the device lie within that size."""

import dataclasses

import numpy as np
import pytest
import torch

from common.classification.image_sizes import StepSizes, step_sizes
from common.classification.mixing import Mixing
from common.classification.random_erasing import RandomErasing
from common.errors import Refused
from recipes.cls import Config

SIDES = (16, 24, 40)
SIZES = StepSizes(tuple((side, side) for side in SIDES), 3, 12)
DATA = {"input_size": (3, 32, 48)}


def test_a_step_has_one_size_whatever_is_asked_with_it():
    positions = np.arange(12 * 3_000)
    sizes = SIZES.of(positions)
    assert sizes.shape == (36_000, 2) and (sizes[:, 0] == sizes[:, 1]).all()
    steps = sizes[:, 0].reshape(-1, 12)
    assert (steps == steps[:, :1]).all()
    assert np.bincount(steps[:, 0], minlength=41)[[*SIDES]] == pytest.approx(1_000, abs=100)
    for position in (0, 11, 12, 35_999):
        assert np.array_equal(SIZES.of(np.array([position]))[0], sizes[position])
    assert not np.array_equal(dataclasses.replace(SIZES, seed=4).of(positions), sizes)


def test_sizes_are_read_from_the_flag_or_the_model():
    found = step_sizes(Config(image_sizes="224, 160,160", seed=7, global_batch_size=48), DATA)
    assert found == StepSizes(((160, 160), (224, 224)), 7, 48) and found.largest == (224, 224)
    assert str(found) == "3 x 160 x 160 or 3 x 224 x 224, drawn for each step"
    own = step_sizes(Config(), DATA)
    assert own.choices == ((32, 48),) and str(own) == "3 x 32 x 48" and (own.of(np.arange(5)) == (32, 48)).all()


@pytest.mark.parametrize("text", ["160-224", "160,", "0", "160,8193", "a", "-3"])
def test_other_texts_are_refused_in_a_line(text):
    with pytest.raises(Refused, match=rf"--image_sizes {text}: must be sides of squares in pixels .* at most 8192$"):
        step_sizes(Config(image_sizes=text), DATA)


def test_rectangles_lie_within_the_images_of_their_step_and_are_those_of_its_size_alone():
    positions = np.arange(12 * 200)
    sides = SIZES.of(positions)[:, 0]
    erasing = RandomErasing(3, 1.0, SIZES, torch.float64, torch.device("cpu"))
    assert erasing.noise.shape == (3, 40, 40)
    mixing = Mixing(3, 0.0, 1.0, SIZES)
    erased, mixed = erasing.draw(positions), mixing.draw(positions)
    for side in SIDES:
        here = sides == side
        assert 0.7 * side < erased[here, :4].max() <= side and 0.9 * side < mixed[here[::2], 1:5].max() <= side
        alone = StepSizes(((side, side),))
        one = RandomErasing(3, 1.0, alone, torch.float64, torch.device("cpu")).draw(positions)
        assert np.array_equal(one[here], erased[here])
        assert np.array_equal(Mixing(3, 0.0, 1.0, alone).draw(positions)[here[::2]], mixed[here[::2]])
        images = torch.zeros(4, 3, side, side, dtype=torch.float64)
        changed, _ = erasing.apply(images, torch.zeros(4, 2), torch.from_numpy(erased[here][:4]))
        assert ((changed != 0).flatten(1).sum(1) > 0).all()
