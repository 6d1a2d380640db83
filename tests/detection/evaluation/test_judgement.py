"""Thresholds and kinds of error are right on cases worked out by hand, and equal to COCO's and TIDE's numbers."""

import dataclasses
import warnings

import numpy as np
import pytest

from common.detection.data.annotated import Annotations
from common.detection.evaluation.judgement import Judgement
from common.detection.evaluation.metrics import Detections
from tests.harness.detections import A, B, awkward, columns

NOWHERE = (0, 90, 10, 100)


def judged(objects: list, found: list) -> Judgement:
    """Objects (box, class, crowd) and detections (box, score, class) of an image."""
    rows = np.array([(*box, score, label) for box, score, label in found], np.float32).reshape(-1, 6)
    source = Annotations(**columns([objects]))
    return Judgement.of(source, np.zeros(len(rows), np.int64), rows)


def test_crowds_absent_classes_and_nothing_at_all_are_no_errors() -> None:
    inside = [((0, 0, 10, 10), 0.9, 0), (B, 0.8, 1)]
    judgement = judged([((0, 0, 100, 40), 0, True), (B, 1, False)], inside)
    assert judgement.errors.ap50 == 1 and not any(judgement.errors.counts.values())
    assert [of["recall"] for of in judgement.details()["classes"]] == [None, 1.0, None]
    for objects, found in (([], []), ([], inside), ([(A, 0, False)], [])):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            judgement = judged(objects, found)
            results = judgement.details()
        assert results["errors"]["missed"] == {"count": len(objects), "dAP50": None}
        assert judgement.thresholds() == [None] * 3 and results["threshold"] == 0.5


def test_ap50_is_that_of_coco() -> None:
    source, found = awkward(1)
    for of_image in found[::2]:  # more than count of a class in an image
        of_image["labels"][:] = 1
    detections = Detections()
    detections.update(range(21), found)
    expected = detections.results(source)["AP50"]
    judgement = Judgement.of(source, *detections.columns())
    assert len(judgement.matches.rows) < len(detections.columns()[0])
    assert judgement.errors.ap50 == pytest.approx(expected, abs=1e-12)


# Gains in AP50 and counts of tidecv 1.0.1 on the same detections, at most 100 in an image: it leaves out others.
TIDE = {
    "class": (0.00021676456927924192, 8),
    "localisation": (0.01616346104278458, 125),
    "both": (0.006696594399113183, 178),
    "duplicate": (9.923158972712897e-05, 7),
    "background": (0.11053423095405951, 709),
    "missed": (0.0007988745870919534, 1),
    "false_positives": (0.7959534977665957, None),
    "false_negatives": (0.005080194880149165, None),
}


def test_costs_and_counts_are_those_of_tide() -> None:
    """Without crowds, tied scores, and classes without objects, which TIDE counts otherwise."""
    source, found = awkward(4)
    detections = Detections()
    detections.update(range(21), found)
    images, rows = detections.columns()
    source = dataclasses.replace(source, crowd=np.zeros(len(source.boxes), bool))
    rows[:, 4] = (np.random.default_rng(4).permutation(len(rows)) + 1) / (len(rows) + 1)
    errors = Judgement.of(source, images[rows[:, 5] > 0], rows[rows[:, 5] > 0]).errors
    for kind, (cost, count) in TIDE.items():
        assert errors.costs[kind] == pytest.approx(cost, abs=1e-12), kind
        assert count in (None, errors.counts[kind]), kind


def test_each_class_has_the_threshold_of_its_own_best_f1() -> None:
    objects = [(A, 0, False), (B, 0, False), ((0, 0, 9, 9), 1, False), ((0, 60, 20, 80), 2, False)]
    # The right one of 0.6 scores as much as the false one: both or neither.
    found = [(A, 0.9, 0), (NOWHERE, 0.6, 0), (B, 0.6, 0)]
    found += [(A, 0.8, 1), ((0, 0, 9, 9), 0.3, 1), ((0, 0, 9, 9), 0.2, 1)]
    judgement = judged(objects, found)
    assert judgement.thresholds() == pytest.approx([0.6, 0.3, None])
    cat, dog, cow = judgement.details()["classes"]
    assert cat == pytest.approx({"threshold": 0.6, "precision": 2 / 3, "recall": 1, "f1": 4 / 5, "objects": 2})
    assert dog == pytest.approx({"threshold": 0.3, "precision": 1 / 2, "recall": 1, "f1": 2 / 3, "objects": 1})
    assert cow == {"threshold": None, "precision": None, "recall": 0, "f1": None, "objects": 1}
