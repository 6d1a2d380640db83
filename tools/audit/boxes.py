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
from common.run.plots import BLUE, ORANGE, Cell, draw_cells, get_run_name, shorten_name

SAME_IOU = 0.7  # from this overlap on, a detection is at the place of a box
APART_IOU = 0.2  # below this overlap, a detection is of something else
# Weight from which a suspect is worth a look.
MIN_WEIGHTS = {"missing": 0.2, "moved": 0.2, "relabelled": 0.1}
# Weight from which a box is likely wrong: docs/after_training.md.
LIKELY_WEIGHTS = {"missing": 0.2, "moved": 0.35, "relabelled": 0.4}
MAX_PICTURES = 24  # on the sheet
_SIDES = ("left", "top", "right", "bottom")
_SUGGESTED_SIDES = tuple(f"suggested_{side}" for side in _SIDES)
COLUMNS = (
    ("rank", "verdict", "image", "kind", "label")
    + _SIDES
    + ("suggested",)
    + _SUGGESTED_SIDES
    + ("score", "overlap")
)


class Suspect(NamedTuple):
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
        return self.weight >= LIKELY_WEIGHTS[self.kind]


class Suspects(NamedTuple):
    """Boxes that the model contradicts, and the matches that they refer to."""

    matches: Matches
    boxes: list[Suspect]


def find_suspects(
    source: Annotated, predictions: Iterable[tuple], _device: torch.device
) -> Suspects | None:
    """Find the contradicted boxes of `source`, from the detections in all its images. A collective.

    Returns None on all processes but the main one.
    """
    detections = Detections()
    for batch, detected in predictions:
        detections.update(batch.positions.tolist(), detected)
    detections.results(source)  # gathers and matches them
    if not is_main():
        return None
    return Suspects(detections.matches, list_suspects(detections.matches))


def list_suspects(matches: Matches) -> list[Suspect]:
    """Boxes that good detections contradict, one for each object; likely wrong ones first."""
    suspects = []
    for image in range(len(matches.source)):
        for suspect in _check_image(matches, image):
            if suspect.weight >= MIN_WEIGHTS[suspect.kind]:
                suspects.append(suspect)
    return sorted(suspects, key=lambda suspect: (not suspect.is_likely, -suspect.weight))


def _check_image(matches: Matches, image: int) -> list[Suspect]:
    source = matches.source
    rows = matches.get_detections(image, only_confident=False)
    rows = rows[matches.hit_objects[rows] != IN_CROWD]
    objects = np.arange(source.offsets[image], source.offsets[image + 1])
    objects = objects[~source.crowd[objects]]
    boxes = torch.from_numpy(matches.detections[rows, :4].astype(np.float64))
    object_boxes = torch.from_numpy(source.boxes[objects][:, :4].astype(np.float64))
    overlaps = box_iou(boxes, object_boxes).nan_to_num().numpy()
    is_same_class = matches.detections[rows, 5][:, None] == source.labels[objects]
    scores = matches.detections[rows, 4]
    # The best score with which any detection confirms each object's class.
    is_at_box = is_same_class * (overlaps >= IOU)
    class_scores = (scores[:, None] * is_at_box).max(0, initial=0)

    num_good = int(matches.is_confident[rows].sum())  # rows are best first
    boxes = boxes[:num_good]
    overlaps = overlaps[:num_good]
    is_same_class = is_same_class[:num_good]
    is_confirmed = (overlaps * is_same_class >= SAME_IOU).any(0)
    # Of detections at one place, only the best may report that a box is missing.
    is_first = ~np.triu(box_iou(boxes, boxes).numpy() >= IOU, 1).any(0)

    suspects = []
    reported: set[int] = set()  # objects, each of which is reported once
    for i, row in enumerate(rows[:num_good].tolist()):
        score = float(matches.detections[row, 4])
        overlap = float(overlaps[i].max(initial=0))
        if overlap < APART_IOU:
            if is_first[i]:
                weight = score * (1 - overlap)
                suspects.append(Suspect("missing", image, -1, row, overlap, weight))
            continue
        nearest = int(overlaps[i].argmax())
        if nearest in reported or (overlaps[i] * is_same_class[i] >= SAME_IOU).any():
            continue
        object_row = int(objects[nearest])
        if is_same_class[i, nearest]:
            if not is_confirmed[nearest]:
                weight = score * (1 - overlap)
                suspects.append(Suspect("moved", image, object_row, row, overlap, weight))
                reported.add(nearest)
        elif overlap >= IOU:
            weight = (score - float(class_scores[nearest])) * overlap
            suspects.append(Suspect("relabelled", image, object_row, row, overlap, weight))
            reported.add(nearest)
    return suspects


def build_table(source: Annotated, suspects: Suspects) -> list[Sequence]:
    """The rows of `suspicious.csv`."""
    table: list[Sequence[Any]] = [COLUMNS]
    for rank, suspect in enumerate(suspects.boxes, start=1):
        *box, score, class_id = suspects.matches.detections[suspect.detection].tolist()
        label = [""] * 5
        if suspect.object >= 0:
            name = source.classes[source.labels[suspect.object]]
            label = [name] + _round_box(source.boxes[suspect.object].tolist())
        row = [
            rank,
            "likely wrong" if suspect.is_likely else "worth a look",
            source.get_name(suspect.image),
            suspect.kind,
        ]
        suggestion = [source.classes[int(class_id)]] + _round_box(box)
        table.append(row + label + suggestion + [f"{score:.4f}", f"{suspect.overlap:.4f}"])
    return table


def draw_sheet(source: Annotated, suspects: Suspects, path: Path) -> None:
    """Draw a sheet of the most suspicious boxes."""
    cells = [_build_cell(suspects.matches, suspect) for suspect in suspects.boxes[:MAX_PICTURES]]
    draw_cells(cells, f"{get_run_name(path)}, training: {summarize(source, suspects)}", path)


def summarize(source: Annotated, suspects: Suspects) -> str:
    """Summarize the result in a sentence."""
    num_likely = sum(suspect.is_likely for suspect in suspects.boxes)
    text = f"{num_likely:,} boxes are likely wrong" if num_likely else "no box is likely wrong"
    num_others = len(suspects.boxes) - num_likely
    return f"{text}, {num_others:,} are worth a look, in {len(source):,} images"


def _round_box(box: list[float]) -> list[str]:
    return [f"{side:.2f}" for side in box]


def _build_cell(matches: Matches, suspect: Suspect) -> Cell:
    """The image, with the box of the annotations in orange and the suggested one in blue."""
    source = matches.source
    *box, score, class_id = matches.detections[suspect.detection].tolist()
    suggested = source.classes[int(class_id)]
    boxes = [(box, suggested, BLUE)]
    kind = suspect.kind if suspect.is_likely else f"{suspect.kind}?"
    caption = f"{kind}\n{shorten_name(suggested, 19)} {score:.2f}"
    if suspect.object >= 0:
        name = source.classes[source.labels[suspect.object]]
        boxes.insert(0, (source.boxes[suspect.object].tolist(), name, ORANGE))
        caption = f"{kind}\n{shorten_name(name, 12)} → {shorten_name(suggested, 12)} {score:.2f}"
    image = np.asarray(read_image(source, suspect.image))
    return Cell(image, caption, source.get_name(suspect.image), boxes)
