"""Notes on data: what a reader leaves out or changes, counted by reason.

A note becomes a row of the start table. If most of the data would be left out, the start is refused
instead: then the data are of another form than the reader takes them for.
"""

from typing import NamedTuple

from common.errors import Refused

_MAX_LEFT_OUT = 0.5  # largest share that a reader may leave out


class Note(NamedTuple):
    """How many items have the same reason, and the first of them by name."""

    num_items: int
    first: str


class Notes:
    """Counts by reason of one kind of items, such as images, boxes, files or lines.

    `title` names the data in messages, `unit` the items in the plural.
    """

    def __init__(self, title: str, unit: str):
        self.title = title
        self.unit = unit
        self.left_out: dict[str, Note] = {}
        self.changed: dict[str, Note] = {}
        self.beside: dict[str, Note] = {}

    def leave_out(self, reason: str, first: str, count: int = 1) -> None:
        """Count items that are not used: `("smaller than 1 pixel", "a.jpg", 3)`. 0 items add nothing."""
        _add(self.left_out, reason, Note(int(count), first))

    def change(self, change: str, first: str, count: int = 1) -> None:
        """Count items that are used otherwise than they are written: `("are clipped", "a.jpg", 3)`."""
        _add(self.changed, change, Note(int(count), first))

    def skip(self, kind: str, first: str) -> None:
        """Count something beside the items that is none of them: `(".txt", "a.txt")`."""
        _add(self.beside, kind, Note(1, first))

    def merge(self, notes: "Notes") -> None:
        """Add the counts of `notes`, such as another rank's. The first item by name stays."""
        for reason, note in notes.left_out.items():
            _add(self.left_out, reason, note)
        for change, note in notes.changed.items():
            _add(self.changed, change, note)
        for kind, note in notes.beside.items():
            _add(self.beside, kind, note)

    @property
    def num_left_out(self) -> int:
        return sum(note.num_items for note in self.left_out.values())

    def format_lines(self, total: int, cause: str = "") -> tuple[str, ...]:
        """A line for each reason. `total`: all items, also those that are left out.

        Raises `Refused` if more than half of them are left out, with the likely `cause` and the way out.
        """
        reasons = []
        for reason, note in self.left_out.items():
            reasons.append(f"{note.num_items:,} ({reason}), first {note.first}")
        summary = ", ".join(reasons)
        if self.num_left_out > _MAX_LEFT_OUT * total:
            advice = f"; {cause}" if cause else ""
            raise Refused(
                f"{self.title}: most of its {total:,} {self.unit} would be left out: "
                f"{summary}{advice}"
            )
        lines = []
        if reasons:
            lines.append(f"{total:,} {self.unit}, left out: {summary}")
        for change, note in self.changed.items():
            lines.append(
                f"{note.num_items:,} of {total:,} {self.unit} {change}, first {note.first}"
            )
        for kind, note in self.beside.items():
            lines.append(
                f"{note.num_items:,} ({kind}) beside the {self.unit} are not read, first "
                f"{note.first}"
            )
        return tuple(lines)


def _add(notes: dict[str, Note], reason: str, note: Note) -> None:
    if not note.num_items:
        return
    if reason in notes:
        note = Note(notes[reason].num_items + note.num_items, notes[reason].first)
    notes[reason] = note
