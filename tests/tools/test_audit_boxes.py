"""Boxes that are missing, moved or relabelled are found by confident detections."""

from common.detection.data.annotated import Annotated
from tests.harness.detections import A, B, moved, one_image
from tools.audit import boxes as suspects

DOWN = (10, 60, 50, 95)


class Named(Annotated):
    def name(self, index: int) -> str:
        return f"{index}.png"


def kinds(objects: list, found: list) -> list[tuple[str, int, int]]:
    matches = one_image(objects, found)
    return [(finding.kind, finding.object, finding.detection) for finding in suspects.findings(matches)]


def test_boxes_that_are_as_the_model_sees_them_are_no_findings() -> None:
    objects = [(A, 0, False), (B, 1, False)]
    assert kinds(objects, [(A, 0.9, 0), (moved(B, 2), 0.8, 1)]) == []
    assert kinds(objects, []) == []
    # Another class at a confirmed box, and a detection in a crowd region, say nothing about boxes.
    assert kinds(objects, [(A, 0.9, 0), (A, 0.8, 2), (B, 0.9, 1)]) == []
    assert kinds([*objects, (DOWN, 2, True)], [(A, 0.9, 0), (B, 0.9, 1), (DOWN, 0.9, 2)]) == []


def test_a_removed_a_moved_and_a_relabelled_box_are_found() -> None:
    right = [(A, 0, False), (B, 1, False), (DOWN, 2, False)]
    seen = [(A, 0.9, 0), (B, 0.9, 1), (DOWN, 0.9, 2)]
    assert kinds(right[1:], seen) == [("missing", -1, 0)]
    assert kinds(right[1:], [*seen, (moved(A, 2), 0.8, 2)]) == [("missing", -1, 0)], "once for each place"
    assert kinds([(moved(A, 15), 0, False), *right[1:]], seen) == [("moved", 0, 0)]
    assert kinds([*right[:1], (B, 2, False), *right[2:]], seen) == [("relabelled", 1, 1)]
    everything = kinds([(moved(A, 15), 0, False), (B, 0, False)], seen)
    assert everything == [("relabelled", 1, 1), ("missing", -1, 2), ("moved", 0, 0)]


def test_a_class_that_scores_nearly_as_well_is_no_finding() -> None:
    found = [(A, 0.9, 0), (B, 0.9, 1), (moved(B, 1), 0.7, 2)]
    objects = [(A, 0, False), (B, 2, False)]
    assert kinds(objects, found) == [("relabelled", 1, 1)]
    found[2] = (moved(B, 1), 0.85, 2)
    assert kinds(objects, found) == []


def test_the_table_names_box_and_suggestion_surest_first() -> None:
    found = [(A, 0.9, 0), (B, 0.8, 1), (DOWN, 0.95, 2)]
    wide = one_image([(moved(A, 15), 0, False), (B, 2, False)], found, Named)
    near = [(moved(A, 8), 0, False), (moved(B, 10), 1, False)]
    near = one_image(near, [(A, 0.9, 0), (B, 0.9, 1), (DOWN, 0.9, 2)], Named)
    tables = []
    for matches in (wide, near):
        header, *rows = suspects.rows(matches.source, suspects.Findings(matches, suspects.findings(matches)))
        tables.append([dict(zip(header, row, strict=True)) for row in rows])
    missing, relabelled, shifted = tables[0]
    assert [row["kind"] for row in tables[0]] == ["missing", "relabelled", "moved"]
    assert (missing["label"], missing["left"], missing["suggested"]) == ("", "", "cow")
    assert (relabelled["label"], relabelled["suggested"]) == ("cow", "dog")
    assert (shifted["left"], shifted["suggested_left"], shifted["overlap"]) == ("25.00", "10.00", "0.4545")
    expected = [
        ("missing", "likely wrong"),
        ("moved", "likely wrong"),
        ("moved", "worth a look"),
    ]  # overlaps 0.33, 0.67
    assert [(row["kind"], row["verdict"]) for row in tables[1]] == expected
    assert [row["left"] for row in tables[1]] == ["", "70.00", "18.00"]
