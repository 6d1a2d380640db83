"""Rare classes are drawn more often; steps hold similar shapes, an epoch each image once."""

import numpy as np
import pytest

from common.data.stream import Stream
from common.detection.data import scenes
from common.detection.data.annotated import Annotated
from common.detection.grouping import GroupedStream, compute_repeat_weights
from common.errors import Refused
from tests.harness.detections import build_columns


def test_an_image_weighs_as_its_rarest_class():
    objects = [[0], [0, 0, 0], [0, 1], [], [1, 0], [0], [0], [0], [2, 2, 0], [0]]
    images = [[((0, 0, 5, 5), label) for label in of_image] for of_image in objects]
    images[0].append(((0, 0, 5, 5), 3, True))
    data = Annotated(**build_columns(images, classes=tuple("abcd")))
    weights = compute_repeat_weights(data, 0.4)  # classes are in 9, 2 and 1 of 10 images
    rare = np.sqrt(0.4 / 0.2), np.sqrt(0.4 / 0.1)
    assert weights == pytest.approx([1, 1, rare[0], 1, rare[0], 1, 1, 1, rare[1], 1])
    assert compute_repeat_weights(data, 0.0) is None
    drawn = (
        np.bincount(Stream(10, 10, 0, weights=weights).get_indices(np.arange(4_000)), minlength=10)
        / 400
    )
    assert drawn == pytest.approx(10 * weights / weights.sum(), abs=0.1)
    with pytest.raises(Refused, match=r"--repeat_threshold 0.001: scenes are made afresh"):
        compute_repeat_weights(scenes.load(0)[0], 0.001)


def draw_aspects(count, seed=0):
    """As in COCO: most lie, some stand."""
    return np.random.default_rng(seed).choice(
        [640 / 480, 480 / 640, 1.5, 1.0], count, p=[0.7, 0.2, 0.06, 0.04]
    )


@pytest.mark.parametrize("size, window", [(1000, 16), (103, 4), (5, 3)])
def test_each_epoch_holds_each_image_exactly_once(size, window):
    stream = GroupedStream(size, 8, 3, aspects=draw_aspects(size), window=window)
    drawn = stream.get_indices(np.arange(4 * size))
    assert (np.sort(drawn.reshape(4, size), axis=1) == np.arange(size)).all()
    order = np.random.default_rng(0).permutation(4 * size)
    assert (stream.get_indices(order) == drawn[order]).all()
    assert stream.get_indices(np.array([10**12]))[0] in range(size)


def test_steps_hold_similar_shapes_in_random_order():
    shapes = draw_aspects(10_000)
    stream = GroupedStream(10_000, 16, 0, aspects=shapes, window=16)
    mixed = {name: shapes[stream_of.get_indices(np.arange(9_984))].reshape(-1, 16) for name, stream_of in
             (("plain", Stream(10_000, 16, 0)), ("grouped", stream))}  # fmt: skip
    spread = {name: (np.ptp(of, axis=1) > 0.01).mean() for name, of in mixed.items()}
    assert spread["plain"] > 0.95 and spread["grouped"] < 0.25
    means = mixed["grouped"].mean(1).reshape(-1, 16)  # [windows, their batches]
    assert (
        abs(np.corrcoef(np.arange(16), means.mean(0))[0, 1]) < 0.6
        and np.ptp(means.mean(0)) < np.ptp(means[0]) / 2
    )
