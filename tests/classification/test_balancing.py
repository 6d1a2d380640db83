"""Class weights keep the scale of the loss; sampling weights draw classes as often as they say."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.classification.balancing import class_weights, sample_weights
from common.errors import Refused

LABELS = np.repeat(np.arange(4), [1, 4, 16, 0])  # a class without samples, too
CLASSES = ("a", "b", "007", "no")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.sampled_from(["sqrt", "balanced"]))
def test_class_weights_have_mean_1_over_the_samples(labels: list[int], kind: str) -> None:
    weights = class_weights(kind, np.array(labels), tuple("abcdef"))
    assert weights[labels].mean() == pytest.approx(1)
    assert (weights > 0).all()


def test_class_weights_follow_the_frequencies() -> None:
    assert class_weights("none", LABELS, CLASSES) is None
    balanced, root = class_weights("balanced", LABELS, CLASSES), class_weights("sqrt", LABELS, CLASSES)
    assert balanced[:3] / balanced[0] == pytest.approx([1, 1 / 4, 1 / 16])
    assert root[:3] / root[0] == pytest.approx([1, 1 / 2, 1 / 4])


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
        ("a: 1\nb: 1\n007: 1\nno: 1\nd: 1", "missing, unknown or wrong: d$"),
        ("a: 1\nb: 0\n007: -1\nno: inf", "missing, unknown or wrong: b, 007, no$"),
        ("a: .nan\nb: 1\n007: nan\nno: 1", "missing, unknown or wrong: a, 007$"),
        ("a: heavy\nb: [1]\n007:\nno: 1e-3", "missing, unknown or wrong: a, b, 007$"),
        ("- 1", "missing, unknown or wrong: 007, a, b, no$"),
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


def test_a_missing_file_is_refused_with_what_can_be_given() -> None:
    with pytest.raises(Refused, match="--class_weights balance: none, sqrt, balanced or a YAML file"):
        class_weights("balance", LABELS, CLASSES)


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
