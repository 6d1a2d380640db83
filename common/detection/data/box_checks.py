"""Checks of boxes on loading: which can be trained on, and where they lie in the upright images."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.data.images import MAX_PIXELS
from common.data.notes import Notes
from common.detection.data.annotated import MAX_DETECTIONS, AnnotatedImages
from common.detection.data.image_headers import headers_of_files, turned, upright_sizes
from common.detection.data.masks import Masks, checked
from common.detection.data.stamps import Stamps
from common.errors import Refused
from common.randomness import mix

_ROUNDING = 1.0  # pixels beyond the image that are rounding errors
_SUSPICIOUS = 0.5  # share of boxes beyond their image, or unreadable images, to refuse data
_MAX_SHARE = 1.5  # corners up to this are shares of an image, not pixels
_STAND_IN = 640  # pixels: sides of an image whose size is unknown
_unknown: Any = partial(np.zeros, 0)


@dataclass(eq=False)
class FoundBoxes:
    """The N images and M boxes of a data set as they were read; boxes in any order. `notes`: what was changed."""

    title: str  # for messages
    images: Any  # `Files`, `Table` or `Shards`
    classes: tuple[str, ...]
    rows: np.ndarray  # int64[M] the image of each box
    boxes: np.ndarray  # float64[M, 4] left, top, width, height in pixels, or in shares if `relative`
    labels: np.ndarray  # int64[M]
    category_ids: np.ndarray = field(default_factory=_unknown)  # int64[K]; default: from 0 up
    image_ids: np.ndarray = field(default_factory=_unknown)  # int64[N]; default: from 0 up
    sizes: np.ndarray = field(default_factory=_unknown)  # int64[N, 2] width and height; 0 if unknown
    crowd: np.ndarray = field(default_factory=_unknown)  # bool[M]; default: none is
    areas: np.ndarray = field(default_factory=_unknown)  # float64[M]; NaN if unknown
    upright: bool = False  # True if boxes are of the upright image where sizes can't tell
    relative: bool = False  # True if boxes are shares of the upright image
    shapes: pa.StructArray | None = None  # M shapes in the same coordinates, if masks are asked for

    def __post_init__(self) -> None:
        defaults = {
            "category_ids": np.arange(len(self.classes)),
            "image_ids": np.arange(len(self.images)),
            "sizes": np.zeros((len(self.images), 2), np.int64),
            "crowd": np.zeros(len(self.boxes), bool),
            "areas": np.full(len(self.boxes), np.nan),
        }
        vars(self).update({name: default for name, default in defaults.items() if not len(getattr(self, name))})
        self.notes: list[str] = []
        self.image_notes = Notes(self.title, "images")
        self.box_notes = Notes(self.title, "boxes")

    def note_images(self, change: str, chosen: np.ndarray) -> None:
        """Count the images that are `chosen` bool[N]."""
        self.image_notes.change(change, self.images.name(int(chosen.argmax())), chosen.sum())

    def note_boxes(self, change: str, chosen: np.ndarray) -> None:
        """Count the boxes that are `chosen` bool[M]."""
        self.box_notes.change(change, self.first_box(chosen), chosen.sum())

    def first_box(self, chosen: np.ndarray) -> str:
        """The first of the boxes that are `chosen` bool[M]."""
        box = int(chosen.argmax())
        left, top, width, height = self.boxes[box].tolist()
        corners = ", ".join(f"{value:.6g}" for value in (left, top, left + width, top + height))
        return f"{self.images.name(int(self.rows[box]))} with left, top, right, bottom {corners}"

    def told(self, chosen: np.ndarray, what: str) -> str:
        """The number of boxes that are `chosen` bool[M], `what` they do, and the first one."""
        return f"{chosen.sum():,} of {len(chosen):,} boxes {what}, first {self.first_box(chosen)}"

    def merge_files(self) -> None:
        """Let a file that is listed several times be one image, with the boxes of all its entries."""
        entries = self.images.paths.dictionary_encode().indices.to_numpy()
        first = np.unique(entries, return_index=True)[1]
        self.images = self.images.select(first)
        self.rows = entries[self.rows]
        self.image_ids = self.image_ids[first]
        self.sizes = self.sizes[first]
        self.note_images("are listed several times, and have the boxes of all entries", np.bincount(entries) > 1)


def class_ids(title: str, images: Any, rows: np.ndarray, values: pa.Array, known: pa.Array) -> np.ndarray:
    """int64[M]: the place in `known` of each box's class in `values`. Raises `Refused` for others."""
    found = pc.fill_null(pc.index_in(values, value_set=known), -1).to_numpy().astype(np.int64)
    if (unknown := found < 0).any():
        box = int(unknown.argmax())
        raise Refused(
            f"{title}: {unknown.sum():,} boxes of an unknown class, first of {images.name(int(rows[box]))}: "
            f"{values[box].as_py()}; the classes are {', '.join(map(str, known[:10].to_pylist()))}: correct or remove the boxes"
        )
    return found


def check_files(found: FoundBoxes, stamps: Stamps) -> AnnotatedImages:
    """As `check`, of files, which `stamps` has then looked at. Raises `Refused` if some are missing, too."""
    if len(found.images):
        found.merge_files()
    stamps.take(found.images.root, found.images.paths)
    return check(found, headers_of_files(found.images.root, found.images.paths))


def check(found: FoundBoxes, headers: np.ndarray) -> AnnotatedImages:
    """The annotations of the upright images; `headers` int64[N, 4] as `image_headers` reads them. Raises `Refused`."""
    if not len(found.images):
        raise Refused(f"{found.title}: no images in it; it needs at least one")
    if not len(found.boxes):
        raise Refused(f"{found.title}: no boxes in its {len(found.images):,} images; annotate some of them")
    for wrong, what in (
        (~np.isfinite(found.boxes.sum(axis=1)), "have a coordinate that is missing or no finite number"),
        (found.boxes[:, 2:].min(axis=1) < 0, "end before they begin (right < left or bottom < top)"),
    ):
        if wrong.any():
            advice = "correct, remove or give them in another format"
            raise Refused(f"{found.title}: {found.told(wrong, what)}; {advice}")
    if found.crowd.all():
        raise Refused(
            f"{found.title}: all of its {len(found.boxes):,} boxes are crowds (iscrowd) or difficult, which are no objects "
            "to learn; correct the marks"
        )
    headers = _without_gaps(found, headers)
    is_upright = _refer_to_upright(found, headers)
    sizes = upright_sizes(headers)
    limits = np.tile(sizes[found.rows], 2)
    boxes = found.boxes * limits if found.relative else found.boxes
    boxes = np.where(is_upright[found.rows, None], boxes, turned(boxes, headers[found.rows]))

    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    is_share = np.abs(corners).max(axis=1) <= _MAX_SHARE
    if not found.relative and is_share.mean() > _SUSPICIOUS:
        raise Refused(
            f"{found.title}: {found.told(is_share, 'are in shares of the image (0 to 1)')}; give them in pixels, "
            "that is multiplied by its width and height"
        )
    outside = np.maximum(-corners, corners - limits).max(axis=1) > _ROUNDING
    if outside.mean() > _SUSPICIOUS:
        raise Refused(
            f"{found.title}: {found.told(outside, 'reach beyond their image')}; they are in another format (corners or width "
            "and height, pixels or shares) or of images of another size"
        )
    corners = np.clip(corners, 0, limits).astype(np.float32)
    spans = corners[:, 2:] - corners[:, :2]
    empty = (spans <= 0).any(axis=1)
    columns = np.vstack([found.rows, found.labels, found.crowd, found.boxes.T])
    hashes = sum(mix(column.view(np.uint64), key) for key, column in enumerate(columns))
    is_repeated = np.full(len(boxes), found.shapes is None)  # objects of different outlines may have the same box
    is_repeated[np.unique(hashes, return_index=True)[1]] = False
    found.box_notes.leave_out("no area inside their image", found.first_box(empty), empty.sum())
    found.note_boxes("reach beyond their image and are clipped", outside & ~empty)
    found.note_boxes("equal another one of their class and image, and are left out", is_repeated & ~empty)
    found.note_boxes("are crowds or difficult, neither objects nor background", found.crowd)
    kept = np.flatnonzero(~empty & ~is_repeated)
    kept = kept[np.argsort(found.rows[kept], kind="stable")]
    counts = np.bincount(found.rows[kept], minlength=len(sizes))
    found.note_images("have no boxes and are background", counts == 0)
    areas = np.where(np.isfinite(found.areas) & (found.areas >= 0), found.areas, spans.prod(axis=1))
    masks = None
    if found.shapes is not None:
        frames = np.where(is_upright[:, None], sizes, headers[:, :2])[found.rows[kept]]
        shapes = _shapes(found, found.shapes.take(pa.array(kept)), kept, frames)
        masks = Masks(shapes, np.where(is_upright, 1, headers[:, 2]).astype(np.uint8))
    many = f"have more than {MAX_DETECTIONS} boxes: up to {counts.max()} detections of a class count in each image"
    found.note_images(many, counts > MAX_DETECTIONS)
    notes = found.notes + [*found.image_notes.texts(len(sizes)), *found.box_notes.texts(len(boxes), "correct them")]
    return AnnotatedImages(
        found.classes,
        found.category_ids,
        found.image_ids,
        sizes.astype(np.int32),
        np.concatenate([[0], np.cumsum(counts)]),
        corners[kept],
        found.labels[kept],
        found.crowd[kept],
        areas[kept],
        truth=boxes[kept],
        masks=masks,
        notes=tuple(f"{found.title}: {note}" for note in notes),
        images=found.images,
        byte_counts=headers[:, 3],
    )


def _shapes(found: FoundBoxes, shapes: pa.StructArray, kept: np.ndarray, frames: np.ndarray) -> pa.StructArray:
    """The shapes of the boxes `kept`, null if one can't be drawn. `frames`: sizes of their images."""
    shapes, wrong = checked(shapes, frames)
    if wrong.all():
        raise Refused(
            f"{found.title}: none of its {len(kept):,} objects has an outline (segmentation) for masks; add them, or choose a "
            "detector of boxes"
        )
    chosen = np.isin(np.arange(len(found.rows)), kept[wrong])
    found.note_boxes("have no outline that can be drawn, and their box stands in", chosen)
    return shapes


def _without_gaps(found: FoundBoxes, headers: np.ndarray) -> np.ndarray:
    """Headers in which an unreadable image has the annotated size, or another that stands in."""
    unreadable = headers[:, 0] == 0
    if not unreadable.any():
        return headers
    found.note_images("can't be read", unreadable)
    if unreadable.mean() > _SUSPICIOUS:
        count = found.image_notes.texts(len(headers))[-1]
        raise Refused(f"{found.title}: {count}; mend them, or correct the paths")
    is_size = (found.sizes > 0).all(axis=1) & (found.sizes.prod(axis=1, dtype=np.float64) <= MAX_PIXELS)
    headers = np.where(unreadable[:, None], 1, headers)
    headers[unreadable, :2] = np.where(is_size[:, None], found.sizes, _STAND_IN)[unreadable]
    return headers


def _refer_to_upright(found: FoundBoxes, headers: np.ndarray) -> np.ndarray:
    """bool[N]: True if an image's boxes refer to the upright image and not to the stored one.

    The annotated size of an image that lies on its side says it. If it can't (no size, a square, an image
    upside down), the other images of the data decide.
    """
    as_stored = (headers[:, :2] == found.sizes).all(axis=1)
    as_upright = (upright_sizes(headers) == found.sizes).all(axis=1)
    if (wrong := (found.sizes > 0).all(axis=1) & ~as_stored & ~as_upright).any():
        row = int(wrong.argmax())
        said, real = (" x ".join(map(str, size[row].tolist())) for size in (found.sizes, upright_sizes(headers)))
        raise Refused(
            f"{found.title}: {wrong.sum():,} of {len(headers):,} images have another size than annotated, first "
            f"{found.images.name(row)}: {said} in the annotations, {real} in the file; boxes would miss their objects"
        )
    is_rotated = headers[:, 2] != 1
    votes = is_rotated & (as_stored != as_upright)
    default = as_upright[votes].mean() > 0.5 if votes.any() else found.upright
    is_upright = np.where(votes, as_upright, default)
    count = (is_rotated & ~is_upright).sum()
    found.note_images(f"are rotated by their EXIF tag, and the boxes of {count:,} with them", is_rotated)
    return is_upright
