"""Scenes of digits are pure functions of seed and position, with tight boxes, and quick to draw."""

import dataclasses
import pickle

import numpy as np
import pytest
from PIL import Image

from common.classification import sources
from common.detection.data import scenes
from common.detection.data import sources as detection_sources


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
        assert same(shown(train.sample(3, position)), train.scene(position))
    assert not same(train.scene(7), train.scene(8))
    assert not same(train.scene(7), scenes.load(seed=1)[0].scene(7))
    images = {train.scene(position)[0].tobytes() for position in range(200)}
    assert len(images) == 200  # each position is fresh
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


def test_boxes_hold_one_to_eight_digits_inside_the_canvas_at_many_scales_without_heavy_overlap(parts):
    train, _ = parts
    heights, counts = [], []
    for position in range(300):
        image, boxes, labels = train.scene(position)
        assert image.shape == (128, 128, 3) and image.dtype == np.uint8
        assert boxes.dtype == np.float32 and labels.dtype == np.int64 and boxes.shape == (len(labels), 4)
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= 128).all() and (boxes[:, 2:] - boxes[:, :2] >= 4).all()
        low, high = np.maximum(boxes[:, None, :2], boxes[:, :2]), np.minimum(boxes[:, None, 2:], boxes[:, 2:])
        area = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
        shared = (high - low).clip(0).prod(2) / np.minimum(area[:, None], area)
        assert (shared - np.eye(len(boxes)) < 0.1001).all()
        heights.extend(boxes[:, 3] - boxes[:, 1])
        counts.append(len(boxes))
    assert set(counts) == set(range(1, 9))
    assert 12 <= min(heights) < 14 and 50 < max(heights) <= 56
    assert np.mean(np.array(heights) < 24) > 0.3


def test_a_box_is_tight_around_ink_that_stands_out(parts):
    """Ink reaches each side of its box, and its brightest pixels are brighter than anything of the background."""
    train, _ = parts
    for position in range(100):
        image, boxes, _ = train.scene(position)
        bright = image.astype(int).max(axis=2)
        outside = np.ones((128, 128), bool)
        for left, top, right, bottom in boxes.astype(int):
            assert np.percentile(bright[top:bottom, left:right], 95) > 115
            outside[top:bottom, left:right] = False
        assert bright[outside].max() <= 110 + 31
        assert image[..., 0].std() > 0 and image.max() < 256
    image, boxes, _ = train.scene(3)
    smooth = np.asarray(Image.fromarray(image).convert("L").reduce(2), int)
    assert np.abs(np.diff(smooth, axis=0)).max() < 120  # no number has run over its 8 bits


def test_columns_fit_each_other_and_keep_the_protocol(parts):
    for part in parts:
        assert part.sizes.shape == (len(part), 2) and (part.sizes == 128).all()
        assert part.offsets[0] == 0 and part.offsets[-1] == len(part.boxes) == len(part.labels) == len(part.crowd)
        assert np.allclose(part.areas, np.prod(part.boxes[:, 2:] - part.boxes[:, :2], axis=1))
        assert part.category_ids.tolist() == list(range(10)) and part.classes == tuple("0123456789")
        assert np.bincount(part.labels).min() > 50 and not part.crowd.any() and part.notes == ()
    named = detection_sources.load(detection_sources.Spec("digits", seed=0, val_share=0.5))
    assert [part.fingerprint for part in named] == [part.fingerprint for part in parts]
    assert len(parts[0]) == 1024 and parts[0].fresh and parts[0].name(3) == "scene[3]"
