"""Scenes of digits are pure functions of seed and position, with tight boxes, and quick to draw."""

import numpy as np
import pytest

from common.classification import sources
from common.detection.data import scenes
from common.detection.data.masks import decode_masks


def is_same(left, right) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def render(sample):
    """As `Scenes.scene` gives it."""
    return sample.image.decode().permute(1, 2, 0).numpy(), sample.boxes, sample.labels


@pytest.mark.smoke
def test_scenes_vary_in_training_and_are_fixed_in_evaluation():
    train, val = scenes.load(seed=0)
    varied, fixed = scenes.load(seed=5, masks=True)
    shows = [
        source.draw_scene(position)[0].tobytes()
        for source in (train, varied)
        for position in (0, 7, 10**12)
    ]
    assert train.load_sample(3, 7).size.tolist() == [scenes.SIDE] * 2
    assert len(set(shows)) == 6 and is_same(
        render(train.load_sample(3, 7)), train.draw_scene(7)[:3]
    )
    assert len(val) == 256 and val.fingerprint == fixed.fingerprint != train.fingerprint
    assert is_same(
        render(val.load_sample(9, position=0)), render(fixed.load_sample(9, position=12345))
    )
    rows = slice(val.offsets[9], val.offsets[10])
    assert is_same((val.boxes[rows], val.labels[rows]), val.load_sample(9, 0)[1:3])
    for box, mask in zip(
        val.boxes[rows].astype(int), decode_masks(fixed.build_rles(9), fixed.sizes[9]), strict=True
    ):
        assert mask[box[1] : box[3], box[0] : box[2]].sum() == mask.sum() > 0  # the ink
    held_out = sources.load(sources.Spec("digits", seed=0, val_share=0.2))[1]
    assert np.array_equal(val.pixels, held_out.pixels)
