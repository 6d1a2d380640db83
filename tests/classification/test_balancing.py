"""Class weights keep the scale of the loss; sampling weights draw classes as often as they say."""

import numpy as np
import pytest

from common.classification.balancing import class_weights, compute_sample_weights
from common.errors import Refused

LABELS = np.repeat(np.arange(4), [1, 4, 16, 0])  # a class without samples, too


def test_class_weights_follow_frequencies_and_have_mean_1() -> None:
    assert class_weights("none", LABELS, 4) is None
    for kind, expected in (("balanced", [1, 1 / 4, 1 / 16]), ("sqrt", [1, 1 / 2, 1 / 4])):
        weights = class_weights(kind, LABELS, 4)
        assert weights[:3] / weights[0] == pytest.approx(expected)
        assert weights[3] > 0
        assert weights[LABELS].mean() == pytest.approx(1)
    # The mean over the five labels is 1.
    several = np.array([[1, 1], [1, 0], [1, 0], [1, 0]], dtype=bool)
    assert class_weights("balanced", several, 2) == pytest.approx([5 / 8, 5 / 2])


def test_sampling_weights_draw_classes_as_often_as_they_say() -> None:
    assert compute_sample_weights("natural", LABELS, 4) is None
    for kind, shares in (("balanced", [1, 1, 1]), ("sqrt", [1, 2, 4])):
        weights = compute_sample_weights(kind, LABELS, 4)
        weight_by_class = np.bincount(LABELS, weights)
        assert weight_by_class / weight_by_class[0] == pytest.approx(shares)
        assert len(set(weights[5:])) == 1  # within a class all alike
    with pytest.raises(Refused, match=r"--sampling balanced: .* use --class_weights balanced"):
        compute_sample_weights("balanced", np.ones((3, 2), bool), 2)
