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
from common.detection.data.file_stats import FileStats
from common.detection.data.image_headers import (
    compute_upright_sizes,
    read_file_headers,
    rotate_boxes,
)
from common.detection.data.masks import Masks, check_shapes
from common.errors import Refused
from common.randomness import mix

_ROUNDING = 1.0  # pixels beyond the image that are rounding errors
_SUSPICIOUS = 0.5  # share of boxes beyond their image, or unreadable images, to refuse data
_MAX_SHARE = 1.5  # corners up to this are shares of an image, not pixels
_DEFAULT_SIDE = 640  # pixels: sides of an image whose size is unknown
_UNKNOWN: Any = None


@dataclass(eq=False)
class RawBoxes:
    """The N images and M boxes of a data set as they were read; boxes in any order."""

    title: str  # for messages
    images: Any  # `Files`, `Table` or `Shards`
    classes: tuple[str, ...]
    image_indices: np.ndarray  # int64[M] the image of each box
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
    shapes: pa.StructArray | None = None  # M shapes in the same coordinates, if masks are requested
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
        for name, default in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        self.image_notes = Notes(self.title, "images")
        self.box_notes = Notes(self.title, "boxes")

    def note_images(self, change: str, is_changed: np.ndarray) -> None:
        """Count the images that are changed, bool[N]."""
        first = self.images.get_name(int(is_changed.argmax()))
        self.image_notes.change(change, first, is_changed.sum())

    def note_boxes(self, change: str, is_changed: np.ndarray) -> None:
        """Count the boxes that are changed, bool[M]."""
        self.box_notes.change(change, self.describe_first(is_changed), is_changed.sum())

    def describe_first(self, selected: np.ndarray) -> str:
        """The image and the corners of the first of the `selected` boxes, bool[M]."""
        box = int(selected.argmax())
        left, top, width, height = self.boxes[box].tolist()
        corners = f"{left:.6g}, {top:.6g}, {left + width:.6g}, {top + height:.6g}"
        image_name = self.images.get_name(int(self.image_indices[box]))
        return f"{image_name} with left, top, right, bottom {corners}"

    def describe_boxes(self, selected: np.ndarray, problem: str) -> str:
        """How many boxes are `selected` bool[M], what their problem is, and the first one."""
        first = self.describe_first(selected)
        return f"{selected.sum():,} of {len(selected):,} boxes {problem}, first {first}"

    def format_notes(self) -> tuple[str, ...]:
        """A line for each note. Raises `Refused` if most boxes would be left out."""
        image_notes = self.image_notes.format_lines(len(self.images))
        box_notes = self.box_notes.format_lines(len(self.boxes), "correct them")
        notes = tuple(self.notes) + image_notes + box_notes + tuple(self.file_notes)
        return tuple(f"{self.title}: {note}" for note in notes)

    def merge_files(self) -> None:
        """Let a file that is listed several times be one image, with the boxes of all its entries."""
        entries = self.images.paths.dictionary_encode().indices.to_numpy()
        first = np.unique(entries, return_index=True)[1]
        self.images = self.images.select(first)
        self.image_indices = entries[self.image_indices]
        self.image_ids = self.image_ids[first]
        self.sizes = self.sizes[first]
        self.note_images(
            "are listed several times, and have the boxes of all entries", np.bincount(entries) > 1
        )


def find_class_ids(
    title: str,
    images: Any,
    image_indices: np.ndarray,
    box_classes: pa.Array,
    classes: pa.Array,
) -> np.ndarray:
    """int64[M]: the index in `classes` of each box's class. Raises `Refused` for others.

    `image_indices` int64[M] are the boxes' images, for the message.
    """
    class_ids = pc.fill_null(pc.index_in(box_classes, value_set=classes), -1)
    class_ids = class_ids.to_numpy().astype(np.int64)
    is_unknown = class_ids < 0
    if is_unknown.any():
        box = int(is_unknown.argmax())
        image_name = images.get_name(int(image_indices[box]))
        class_names = ", ".join(str(name) for name in classes[:10].to_pylist())
        raise Refused(
            f"{title}: {is_unknown.sum():,} boxes of an unknown class, first of {image_name}: "
            f"{box_classes[box].as_py()}; the classes are {class_names}: correct or remove the "
            "boxes"
        )
    return class_ids


def check_files(raw: RawBoxes, stats: FileStats) -> AnnotatedImages:
    """Check boxes of files, and add the files to `stats`. Raises `Refused`, also if some are missing."""
    if len(raw.images):
        raw.merge_files()
    stats.add(raw.images.root, raw.images.paths)
    return check_boxes(raw, read_file_headers(raw.images.root, raw.images.paths))


def check_boxes(raw: RawBoxes, headers: np.ndarray) -> AnnotatedImages:
    """The annotations of the upright images. Raises `Refused`.

    `headers` int64[N, 4] are as `image_headers` reads them.
    """
    _refuse_unusable(raw)
    headers = _fill_unreadable(raw, headers)
    is_upright = _find_upright(raw, headers)
    sizes = compute_upright_sizes(headers)
    limits = np.tile(sizes[raw.image_indices], 2)
    boxes = raw.boxes * limits if raw.relative else raw.boxes
    rotated_boxes = rotate_boxes(boxes, headers[raw.image_indices])
    boxes = np.where(is_upright[raw.image_indices, None], boxes, rotated_boxes)
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    is_outside = _find_outside(raw, corners, limits)
    corners = np.clip(corners, 0, limits).astype(np.float32)
    sides = corners[:, 2:] - corners[:, :2]
    indices = _choose_boxes(raw, (sides <= 0).any(axis=1), is_outside)
    box_counts = np.bincount(raw.image_indices[indices], minlength=len(sizes))
    raw.note_images("have no boxes and are background", box_counts == 0)
    note = (
        f"have more than {MAX_DETECTIONS} boxes: up to {box_counts.max()} detections of a class "
        "count in each image"
    )
    raw.note_images(note, box_counts > MAX_DETECTIONS)
    has_area = np.isfinite(raw.areas) & (raw.areas >= 0)
    areas = np.where(has_area, raw.areas, sides.prod(axis=1))
    stored_sizes = np.where(is_upright[:, None], sizes, headers[:, :2])
    return AnnotatedImages(
        classes=raw.classes,
        category_ids=raw.category_ids,
        image_ids=raw.image_ids,
        sizes=sizes.astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(box_counts)]),
        boxes=corners[indices],
        labels=raw.labels[indices],
        crowd=raw.crowd[indices],
        areas=areas[indices],
        truth=boxes[indices],
        masks=_build_masks(raw, indices, stored_sizes, np.where(is_upright, 1, headers[:, 2])),
        notes=raw.format_notes(),
        images=raw.images,
        byte_counts=headers[:, 3],
    )


def _refuse_unusable(raw: RawBoxes) -> None:
    """Raise `Refused` for data without images, boxes or objects, or with invalid boxes."""
    if not len(raw.images):
        raise Refused(f"{raw.title}: no images in it; it needs at least one")
    if not len(raw.boxes):
        raise Refused(
            f"{raw.title}: no boxes in its {len(raw.images):,} images; annotate some of them"
        )
    is_missing = ~np.isfinite(raw.boxes.sum(axis=1))
    _refuse_boxes(raw, is_missing, "have a coordinate that is missing or no finite number")
    is_negative = raw.boxes[:, 2:].min(axis=1) < 0
    _refuse_boxes(raw, is_negative, "end before they begin (right < left or bottom < top)")
    if raw.crowd.all():
        raise Refused(
            f"{raw.title}: all of its {len(raw.boxes):,} boxes are crowds (iscrowd) or difficult, "
            "which are no objects to learn; correct the marks"
        )


def _refuse_boxes(raw: RawBoxes, is_wrong: np.ndarray, problem: str) -> None:
    if is_wrong.any():
        advice = "correct, remove or give them in another format"
        raise Refused(f"{raw.title}: {raw.describe_boxes(is_wrong, problem)}; {advice}")


def _find_outside(raw: RawBoxes, corners: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """bool[M]: True if a box with these `corners` [M, 4] reaches beyond its image.

    The image ends at `limits` [M, 4]. Raises `Refused` if so many boxes reach beyond it that the
    corners must mean something else.
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
    """int64[m]: the boxes that have an area and do not repeat another one, image by image.

    The others are noted.
    """
    columns = np.vstack([raw.image_indices, raw.labels, raw.crowd, raw.boxes.T])
    hashes = sum(mix(column.view(np.uint64), key) for key, column in enumerate(columns))
    # Objects of different outlines may have the same box.
    is_repeated = np.full(len(raw.boxes), raw.shapes is None)
    is_repeated[np.unique(hashes, return_index=True)[1]] = False
    first_empty = raw.describe_first(is_empty)
    raw.box_notes.leave_out("no area inside their image", first_empty, is_empty.sum())
    raw.note_boxes("reach beyond their image and are clipped", is_outside & ~is_empty)
    raw.note_boxes(
        "equal another one of their class and image, and are left out", is_repeated & ~is_empty
    )
    raw.note_boxes("are crowds or difficult, neither objects nor background", raw.crowd)
    indices = np.flatnonzero(~is_empty & ~is_repeated)
    return indices[np.argsort(raw.image_indices[indices], kind="stable")]


def _build_masks(
    raw: RawBoxes, indices: np.ndarray, sizes: np.ndarray, orientations: np.ndarray
) -> Masks | None:
    """The shapes of the boxes `indices`, null if one can't be drawn; None if boxes have no shapes.

    `sizes` int64[N, 2] and `orientations` int64[N] are of the images as they are stored.
    """
    if raw.shapes is None:
        return None
    shapes = raw.shapes.take(pa.array(indices))
    shapes, is_wrong = check_shapes(shapes, sizes[raw.image_indices[indices]])
    if is_wrong.all():
        raise Refused(
            f"{raw.title}: none of its {len(indices):,} objects has an outline (segmentation) for "
            "masks; add them, or choose a detector of boxes"
        )
    is_replaced = np.isin(np.arange(len(raw.boxes)), indices[is_wrong])
    raw.note_boxes("have no outline that can be drawn, and their box stands in", is_replaced)
    return Masks(shapes=shapes, orientations=orientations.astype(np.uint8))


def _fill_unreadable(raw: RawBoxes, headers: np.ndarray) -> np.ndarray:
    """Headers in which an unreadable image has the annotated size, or a default."""
    is_unreadable = headers[:, 0] == 0
    if not is_unreadable.any():
        return headers
    raw.note_images("can't be read", is_unreadable)
    if is_unreadable.mean() > _SUSPICIOUS:
        note = raw.image_notes.format_lines(len(headers))[-1]
        raise Refused(f"{raw.title}: {note}; mend them, or correct the paths")
    is_allowed = raw.sizes.prod(axis=1, dtype=np.float64) <= MAX_PIXELS
    has_size = (raw.sizes > 0).all(axis=1) & is_allowed
    sizes = np.where(has_size[:, None], raw.sizes, _DEFAULT_SIDE)
    headers = np.where(is_unreadable[:, None], 1, headers)
    headers[is_unreadable, :2] = sizes[is_unreadable]
    return headers


def _find_upright(raw: RawBoxes, headers: np.ndarray) -> np.ndarray:
    """bool[N]: True if an image's boxes refer to the upright image and not to the stored one.

    The annotated size of an image that lies on its side says it. If it can't (no size, a square, an
    image upside down), the other images of the data decide.
    """
    as_stored = (headers[:, :2] == raw.sizes).all(axis=1)
    as_upright = (compute_upright_sizes(headers) == raw.sizes).all(axis=1)
    is_wrong = (raw.sizes > 0).all(axis=1) & ~as_stored & ~as_upright
    if is_wrong.any():
        index = int(is_wrong.argmax())
        annotated_width, annotated_height = raw.sizes[index].tolist()
        width, height = compute_upright_sizes(headers)[index].tolist()
        raise Refused(
            f"{raw.title}: {is_wrong.sum():,} of {len(headers):,} images have another size than "
            f"annotated, first {raw.images.get_name(index)}: {annotated_width} x {annotated_height} in "
            f"the annotations, {width} x {height} in the file; boxes would miss their objects"
        )
    is_rotated = headers[:, 2] != 1
    is_certain = is_rotated & (as_stored != as_upright)
    default = raw.upright
    if is_certain.any():
        default = as_upright[is_certain].mean() > 0.5
    is_upright = np.where(is_certain, as_upright, default)
    num_with_boxes = (is_rotated & ~is_upright).sum()
    raw.note_images(
        f"are rotated by their EXIF tag, and the boxes of {num_with_boxes:,} with them", is_rotated
    )
    return is_upright
