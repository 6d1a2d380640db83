"""Class weights keep the scale of the loss; sampling weights draw classes as often as they say."""

from pathlib import Path

import numpy as np
import pytest

from common.classification.balancing import class_weights, sample_weights
from common.errors import Refused

LABELS = np.repeat(np.arange(4), [1, 4, 16, 0])  # a class without samples, too
CLASSES = ("a", "b", "007", "no")


def test_class_weights_follow_the_frequencies_and_have_mean_1_over_the_samples() -> None:
    assert class_weights("none", LABELS, CLASSES) is None
    for kind, wanted in (("balanced", [1, 1 / 4, 1 / 16]), ("sqrt", [1, 1 / 2, 1 / 4])):
        weights = class_weights(kind, LABELS, CLASSES)
        assert weights[:3] / weights[0] == pytest.approx(wanted) and weights[3] > 0
        assert weights[LABELS].mean() == pytest.approx(1)


def test_class_weights_of_multi_label_data_count_every_label() -> None:
    labels = np.array([[1, 1], [1, 0], [1, 0], [1, 0]], dtype=bool)
    weights = class_weights("balanced", labels, ("a", "b"))
    assert weights == pytest.approx([5 / 8, 5 / 2])  # the mean over the five labels is 1


def test_class_weights_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.yaml"
    path.write_text("b: 1e-1\na: 2\n007: .5\nno: 3\n")
    weights = class_weights(str(path), LABELS, CLASSES)
    assert weights / weights[0] == pytest.approx([1, 0.05, 0.25, 1.5])
    assert weights[LABELS].mean() == pytest.approx(1)


@pytest.mark.parametrize(
    "text, told",
    [
        ("a: 1\nb: 1\n007: 1\n", "missing, unknown or wrong: no$"),
        ("a: 1\nb: 0\n007: -1\nno: inf", "missing, unknown or wrong: b, 007, no$"),
        ("a: .nan\nb: 1\n007: nan\nno: 1", "missing, unknown or wrong: a, 007$"),
        ("a: heavy\nb: [1]\n007:\nno: 1e-3\nd: 1", "missing, unknown or wrong: d, a, b, 007$"),
        ("", "missing, unknown or wrong: 007, a, b, no$"),
        ("a: [", "not readable as YAML"),
    ],
)
def test_a_file_that_does_not_weigh_every_class_is_refused_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "weights.yaml"
    path.write_text(text)
    with pytest.raises(Refused, match=told) as raised:
        class_weights(str(path), LABELS, CLASSES)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_sampling_weights_draw_classes_as_often_as_they_say() -> None:
    assert sample_weights("natural", LABELS, 4) is None
    for kind, shares in (("balanced", [1, 1, 1]), ("sqrt", [1, 2, 4])):
        weights = sample_weights(kind, LABELS, 4)
        of_classes = np.bincount(LABELS, weights)
        assert of_classes / of_classes[0] == pytest.approx(shares)
        assert len(set(weights[5:])) == 1  # within a class all alike


def test_sampling_by_class_is_refused_for_multi_label_data() -> None:
    with pytest.raises(Refused, match=r"--sampling balanced: .* use --class_weights balanced"):
        sample_weights("balanced", np.ones((3, 2), bool), 2)
