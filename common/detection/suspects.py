"""Report of boxes that are likely wrong: missing, moved, or of another class.

After a quarter of a run the model looks at its training images once more, at most at those with the largest mean losses
(`common.training.audit`), and its confident detections are compared with their boxes. Later it would know the wrong boxes by
heart. Losses alone would not do: a wrong box is one of many in its image.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torchvision.ops import box_iou

from common.data.images import BrokenImage
from common.detection.data.annotated import Annotated
from common.detection.evaluation.matching import IN_CROWD, IOU, Matches
from common.distributed.collectives import broadcast_object
from common.run.plots import BLUE, ORANGE, Cell, run_of, sheet, short
from common.training.audit import Suspects

MOST = 5_000  # training images that the model looks at once more: those with the largest mean losses
SAME, APART = 0.7, 0.2  # overlap from which a detection is at the place of a box; below which it is of something else
LEAST = {"missing": 0.2, "moved": 0.2, "relabelled": 0.1}  # weight from which a finding is reported
SHOWN = 24  # on the sheet
_BOX = ("left", "top", "right", "bottom")
COLUMNS = ("rank", "image", "kind", "label", *_BOX, "suggested", *(f"suggested_{side}" for side in _BOX))
COLUMNS += ("score", "overlap", "mean_loss_of_image", "times_seen")


class Finding(NamedTuple):
    """A box that is likely wrong."""

    kind: str  # "missing", "moved" or "relabelled"
    image: int
    object: int  # row of the source's columns of boxes; -1: missing
    detection: int  # row of the columns of detections, which suggests another box or class
    overlap: float  # of both
    weight: float  # the detection's score, less where it and the box nearly agree, or as the box's own class scores too


def images(train: Any, suspects: Suspects) -> Annotated | None:
    """The images of `train` to look at, on every rank: those that the main process's `suspects` name. A collective.

    None if nothing was audited, as with images that are never seen twice.
    """
    chosen = broadcast_object(suspects.indices[:MOST].tolist())
    return train.part(np.array(chosen)) if chosen and hasattr(train, "part") else None


def findings(matches: Matches) -> list[Finding]:
    """Boxes that are likely wrong by the good detections of `matches`, most suspicious first, at most one for each object."""
    source, found = matches.source, []
    for image in range(len(source)):
        rows = matches.of_image(image, good=False)
        rows = rows[matches.hits[rows] != IN_CROWD]
        objects = np.arange(source.offsets[image], source.offsets[image + 1])
        objects = objects[~source.crowd[objects]]
        boxes, true = (
            torch.from_numpy(part[:, :4].astype(np.float64)) for part in (matches.rows[rows], source.boxes[objects])
        )
        overlaps = box_iou(boxes, true).nan_to_num().numpy()
        alike = matches.rows[rows, 5][:, None] == source.labels[objects]
        scores, good = matches.rows[rows, 4], int(matches.good[rows].sum())  # rows are best first
        at_box = alike * (overlaps >= IOU)
        of_class = (scores[:, None] * at_box).max(0, initial=0)  # how well each box is known as it is
        overlaps, alike, boxes = overlaps[:good], alike[:good], boxes[:good]
        confirmed = (overlaps * alike >= SAME).any(0)
        told: set[int] = set()
        first = ~np.triu(box_iou(boxes, boxes).numpy() >= IOU, 1).any(0)  # not there already with another class
        for row, overlap, same, best in zip(rows[:good].tolist(), overlaps, alike, first, strict=True):
            score, most = float(matches.rows[row, 4]), float(overlap.max(initial=0))
            place = int(overlap.argmax()) if len(overlap) else -1
            if most < APART and best:
                found.append(Finding("missing", image, -1, row, most, score * (1 - most)))
            elif most < APART or place in told or (overlap * same >= SAME).any():
                continue
            elif same[place] and not confirmed[place]:
                found.append(Finding("moved", image, int(objects[place]), row, most, score * (1 - most)))
                told.add(place)
            elif not same[place] and most >= IOU:
                more = score - float(of_class[place])
                found.append(Finding("relabelled", image, int(objects[place]), row, most, more * most))
                told.add(place)
    found = [finding for finding in found if finding.weight >= LEAST[finding.kind]]
    return sorted(found, key=lambda finding: -finding.weight)


def rows(suspects: Suspects, matches: Matches, found: Sequence[Finding]) -> list[Sequence]:
    """The rows of `suspicious.csv`. `matches` are of the images that `suspects` names, in their order."""
    source = matches.source
    table: list[Sequence[Any]] = [COLUMNS]
    for place, finding in enumerate(found):
        *box, score, label = matches.rows[finding.detection].tolist()
        given = [""] * 5
        if finding.object >= 0:
            given = [source.classes[source.labels[finding.object]], *_rounded(source.boxes[finding.object].tolist())]
        numbers: tuple[Any, ...] = (
            f"{score:.4f}",
            f"{finding.overlap:.4f}",
            f"{suspects.losses[finding.image]:.6f}",
            suspects.seen[finding.image],
        )
        names = source.name(finding.image), finding.kind
        table.append((place + 1, *names, *given, source.classes[int(label)], *_rounded(box), *numbers))
    return table


def draw(suspects: Suspects, matches: Matches, found: Sequence[Finding], path: Path) -> None:
    """Draw a sheet of the most suspicious boxes."""
    looked = f"by the {len(matches.source):,} images with the largest losses of {suspects.audited:,}"
    headline = f"boxes that are likely wrong, {looked}" if found else f"no box looks wrong, {looked}"
    sheet([_cell(matches, finding) for finding in found[:SHOWN]], f"{run_of(path)}, training: {headline}", path)


def _rounded(box: list[float]) -> list[str]:
    return [f"{side:.2f}" for side in box]


def _cell(matches: Matches, finding: Finding) -> Cell:
    """The image, with the given box in orange and the suggested one in blue."""
    source, (*box, score, label) = matches.source, matches.rows[finding.detection].tolist()
    suggested = source.classes[int(label)]
    boxes = [(box, suggested, BLUE)]
    caption = f"{finding.kind}\n{short(suggested, 19)} {score:.2f}"
    if finding.object >= 0:
        name = source.classes[source.labels[finding.object]]
        boxes.insert(0, (source.boxes[finding.object].tolist(), name, ORANGE))
        caption = f"{finding.kind}\n{short(name, 12)} → {short(suggested, 12)} {score:.2f}"
    try:
        pixels = np.asarray(source.image(finding.image))
    except BrokenImage:
        pixels = np.zeros((*source.sizes[finding.image][::-1], 3), np.uint8)
    return Cell(pixels, caption, source.name(finding.image), boxes)
