"""Images of rare classes are drawn more often, by the rule of LVIS."""

import itertools

import numpy as np
import pytest

from common.data.stream import Stream
from common.detection.balancing import repeat_weights
from common.detection.data import scenes
from common.detection.data.annotated import Annotations
from common.errors import Refused
from tests.harness.detections import columns


class Fixed(Annotations):
    fresh = False


def source(objects: list[list[int]], classes=3, crowd=-1) -> Fixed:
    """Images with objects of these classes; the object number `crowd` is a crowd region."""
    numbers = itertools.count()
    images = [[((0, 0, 5, 5), label, next(numbers) == crowd) for label in of_image] for of_image in objects]
    return Fixed(**columns(images, classes=tuple("abcdefgh"[:classes])))


def test_an_image_weighs_as_its_rarest_class_which_counts_once_an_image():
    data = source([[0], [0, 0, 0], [0, 1], [], [1, 0], [0], [0], [0], [2, 2, 0], [0]], classes=4)
    weights = repeat_weights(data, 0.4)  # in 9, 2, 1 and 0 of 10 images
    rare = np.sqrt(0.4 / 0.2), np.sqrt(0.4 / 0.1)
    assert weights == pytest.approx([1, 1, rare[0], 1, rare[0], 1, 1, 1, rare[1], 1])
    assert repeat_weights(data, 0.0) is None


def test_crowd_regions_make_no_image_rare():
    objects = [[0]] * 9 + [[0, 1]]
    assert repeat_weights(source(objects, crowd=10), 0.5).tolist() == [1] * 10
    assert repeat_weights(source(objects), 0.5)[-1] == pytest.approx(np.sqrt(5))


def test_the_stream_draws_images_in_these_shares():
    data = source([[0]] * 95 + [[0, 1]] * 5)
    weights = repeat_weights(data, 0.8)
    epochs = 40
    drawn = np.bincount(Stream(100, 10, 0, weights=weights).indices(np.arange(100 * epochs)), minlength=100) / epochs
    assert drawn == pytest.approx(100 * weights / weights.sum(), abs=0.5)
    assert drawn[95:].min() > 3


def test_fresh_scenes_can_not_be_drawn_more_often():
    with pytest.raises(Refused, match=r"--repeat_threshold 0.001: scenes are made afresh"):
        repeat_weights(scenes.load(0)[0], 0.001)
