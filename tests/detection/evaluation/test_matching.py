"""Misses and false alarms are told apart; that hits are COCO's is tested in test_metrics.py."""

import warnings

import numpy as np
import pytest

from common.detection.data.annotated import Annotated
from common.detection.evaluation.matching import NO_OBJECT, Matches
from tests.harness.detections import A, B, build_columns, match_one_image, shift_box


def test_each_kind_of_mistake_is_told_apart() -> None:
    detections = [
        (A, 0.9, 0),  # right
        (shift_box(A, 3), 0.8, 0),  # the same again
        (B, 0.7, 2),  # the dog taken for a cow
        (shift_box(B, 12), 0.65, 1),  # a dog, but beside it
        ((0, 90, 10, 100), 0.6, 0),  # nothing there
        ((0, 60, 10, 70), 0.05, 0),  # not sure enough to count
    ]
    matches = match_one_image(
        [(A, 0, False), (B, 1, False), ((85, 0, 95, 10), 1, False)], detections
    )
    matches.threshold = 0.5
    # The cow and the misplaced dog are of one object: the surer one stands for both.
    assert [
        (alarm.detection, alarm.kind, alarm.object) for alarm in matches.find_false_alarms(9)
    ] == [
        (1, "duplicate", 0),
        (2, "class", 1),
        (4, "background", NO_OBJECT),
    ]
    assert [miss.object for miss in matches.find_misses(9)] == [2]
    assert matches.compute_confusion().tolist() == [
        [1, 0, 0, 0],
        [0, 0, 1, 1],
        [0, 0, 0, 0],
        [2, 1, 0, 0],
    ]
    assert (matches.is_detected.tolist(), matches.num_false_alarms) == ([True, False, False], 4)


def test_a_detection_of_the_right_class_comes_first() -> None:
    matches = match_one_image([(A, 0, False)], [(A, 0.9, 1), (A, 0.8, 0)])
    assert matches.compute_confusion()[0].tolist() == [1, 0, 0, 0] and matches.compute_confusion()[
        3
    ].tolist() == [
        0,
        1,
        0,
        0,
    ]
    twice = match_one_image([(A, 0, False), (A, 0, False)], [(A, 0.9, 0)])
    assert twice.hit_objects.tolist() == [1], "of equal objects the last, as COCO"


def test_the_threshold_is_the_score_of_the_best_f1() -> None:
    scores = [
        (A, 0.9, 0),
        ((0, 90, 5, 95), 0.6, 0),
        (B, 0.6, 1),
        ((0, 0, 5, 5), 0.3, 0),
        ((5, 90, 9, 95), 0.3, 0),
    ]
    objects = [(A, 0, False), (B, 1, False)]
    # 0.9: 2 * 1 / (1 + 2); 0.6: 2 * 2 / (3 + 2), as both of that score come together; 0.3: 2 * 2 /
    # (5 + 2)
    assert match_one_image(objects, scores).threshold == pytest.approx(0.6)
    wrong = [((0, top, 5, top + 5), 0.6, 0) for top in (70, 80, 90)]
    # 0.9: 2 * 1 / (1 + 2); 0.6: 2 * 2 / (5 + 2), though the first of that score alone would make
    # both right
    assert match_one_image(objects, [(A, 0.9, 0), (B, 0.6, 1), *wrong]).threshold == pytest.approx(
        0.9
    )
    assert match_one_image(objects, scores[1:2] + scores[3:]).threshold == 0.5  # nothing is right
    assert match_one_image(objects, []).threshold == match_one_image([], scores).threshold == 0.5


def test_each_class_has_the_threshold_of_its_own_best_f1() -> None:
    objects = [(A, 0, False), (B, 0, False), ((0, 0, 9, 9), 1, False), ((0, 60, 20, 80), 2, False)]
    # The right one of 0.6 scores as much as the false one: both or neither.
    detections = [(A, 0.9, 0), ((0, 90, 10, 100), 0.6, 0), (B, 0.6, 0)]
    detections += [(A, 0.8, 1), ((0, 0, 9, 9), 0.3, 1), ((0, 0, 9, 9), 0.2, 1)]
    cat, dog, cow = match_one_image(objects, detections).class_results
    assert cat == pytest.approx(
        {"threshold": 0.6, "precision": 2 / 3, "recall": 1, "f1": 4 / 5, "objects": 2}
    )
    assert dog == pytest.approx(
        {"threshold": 0.3, "precision": 1 / 2, "recall": 1, "f1": 2 / 3, "objects": 1}
    )
    assert cow == {"threshold": None, "precision": None, "recall": 0, "f1": None, "objects": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_crowd = match_one_image(
            [((0, 0, 100, 40), 0, True)], [((0, 0, 10, 10), 0.9, 0)]
        ).class_results
        assert [row["recall"] for row in in_crowd] == [None] * 3 and match_one_image(
            [], []
        ).class_results == in_crowd


def test_crowd_regions_are_neither_missed_nor_background() -> None:
    crowd = (0, 0, 100, 40)
    inside = ((0, 0, 10, 10), 0.9, 0)
    matches = match_one_image([(crowd, 0, True), (B, 1, False)], [inside, (B, 0.8, 1)])
    assert (
        matches.compute_confusion().sum() == 1
        and not matches.find_misses(9)
        and not matches.find_false_alarms(9)
    )
    other_class = match_one_image(
        [(crowd, 0, True), (B, 1, False)], [((0, 0, 10, 10), 0.9, 2), (B, 0.8, 1)]
    )
    assert [alarm.kind for alarm in other_class.find_false_alarms(9)] == ["background"]


def test_only_the_best_of_each_class_and_image_are_matched() -> None:
    """As many as COCO counts; another class and another image have as many of their own."""
    source = Annotated(**build_columns([[(A, 0)], [(A, 0)]]))
    limit = source.max_detections
    rows = np.array([(*A, score / 200, 0) for score in range(limit + 5)], np.float32)
    other_class = rows[:3].copy()
    other_class[:, 5] = 1
    images = np.repeat([0, 0, 1], [limit + 5, 3, limit + 5])
    matches = Matches.from_best(source, images, np.concatenate([rows, other_class, rows]))
    assert np.bincount(matches.images).tolist() == [limit + 3, limit]
    of_class = matches.detections[matches.detections[:, 5] == 0]
    assert of_class[:, 4].min() == rows[5, 4], "the worst are left out"
