"""Training boxes that the trained detector contradicts: missing, moved, or of another class.

The model's confident detections in its training images are compared with their boxes. Later than
after a quarter of a run it has memorised wrong boxes.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torchvision.ops import box_iou

from common.detection.data.annotated import Annotated
from common.detection.evaluation.matching import IN_CROWD, IOU, Matches
from common.detection.evaluation.metrics import Detections
from common.detection.evaluation.plots import read_image
from common.distributed import is_main
from common.run.plots import BLUE, ORANGE, Cell, run_of, sheet, short

SAME, APART = 0.7, 0.2  # overlap: at the place of a box from here on; below of something else
# Weight from which a finding is worth a look.
LEAST = {"missing": 0.2, "moved": 0.2, "relabelled": 0.1}
LIKELY = {"missing": 0.2, "moved": 0.35, "relabelled": 0.4}  # likely wrong: docs/after_training.md
SHOWN = 24  # on the sheet
_BOX = ("left", "top", "right", "bottom")
COLUMNS = (
    "rank",
    "verdict",
    "image",
    "kind",
    "label",
    *_BOX,
    "suggested",
    *(f"suggested_{side}" for side in _BOX),
)
COLUMNS += ("score", "overlap")


class Finding(NamedTuple):
    """A box that the model contradicts."""

    kind: str  # "missing", "moved" or "relabelled"
    image: int
    object: int  # row of the source's columns of boxes; -1: missing
    detection: int  # row of the columns of detections, which suggests another box or class
    overlap: float  # of both
    weight: float  # the detection's score, less where it nearly agrees with the box

    @property
    def is_likely(self) -> bool:
        """True if the box is likely wrong, not only worth a look."""
        return self.weight >= LIKELY[self.kind]


class Findings(NamedTuple):
    """Boxes that the model contradicts, and the matches that they refer to."""

    matches: Matches
    boxes: list[Finding]


def find(source: Annotated, batches: Iterable[tuple], _device: torch.device) -> Findings | None:
    """The contradicted boxes of `source`, on the main process, from all its images with detections.
    A collective.
    """
    detections = Detections()
    for batch, detected in batches:
        detections.update(batch.positions.tolist(), detected)
    detections.results(source)  # gathers and matches them
    return Findings(detections.matches, findings(detections.matches)) if is_main() else None


def findings(matches: Matches) -> list[Finding]:
    """Boxes that good detections contradict, one for each object; likely wrong ones first."""
    source, found = matches.source, []
    for image in range(len(source)):
        rows = matches.get_detections(image, only_confident=False)
        rows = rows[matches.hits[rows] != IN_CROWD]
        objects = np.arange(source.offsets[image], source.offsets[image + 1])
        objects = objects[~source.crowd[objects]]
        boxes, true = (
            torch.from_numpy(part[:, :4].astype(np.float64))
            for part in (matches.detections[rows], source.boxes[objects])
        )
        overlaps = box_iou(boxes, true).nan_to_num().numpy()
        alike = matches.detections[rows, 5][:, None] == source.labels[objects]
        scores = matches.detections[rows, 4]
        good = int(matches.is_confident[rows].sum())  # rows are best first
        at_box = alike * (overlaps >= IOU)
        # How well each box is known as it is.
        of_class = (scores[:, None] * at_box).max(0, initial=0)
        overlaps, alike, boxes = overlaps[:good], alike[:good], boxes[:good]
        confirmed = (overlaps * alike >= SAME).any(0)
        told: set[int] = set()
        # Not there with another class.
        first = ~np.triu(box_iou(boxes, boxes).numpy() >= IOU, 1).any(0)
        for row, overlap, same, best in zip(
            rows[:good].tolist(), overlaps, alike, first, strict=True
        ):
            score, largest = float(matches.detections[row, 4]), float(overlap.max(initial=0))
            place = int(overlap.argmax()) if len(overlap) else -1
            if largest < APART and best:
                found.append(Finding("missing", image, -1, row, largest, score * (1 - largest)))
            elif largest < APART or place in told or (overlap * same >= SAME).any():
                continue
            elif same[place] and not confirmed[place]:
                found.append(
                    Finding(
                        "moved", image, int(objects[place]), row, largest, score * (1 - largest)
                    )
                )
                told.add(place)
            elif not same[place] and largest >= IOU:
                more = score - float(of_class[place])
                found.append(
                    Finding("relabelled", image, int(objects[place]), row, largest, more * largest)
                )
                told.add(place)
    found = [finding for finding in found if finding.weight >= LEAST[finding.kind]]
    return sorted(found, key=lambda finding: (not finding.is_likely, -finding.weight))


def rows(source: Annotated, suspects: Findings) -> list[Sequence]:
    """The rows of `suspicious.csv`."""
    matches = suspects.matches
    table: list[Sequence[Any]] = [COLUMNS]
    for place, finding in enumerate(suspects.boxes):
        *box, score, label = matches.detections[finding.detection].tolist()
        given = [""] * 5
        if finding.object >= 0:
            given = [
                source.classes[source.labels[finding.object]],
                *_rounded(source.boxes[finding.object].tolist()),
            ]
        numbers = f"{score:.4f}", f"{finding.overlap:.4f}"
        names = (
            "likely wrong" if finding.is_likely else "worth a look",
            source.name(finding.image),
            finding.kind,
        )
        table.append(
            (place + 1, *names, *given, source.classes[int(label)], *_rounded(box), *numbers)
        )
    return table


def draw(source: Annotated, suspects: Findings, path: Path) -> None:
    """Draw a sheet of the most suspicious boxes."""
    cells = [_cell(suspects.matches, finding) for finding in suspects.boxes[:SHOWN]]
    sheet(cells, f"{run_of(path)}, training: {headline(source, suspects)}", path)


def headline(source: Annotated, suspects: Findings) -> str:
    """The result in a sentence."""
    likely = sum(finding.is_likely for finding in suspects.boxes)
    text = f"{likely:,} boxes are likely wrong" if likely else "no box is likely wrong"
    return f"{text}, {len(suspects.boxes) - likely:,} are worth a look, in {len(source):,} images"


def _rounded(box: list[float]) -> list[str]:
    return [f"{side:.2f}" for side in box]


def _cell(matches: Matches, finding: Finding) -> Cell:
    """The image, with the given box in orange and the suggested one in blue."""
    source, (*box, score, label) = matches.source, matches.detections[finding.detection].tolist()
    suggested = source.classes[int(label)]
    boxes = [(box, suggested, BLUE)]
    kind = finding.kind if finding.is_likely else f"{finding.kind}?"
    caption = f"{kind}\n{short(suggested, 19)} {score:.2f}"
    if finding.object >= 0:
        name = source.classes[source.labels[finding.object]]
        boxes.insert(0, (source.boxes[finding.object].tolist(), name, ORANGE))
        caption = f"{kind}\n{short(name, 12)} → {short(suggested, 12)} {score:.2f}"
    return Cell(
        np.asarray(read_image(source, finding.image)), caption, source.name(finding.image), boxes
    )
