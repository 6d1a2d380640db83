"""Checks of boxes on loading: which can be trained on, and where they lie in the upright images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.data.images import MAX_PIXELS
from common.data.notes import Notes
from common.detection.data.annotated import MAX_DETECTIONS, AnnotatedImages
from common.detection.data.image_headers import headers_of_files, rotate_boxes, upright_sizes
from common.detection.data.masks import Masks, check_shapes
from common.detection.data.stamps import Stamps
from common.errors import Refused
from common.randomness import mix

_ROUNDING = 1.0  # pixels beyond the image that are rounding errors
_SUSPICIOUS = 0.5  # share of boxes beyond their image, or unreadable images, to refuse data
_MAX_SHARE = 1.5  # corners up to this are shares of an image, not pixels
_STAND_IN = 640  # pixels: sides of an image whose size is unknown
_UNKNOWN: Any = None


@dataclass(eq=False)
class RawBoxes:
    """The N images and M boxes of a data set as they were read; boxes in any order."""

    title: str  # for messages
    images: Any  # `Files`, `Table` or `Shards`
    classes: tuple[str, ...]
    rows: np.ndarray  # int64[M] the image of each box
    # float64[M, 4] left, top, width, height in pixels, or in shares if `relative`
    boxes: np.ndarray
    labels: np.ndarray  # int64[M]
    category_ids: np.ndarray = _UNKNOWN  # int64[K]; default: from 0 up
    image_ids: np.ndarray = _UNKNOWN  # int64[N]; default: from 0 up
    sizes: np.ndarray = _UNKNOWN  # int64[N, 2] width and height; 0 if unknown
    crowd: np.ndarray = _UNKNOWN  # bool[M]; default: none is
    areas: np.ndarray = _UNKNOWN  # float64[M]; NaN if unknown
    upright: bool = False  # True if boxes are of the upright image where sizes can't tell
    relative: bool = False  # True if boxes are shares of the upright image
    shapes: pa.StructArray | None = None  # M shapes in the same coordinates, if masks are asked for
    notes: Sequence[str] = ()  # what reading has corrected or left out
    file_notes: Sequence[str] = ()  # the same of files; they come last

    def __post_init__(self) -> None:
        defaults = {
            "category_ids": np.arange(len(self.classes)),
            "image_ids": np.arange(len(self.images)),
            "sizes": np.zeros((len(self.images), 2), np.int64),
            "crowd": np.zeros(len(self.boxes), bool),
            "areas": np.full(len(self.boxes), np.nan),
        }
        vars(self).update(
            {name: default for name, default in defaults.items() if getattr(self, name) is None}
        )
        self.image_notes = Notes(self.title, "images")
        self.box_notes = Notes(self.title, "boxes")

    def note_images(self, change: str, chosen: np.ndarray) -> None:
        """Count the images that are `chosen` bool[N]."""
        self.image_notes.change(change, self.images.name(int(chosen.argmax())), chosen.sum())

    def note_boxes(self, change: str, chosen: np.ndarray) -> None:
        """Count the boxes that are `chosen` bool[M]."""
        self.box_notes.change(change, self.name_first(chosen), chosen.sum())

    def name_first(self, chosen: np.ndarray) -> str:
        """The first of the boxes that are `chosen` bool[M]."""
        box = int(chosen.argmax())
        left, top, width, height = self.boxes[box].tolist()
        corners = ", ".join(f"{value:.6g}" for value in (left, top, left + width, top + height))
        return f"{self.images.name(int(self.rows[box]))} with left, top, right, bottom {corners}"

    def describe_boxes(self, chosen: np.ndarray, what: str) -> str:
        """The number of boxes that are `chosen` bool[M], `what` they do, and the first one."""
        return f"{chosen.sum():,} of {len(chosen):,} boxes {what}, first {self.name_first(chosen)}"

    def format_notes(self) -> tuple[str, ...]:
        """A line for each note. Raises `Refused` if most boxes would be left out."""
        image_notes = self.image_notes.format_lines(len(self.images))
        box_notes = self.box_notes.format_lines(len(self.boxes), "correct them")
        return tuple(
            f"{self.title}: {note}"
            for note in (*self.notes, *image_notes, *box_notes, *self.file_notes)
        )

    def merge_files(self) -> None:
        """Let a file that is listed several times be one image, with the boxes of all its entries."""
        entries = self.images.paths.dictionary_encode().indices.to_numpy()
        first = np.unique(entries, return_index=True)[1]
        self.images = self.images.select(first)
        self.rows = entries[self.rows]
        self.image_ids = self.image_ids[first]
        self.sizes = self.sizes[first]
        self.note_images(
            "are listed several times, and have the boxes of all entries", np.bincount(entries) > 1
        )


def find_class_ids(
    title: str, images: Any, rows: np.ndarray, values: pa.Array, known: pa.Array
) -> np.ndarray:
    """int64[M]: the index in `known` of each box's class in `values`. Raises `Refused` for others."""
    class_ids = pc.fill_null(pc.index_in(values, value_set=known), -1).to_numpy().astype(np.int64)
    is_unknown = class_ids < 0
    if is_unknown.any():
        box = int(is_unknown.argmax())
        classes = ", ".join(map(str, known[:10].to_pylist()))
        raise Refused(
            f"{title}: {is_unknown.sum():,} boxes of an unknown class, first of "
            f"{images.name(int(rows[box]))}: {values[box].as_py()}; the classes are {classes}: "
            "correct or remove the boxes"
        )
    return class_ids


def check_files(raw: RawBoxes, stamps: Stamps) -> AnnotatedImages:
    """As `check`, of files, which `stamps` has then looked at. Raises `Refused` if some are missing, too."""
    if len(raw.images):
        raw.merge_files()
    stamps.take(raw.images.root, raw.images.paths)
    return check(raw, headers_of_files(raw.images.root, raw.images.paths))


def check(raw: RawBoxes, headers: np.ndarray) -> AnnotatedImages:
    """The annotations of the upright images; `headers` int64[N, 4] as `image_headers` reads them.
    Raises `Refused`.
    """
    _refuse_unusable(raw)
    headers = _fill_gaps(raw, headers)
    is_upright = _find_upright(raw, headers)
    sizes = upright_sizes(headers)
    limits = np.tile(sizes[raw.rows], 2)
    boxes = raw.boxes * limits if raw.relative else raw.boxes
    boxes = np.where(is_upright[raw.rows, None], boxes, rotate_boxes(boxes, headers[raw.rows]))
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    is_outside = _find_outside(raw, corners, limits)
    corners = np.clip(corners, 0, limits).astype(np.float32)
    spans = corners[:, 2:] - corners[:, :2]
    indices = _choose_boxes(raw, (spans <= 0).any(axis=1), is_outside)
    counts = np.bincount(raw.rows[indices], minlength=len(sizes))
    raw.note_images("have no boxes and are background", counts == 0)
    many = (
        f"have more than {MAX_DETECTIONS} boxes: up to {counts.max()} detections of a class count "
        "in each image"
    )
    raw.note_images(many, counts > MAX_DETECTIONS)
    areas = np.where(np.isfinite(raw.areas) & (raw.areas >= 0), raw.areas, spans.prod(axis=1))
    masks = None
    if raw.shapes is not None:
        frames = np.where(is_upright[:, None], sizes, headers[:, :2])[raw.rows[indices]]
        shapes = _check_shapes(raw, raw.shapes.take(pa.array(indices)), indices, frames)
        masks = Masks(shapes, np.where(is_upright, 1, headers[:, 2]).astype(np.uint8))
    return AnnotatedImages(
        classes=raw.classes,
        category_ids=raw.category_ids,
        image_ids=raw.image_ids,
        sizes=sizes.astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        boxes=corners[indices],
        labels=raw.labels[indices],
        crowd=raw.crowd[indices],
        areas=areas[indices],
        truth=boxes[indices],
        masks=masks,
        notes=raw.format_notes(),
        images=raw.images,
        byte_counts=headers[:, 3],
    )


def _refuse_unusable(raw: RawBoxes) -> None:
    """Raise `Refused` for data without images, boxes or objects, or with boxes that are none."""
    if not len(raw.images):
        raise Refused(f"{raw.title}: no images in it; it needs at least one")
    if not len(raw.boxes):
        raise Refused(
            f"{raw.title}: no boxes in its {len(raw.images):,} images; annotate some of them"
        )
    for is_wrong, problem in (
        (
            ~np.isfinite(raw.boxes.sum(axis=1)),
            "have a coordinate that is missing or no finite number",
        ),
        (raw.boxes[:, 2:].min(axis=1) < 0, "end before they begin (right < left or bottom < top)"),
    ):
        if is_wrong.any():
            advice = "correct, remove or give them in another format"
            raise Refused(f"{raw.title}: {raw.describe_boxes(is_wrong, problem)}; {advice}")
    if raw.crowd.all():
        raise Refused(
            f"{raw.title}: all of its {len(raw.boxes):,} boxes are crowds (iscrowd) or difficult, "
            "which are no objects to learn; correct the marks"
        )


def _find_outside(raw: RawBoxes, corners: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """bool[M]: True if a box with these `corners` [M, 4] reaches beyond its image, which ends at
    `limits` [M, 4].

    Raises `Refused` if so many do that the corners must mean something else.
    """
    is_share = np.abs(corners).max(axis=1) <= _MAX_SHARE
    if not raw.relative and is_share.mean() > _SUSPICIOUS:
        raise Refused(
            f"{raw.title}: {raw.describe_boxes(is_share, 'are in shares of the image (0 to 1)')}; "
            "give them in pixels, that is multiplied by its width and height"
        )
    is_outside = np.maximum(-corners, corners - limits).max(axis=1) > _ROUNDING
    if is_outside.mean() > _SUSPICIOUS:
        raise Refused(
            f"{raw.title}: {raw.describe_boxes(is_outside, 'reach beyond their image')}; they are "
            "in another format (corners or width and height, pixels or shares) or of images of "
            "another size"
        )
    return is_outside


def _choose_boxes(raw: RawBoxes, is_empty: np.ndarray, is_outside: np.ndarray) -> np.ndarray:
    """int64[m]: the boxes that have an area and do not repeat another one, image by image; the
    others are noted.
    """
    columns = np.vstack([raw.rows, raw.labels, raw.crowd, raw.boxes.T])
    hashes = sum(mix(column.view(np.uint64), key) for key, column in enumerate(columns))
    # Objects of different outlines may have the same box.
    is_repeated = np.full(len(raw.boxes), raw.shapes is None)
    is_repeated[np.unique(hashes, return_index=True)[1]] = False
    raw.box_notes.leave_out("no area inside their image", raw.name_first(is_empty), is_empty.sum())
    raw.note_boxes("reach beyond their image and are clipped", is_outside & ~is_empty)
    raw.note_boxes(
        "equal another one of their class and image, and are left out", is_repeated & ~is_empty
    )
    raw.note_boxes("are crowds or difficult, neither objects nor background", raw.crowd)
    indices = np.flatnonzero(~is_empty & ~is_repeated)
    return indices[np.argsort(raw.rows[indices], kind="stable")]


def _check_shapes(
    raw: RawBoxes, shapes: pa.StructArray, kept: np.ndarray, frames: np.ndarray
) -> pa.StructArray:
    """The shapes of the boxes `kept`, null if one can't be drawn. `frames`: sizes of their images."""
    shapes, wrong = check_shapes(shapes, frames)
    if wrong.all():
        raise Refused(
            f"{raw.title}: none of its {len(kept):,} objects has an outline (segmentation) for "
            "masks; add them, or choose a detector of boxes"
        )
    chosen = np.isin(np.arange(len(raw.rows)), kept[wrong])
    raw.note_boxes("have no outline that can be drawn, and their box stands in", chosen)
    return shapes


def _fill_gaps(raw: RawBoxes, headers: np.ndarray) -> np.ndarray:
    """Headers in which an unreadable image has the annotated size, or another that stands in."""
    unreadable = headers[:, 0] == 0
    if not unreadable.any():
        return headers
    raw.note_images("can't be read", unreadable)
    if unreadable.mean() > _SUSPICIOUS:
        count = raw.image_notes.format_lines(len(headers))[-1]
        raise Refused(f"{raw.title}: {count}; mend them, or correct the paths")
    is_size = (raw.sizes > 0).all(axis=1) & (raw.sizes.prod(axis=1, dtype=np.float64) <= MAX_PIXELS)
    headers = np.where(unreadable[:, None], 1, headers)
    headers[unreadable, :2] = np.where(is_size[:, None], raw.sizes, _STAND_IN)[unreadable]
    return headers


def _find_upright(raw: RawBoxes, headers: np.ndarray) -> np.ndarray:
    """bool[N]: True if an image's boxes refer to the upright image and not to the stored one.

    The annotated size of an image that lies on its side says it. If it can't (no size, a square, an
    image upside down), the other images of the data decide.
    """
    as_stored = (headers[:, :2] == raw.sizes).all(axis=1)
    as_upright = (upright_sizes(headers) == raw.sizes).all(axis=1)
    is_wrong = (raw.sizes > 0).all(axis=1) & ~as_stored & ~as_upright
    if is_wrong.any():
        row = int(is_wrong.argmax())
        annotated_width, annotated_height = raw.sizes[row].tolist()
        width, height = upright_sizes(headers)[row].tolist()
        raise Refused(
            f"{raw.title}: {is_wrong.sum():,} of {len(headers):,} images have another size than "
            f"annotated, first {raw.images.name(row)}: {annotated_width} x {annotated_height} in "
            f"the annotations, {width} x {height} in the file; boxes would miss their objects"
        )
    is_rotated = headers[:, 2] != 1
    votes = is_rotated & (as_stored != as_upright)
    default = as_upright[votes].mean() > 0.5 if votes.any() else raw.upright
    is_upright = np.where(votes, as_upright, default)
    count = (is_rotated & ~is_upright).sum()
    raw.note_images(
        f"are rotated by their EXIF tag, and the boxes of {count:,} with them", is_rotated
    )
    return is_upright
