"""Scenes of digits are pure functions of seed and position, with tight boxes, and quick to draw."""

import dataclasses
import pickle

import numpy as np
import pytest

from common.classification import sources
from common.detection.data import scenes
from common.detection.data.masks import decode


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


def test_validation_scenes_are_the_same_for_every_seed_of_held_out_digits(parts):
    train, val = parts
    _, other = scenes.load(seed=5, masks=True)
    assert len(val) == 256 and val.fingerprint == other.fingerprint != train.fingerprint
    assert same(shown(val.sample(9, position=0)), shown(other.sample(9, position=12345)))
    rows = slice(val.offsets[9], val.offsets[10])
    assert same((val.boxes[rows], val.labels[rows]), val.sample(9, 0)[1:3])
    for box, mask in zip(val.boxes[rows].astype(int), decode(other.rles(9), other.sizes[9]), strict=True):
        assert mask[box[1] : box[3], box[0] : box[2]].sum() == mask.sum() > 0  # the ink
    held_out = sources.load(sources.Spec("digits", seed=0, val_share=0.2))[1]
    assert np.array_equal(val.pixels, held_out.pixels)
