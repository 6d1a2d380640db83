"""Boxes that are missing, moved or relabelled are found by confident detections."""

import pytest

from common.detection.data.annotated import Annotated
from tests.harness.detections import A, B, match_one_image, shift_box
from tools.audit import boxes as audit

DOWN = (10, 60, 50, 95)


class Named(Annotated):
    def get_name(self, index: int) -> str:
        return f"{index}.png"


PAIR = [(A, 0, False), (B, 1, False)]
THREE = [*PAIR, (DOWN, 2, False)]
SEEN = [(A, 0.9, 0), (B, 0.9, 1), (DOWN, 0.9, 2)]


@pytest.mark.parametrize(
    "objects, detections, expected",
    [
        (PAIR, [(A, 0.9, 0), (shift_box(B, 2), 0.8, 1)], []),
        (PAIR, [], []),
        # Another class at a confirmed box, and a detection in a crowd region, say nothing about
        # boxes.
        (PAIR, [(A, 0.9, 0), (A, 0.8, 2), (B, 0.9, 1)], []),
        ([*PAIR, (DOWN, 2, True)], SEEN, []),
        (THREE[1:], SEEN, [("missing", -1, 0)]),
        (
            THREE[1:],
            [*SEEN, (shift_box(A, 2), 0.8, 2)],
            [("missing", -1, 0)],
        ),  # once for each place
        ([(shift_box(A, 15), 0, False), *THREE[1:]], SEEN, [("moved", 0, 0)]),
        ([THREE[0], (B, 2, False), THREE[2]], SEEN, [("relabelled", 1, 1)]),
        (
            [(shift_box(A, 15), 0, False), (B, 0, False)],
            SEEN,
            [("relabelled", 1, 1), ("missing", -1, 2), ("moved", 0, 0)],
        ),
        # A class that scores nearly as well as the given one.
        (
            [PAIR[0], (B, 2, False)],
            [(A, 0.9, 0), (B, 0.9, 1), (shift_box(B, 1), 0.7, 2)],
            [("relabelled", 1, 1)],
        ),
        ([PAIR[0], (B, 2, False)], [(A, 0.9, 0), (B, 0.9, 1), (shift_box(B, 1), 0.85, 2)], []),
    ],
)
def test_boxes_that_good_detections_contradict_are_found(objects, detections, expected) -> None:
    """Removed, moved and relabelled ones, and no others."""
    suspects = audit.list_suspects(match_one_image(objects, detections))
    assert [(suspect.kind, suspect.object, suspect.detection) for suspect in suspects] == expected


def test_the_table_names_box_and_suggestion_surest_first() -> None:
    detections = [(A, 0.9, 0), (B, 0.8, 1), (DOWN, 0.95, 2)]
    wide = match_one_image([(shift_box(A, 15), 0, False), (B, 2, False)], detections, Named)
    near = [(shift_box(A, 8), 0, False), (shift_box(B, 10), 1, False)]
    near = match_one_image(near, SEEN, Named)
    tables = []
    for matches in (wide, near):
        header, *rows = audit.build_table(
            matches.source, audit.Suspects(matches, audit.list_suspects(matches))
        )
        tables.append([dict(zip(header, row, strict=True)) for row in rows])
    missing, relabelled, shifted = tables[0]
    assert [row["kind"] for row in tables[0]] == ["missing", "relabelled", "moved"]
    assert (missing["label"], missing["left"], missing["suggested"]) == ("", "", "cow")
    assert (relabelled["label"], relabelled["suggested"]) == ("cow", "dog")
    assert (shifted["left"], shifted["suggested_left"], shifted["overlap"]) == (
        "25.00",
        "10.00",
        "0.4545",
    )
    # Overlaps of the moved boxes: 0.33 and 0.67.
    expected = [("missing", "likely wrong"), ("moved", "likely wrong"), ("moved", "worth a look")]
    assert [(row["kind"], row["verdict"]) for row in tables[1]] == expected
    assert [row["left"] for row in tables[1]] == ["", "70.00", "18.00"]
