"""Scenes of digits are pure functions of seed and position, with tight boxes, and quick to draw."""

import dataclasses
import pickle

import numpy as np
import pytest

from common.classification import sources
from common.detection.data import scenes


@pytest.fixture(scope="module")
def parts():
    return scenes.load(seed=0)


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def shown(sample):
    """As `Scenes.scene` gives it."""
    return sample.image.whole().permute(1, 2, 0).numpy(), sample.boxes, sample.labels


@pytest.mark.smoke
def test_a_scene_is_a_pure_function_of_seed_and_position(parts):
    train, _ = parts
    again = pickle.loads(pickle.dumps(scenes.load(seed=0)[0]))
    for position in (7, 0, 10**12, 7):
        assert same(train.scene(position), again.scene(position))
        assert same(shown(train.sample(3, position)), train.scene(position)[:3])
    assert not same(train.scene(7), train.scene(8))
    assert not same(train.scene(7), scenes.load(seed=1)[0].scene(7))
    assert len({train.scene(position)[0].tobytes() for position in range(50)}) == 50  # each position is fresh
    keys = (0, 2**63, 2**63 + 1, 2**64 - 1)  # no bit of a key is lost
    assert len({dataclasses.replace(train, key=key).scene(np.int64(2**40 + 1))[0].tobytes() for key in keys}) == 4


def test_validation_scenes_are_the_same_for_every_seed_and_at_every_position(parts):
    _, val = parts
    _, other = scenes.load(seed=5)
    assert not val.fresh and len(val) == 256 and val.fingerprint == other.fingerprint != parts[0].fingerprint
    assert same(shown(val.sample(9, position=0)), shown(other.sample(9, position=12345)))
    assert np.array_equal(np.asarray(val.image(9)), shown(val.sample(9, 0))[0])
    rows = slice(val.offsets[9], val.offsets[10])
    assert same((val.boxes[rows], val.labels[rows]), val.sample(9, 0)[1:3])


def test_held_out_digits_appear_only_in_validation_scenes(parts):
    for scene_part, digits in zip(parts, sources.load(sources.Spec("digits", seed=0, val_share=0.2)), strict=True):
        assert np.array_equal(scene_part.pixels, digits.pixels) and np.array_equal(scene_part.digits, digits.labels)


def test_scenes_hold_one_to_eight_digits_of_many_sizes(parts):
    train, _ = parts
    heights, counts = [], []
    for position in range(100):
        image, boxes, labels, _ = train.scene(position)
        assert image.shape == (128, 128, 3) and len(boxes) == len(labels)
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= 128).all()
        heights.extend(boxes[:, 3] - boxes[:, 1])
        counts.append(len(boxes))
    assert set(counts) == set(range(1, 9)) and 12 <= min(heights) < 14 and 50 < max(heights) <= 56
