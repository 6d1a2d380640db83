"""Images are reordered so that a step holds similar shapes, and the stream keeps its promises."""

import numpy as np
import pytest

from common.data.stream import Stream
from common.detection.grouping import GroupedStream


def aspects(count, seed=0):
    """As in COCO: most lie, some stand."""
    return np.random.default_rng(seed).choice([640 / 480, 480 / 640, 1.5, 1.0], count, p=[0.7, 0.2, 0.06, 0.04])


@pytest.mark.parametrize("size, batch, window", [(1000, 8, 16), (103, 8, 4), (17, 8, 16), (5, 8, 3), (64, 64, 1)])
def test_each_epoch_holds_each_image_exactly_once(size, batch, window):
    stream = GroupedStream(size, batch, 3, aspects=aspects(size), window=window)
    drawn = stream.indices(np.arange(4 * size)).reshape(4, size)
    assert (np.sort(drawn, axis=1) == np.arange(size)).all()
    if size > 5:
        assert len({epoch.tobytes() for epoch in drawn}) == 4


def test_any_position_can_be_asked_alone_and_in_any_order():
    stream = GroupedStream(103, 8, 3, aspects=aspects(103), window=4)
    everything = stream.indices(np.arange(500))
    order = np.random.default_rng(0).permutation(500)
    assert (stream.indices(order) == everything[order]).all()
    places = [102, 103, 104, 7]
    assert [stream.indices(np.array([place]))[0] for place in places] == everything[places].tolist()
    assert stream.indices(np.array([10**12]))[0] in range(103)
    other = GroupedStream(103, 8, 4, aspects=aspects(103), window=4)
    assert (other.indices(np.arange(500)) != everything).any()


def test_images_stay_in_their_window_and_weights_are_kept():
    shapes, weights = aspects(103), np.arange(1.0, 104)
    plain = Stream(103, 8, 3, weights=weights)
    grouped = GroupedStream(103, 8, 3, weights=weights, aspects=shapes, window=4)
    for start in range(0, 512, 32):
        where = np.arange(start, start + 32)
        for epoch in set((where // 103).tolist()):
            mine = where[where // 103 == epoch]
            assert sorted(grouped.indices(mine)) == sorted(plain.indices(mine))


def test_steps_hold_similar_shapes_in_an_order_that_says_nothing_about_them():
    shapes = aspects(10_000)
    stream = GroupedStream(10_000, 16, 0, aspects=shapes, window=16)
    mixed = {name: shapes[one.indices(np.arange(9_984))].reshape(-1, 16) for name, one in
             (("plain", Stream(10_000, 16, 0)), ("grouped", stream))}  # fmt: skip
    spread = {name: (np.ptp(of, axis=1) > 0.01).mean() for name, of in mixed.items()}
    assert spread["plain"] > 0.95 and spread["grouped"] < 0.25
    means = mixed["grouped"].mean(1).reshape(-1, 16)  # [windows, their batches]
    assert abs(np.corrcoef(np.arange(16), means.mean(0))[0, 1]) < 0.6 and np.ptp(means.mean(0)) < np.ptp(means[0]) / 2
