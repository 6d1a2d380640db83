"""Notes on data: counts by reason become lines, and a start that would leave out most of the data
is refused.
"""

import pytest

from common.data.notes import Notes
from common.errors import Refused


@pytest.mark.smoke
def test_counts_of_two_readers_become_one_line_by_reason():
    notes = Notes("boxes.json", "boxes")
    notes.leave_out("smaller than 1 pixel", "a.jpg")
    notes.leave_out("smaller than 1 pixel", "b.jpg", 2)
    notes.leave_out("of a crowd", "c.jpg", 0)
    more_notes = Notes("boxes.json", "boxes")
    more_notes.leave_out("smaller than 1 pixel", "d.jpg")
    more_notes.change("are clipped at their image", "e.jpg", 5)
    notes.merge(more_notes)
    assert notes.format_lines(total=400) == (
        "400 boxes, left out: 4 (smaller than 1 pixel), first a.jpg",
        "5 of 400 boxes are clipped at their image, first e.jpg",
    )


@pytest.mark.smoke
@pytest.mark.parametrize("count, is_refused", [(5, False), (6, True)])
def test_more_than_half_is_refused_with_the_cause(count, is_refused):
    notes = Notes("photos", "files")
    notes.leave_out("suffix .heic", "a.heic", count)
    if not is_refused:
        assert notes.format_lines(total=10)
        return
    with pytest.raises(
        Refused,
        match=r"photos: most of its 10 files would be left out: 6 \(suffix .heic\), .*; convert",
    ):
        notes.format_lines(total=10, cause="convert them to JPEG")
