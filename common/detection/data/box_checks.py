"""Checks of boxes: which can be trained on, and where they lie in the upright images.

Boxes are checked once, on loading: what is corrected or left out is counted and named, and what
looks like another format is refused.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from common.data.images import MAX_PIXELS
from common.detection.data.annotated import AnnotatedImages
from common.detection.data.image_headers import headers_of_files, turned, upright_sizes
from common.detection.data.masks import Masks, checked
from common.detection.data.stamps import Stamps
from common.errors import Refused

_ROUNDING = 1.0  # pixels beyond the image that are rounding errors
_SUSPICIOUS = 0.5  # share of boxes beyond their image, or of unreadable images, from which the data are refused


@dataclass(eq=False)
class FoundBoxes:
    """The N images and M boxes of a data set as they were read; boxes in any order."""

    title: str  # for messages
    images: Any  # `ImageFiles`, or a table
    classes: tuple[str, ...]
    rows: np.ndarray  # int64[M] the image of each box
    boxes: np.ndarray  # float64[M, 4] left, top, width, height in pixels, or as shares of the image if `relative`
    labels: np.ndarray  # int64[M]
    category_ids: np.ndarray | None = None  # int64[K]; default: from 0 up
    image_ids: np.ndarray | None = None  # int64[N]; default: from 0 up
    sizes: np.ndarray | None = None  # int64[N, 2] width and height; 0 if unknown
    crowd: np.ndarray | None = None  # bool[M]; default: none is
    areas: np.ndarray | None = None  # float64[M]; NaN if unknown
    upright: bool = False  # True if boxes are of the upright image where sizes can't tell
    relative: bool = False
    shapes: pa.StructArray | None = None  # M shapes in the same coordinates, if masks are asked for

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


def check_files(found: FoundBoxes, stamps: Stamps) -> AnnotatedImages:
    """As `check`, of files, which `stamps` has then looked at. Raises `Refused` if some are missing, too."""
    stamps.take(found.images.root, found.images.paths)
    return check(found, headers_of_files(found.images.root, found.images.paths))


def check(found: FoundBoxes, headers: np.ndarray) -> AnnotatedImages:
    """The annotations of the upright images.

    `headers` int64[N, 4] as `image_headers` reads them. Raises `Refused` for boxes that are not
    finite or upside down, for sizes that differ from the images', for boxes in another
    format, and if there are no images, no boxes, or no outlines although masks are asked for.
    """
    if not len(found.images):
        raise Refused(f"{found.title}: no images in it; it needs at least one")
    if not len(found.boxes):
        raise Refused(f"{found.title}: no boxes in its {len(found.images):,} images; annotate some of them")
    notes = []
    _refuse_nonsense(found)
    headers, is_upright = _frames(found, headers, notes)
    sizes = upright_sizes(headers)
    boxes, areas, of_box = found.boxes, found.areas, headers[found.rows]
    if found.relative:
        scale = np.where(is_upright[:, None], sizes, headers[:, :2])[found.rows]
        boxes = boxes * np.concatenate([scale, scale], axis=1)
    boxes = np.where(is_upright[found.rows, None], boxes, turned(boxes, of_box))

    limits = np.tile(sizes[found.rows], 2)
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    beyond = np.maximum(-corners, corners - limits).max(axis=1, initial=0)  # [M] pixels
    outside = beyond > _ROUNDING
    if outside.mean() > _SUSPICIOUS:
        raise Refused(
            f"{found.title}: {outside.sum():,} of {len(boxes):,} boxes reach beyond their image, {_first(found, outside)}; "
            "they are in another format (corners or width and height, pixels or shares) or of images of another size"
        )
    corners = np.clip(corners, 0, limits).astype(np.float32)
    spans = corners[:, 2:] - corners[:, :2]
    empty = (spans <= 0).any(axis=1)
    whats = "reach beyond their image and are clipped", "have no area inside their image and are left out"
    for chosen, what in zip((outside & ~empty, empty), whats, strict=True):
        if chosen.any():
            notes.append(f"{chosen.sum():,} of {len(boxes):,} boxes {what}, {_first(found, chosen)}")
    kept = np.flatnonzero(~empty)
    kept = kept[np.argsort(found.rows[kept], kind="stable")]
    if not kept.size:
        raise Refused(f"{found.title}: none of its {len(boxes):,} boxes has an area inside its image; correct them")
    areas = np.where(np.isfinite(areas) & (areas >= 0), areas, spans.prod(axis=1))
    masks = None
    if found.shapes is not None:
        turns = np.where(is_upright, 1, headers[:, 2]).astype(np.uint8)
        frames = np.where(is_upright[:, None], sizes, headers[:, :2])[found.rows[kept]]
        masks = Masks(_shapes(found, kept, frames, notes), turns)
    return AnnotatedImages(
        found.classes,
        found.category_ids,
        found.image_ids,
        sizes.astype(np.int32),
        np.concatenate([[0], np.cumsum(np.bincount(found.rows[kept], minlength=len(sizes)))]),
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


def _shapes(found: FoundBoxes, kept: np.ndarray, frames: np.ndarray, notes: list[str]) -> pa.StructArray:
    shapes, wrong = checked(found.shapes.take(pa.array(kept)), frames)
    if wrong.all():
        raise Refused(
            f"{found.title}: none of its {len(kept):,} objects has an outline (segmentation) for masks; add them, or choose a "
            "detector of boxes"
        )
    if wrong.any():
        first = found.images.name(int(found.rows[kept[wrong.argmax()]]))
        count = f"{wrong.sum():,} of {len(kept):,} objects"
        notes.append(f"{count} have no outline that can be drawn, and their box stands in, first in {first}")
    return shapes


def _refuse_nonsense(found: FoundBoxes) -> None:
    unknown, upside_down = ~np.isfinite(found.boxes).all(axis=1), (found.boxes[:, 2:] < 0).any(axis=1)
    for wrong, what in (
        (unknown, "have a coordinate that is missing or no finite number"),
        (upside_down, "end before they begin (right < left or bottom < top)"),
    ):
        if wrong.any():
            first = _first(found, wrong)
            raise Refused(
                f"{found.title}: {wrong.sum():,} boxes {what}, {first}; correct, remove or give them in another format"
            )


def _frames(found: FoundBoxes, headers: np.ndarray, notes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Headers without gaps, and bool[N]: True if an image's boxes refer to the upright image and not to the stored one.

    The annotated size of an image that lies on its side says it. If it can't (no size, a square, an
    image upside down), the other images of the data decide.
    """
    unreadable = headers[:, 0] == 0
    if unreadable.any():
        first = found.images.name(int(unreadable.argmax()))
        count = f"{unreadable.sum():,} of {len(headers):,} images can't be read, the first is {first}"
        if unreadable.mean() > _SUSPICIOUS:
            raise Refused(f"{found.title}: {count}; mend them, or correct the paths")
        notes.append(count)
        is_size = (found.sizes > 0).all(axis=1) & (found.sizes.prod(axis=1, dtype=np.float64) <= MAX_PIXELS)
        stand_in = np.where(is_size[:, None], found.sizes, 640)
        stand_ins = np.concatenate([stand_in, np.ones_like(headers[:, 2:])], axis=1)
        headers = np.where(unreadable[:, None], stand_ins, headers)
    is_told = (found.sizes > 0).all(axis=1)
    as_stored = (headers[:, :2] == found.sizes).all(axis=1)
    as_upright = (upright_sizes(headers) == found.sizes).all(axis=1)
    if (wrong := is_told & ~as_stored & ~as_upright).any():
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
    if is_rotated.any():
        turned_count = (is_rotated & ~is_upright).sum()
        notes.append(
            f"{is_rotated.sum():,} images are rotated by their EXIF tag, and the boxes of {turned_count:,} with them"
        )
    return headers, is_upright


def _first(found: FoundBoxes, chosen: np.ndarray) -> str:
    box = int(chosen.argmax())
    left, top, width, height = found.boxes[box].tolist()
    corners = ", ".join(f"{value:.6g}" for value in (left, top, left + width, top + height))
    return f"first {found.images.name(int(found.rows[box]))} with left, top, right, bottom {corners}"
