"""Checks of boxes: which can be trained on, and where they lie in the upright images.

Boxes are checked once, on loading: what is corrected or left out is counted and named, and what looks like another format
is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from common.data.images import MAX_PIXELS
from common.detection.data.annotated import Annotations
from common.detection.data.image_headers import turned, upright_sizes
from common.detection.data.outlines import Outlines, checked
from common.errors import Refused

_ROUNDING = 1.0  # pixels beyond the image that are rounding errors
_SUSPICIOUS = 0.5  # share of boxes beyond their image, or of unreadable images, from which the data are refused


@dataclass(frozen=True, eq=False)
class FoundBoxes:
    """The N images and M boxes of a data set as they were read; boxes in any order."""

    title: str  # for messages
    classes: tuple[str, ...]
    category_ids: np.ndarray  # int64[K]
    image_ids: np.ndarray  # int64[N]
    sizes: np.ndarray  # int64[N, 2] width and height; 0 if unknown
    rows: np.ndarray  # int64[M] the image of each box
    boxes: np.ndarray  # float64[M, 4] left, top, width, height in pixels, or as shares of the image if `relative`
    labels: np.ndarray  # int64[M]
    crowd: np.ndarray  # bool[M]
    areas: np.ndarray  # float64[M]; NaN if unknown
    name: Callable[[int], str]  # of an image
    upright: bool = False  # whether boxes are of the upright image if sizes can't tell
    relative: bool = False
    shapes: pa.StructArray | None = None  # M outlines in the same coordinates, if masks are asked for


def check(found: FoundBoxes, headers: np.ndarray) -> Annotations:
    """The annotations of the upright images.

    `headers` int64[N, 4] as `image_headers` reads them. Raises `Refused` for boxes that are not finite or upside down,
    for sizes that differ from those of the images, for boxes in another format, and if there are no images, no boxes, or
    no outlines although masks are asked for.
    """
    if not len(found.image_ids):
        raise Refused(f"{found.title}: no images in it; it needs at least one")
    if not len(found.boxes):
        raise Refused(f"{found.title}: no boxes in its {len(found.image_ids):,} images; annotate some of them")
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
    if (clipped := outside & ~empty).any():
        notes.append(
            f"{clipped.sum():,} of {len(boxes):,} boxes reach beyond their image and are clipped, {_first(found, clipped)}"
        )
    if empty.any():
        notes.append(
            f"{empty.sum():,} of {len(boxes):,} boxes have no area inside their image and are left out, {_first(found, empty)}"
        )
    kept = np.flatnonzero(~empty)
    kept = kept[np.argsort(found.rows[kept], kind="stable")]
    if not kept.size:
        raise Refused(f"{found.title}: none of its {len(boxes):,} boxes has an area inside its image; correct them")
    areas = np.where(np.isfinite(areas) & (areas >= 0), areas, spans.prod(axis=1))
    outlines = None
    if found.shapes is not None:
        turns = np.where(is_upright, 1, headers[:, 2]).astype(np.uint8)
        frames = np.where(is_upright[:, None], sizes, headers[:, :2])[found.rows[kept]]
        outlines = Outlines(_shapes(found, kept, frames, notes), turns)
    return Annotations(
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
        outlines=outlines,
        notes=tuple(f"{found.title}: {note}" for note in notes),
    )


def _shapes(found: FoundBoxes, kept: np.ndarray, frames: np.ndarray, notes: list[str]) -> pa.StructArray:
    shapes, wrong = checked(found.shapes.take(pa.array(kept)), frames)
    if wrong.all():
        raise Refused(
            f"{found.title}: none of its {len(kept):,} objects has an outline (segmentation) for masks or --copy_paste; "
            "add them, or choose a detector of boxes without --copy_paste"
        )
    if wrong.any():
        first = found.name(int(found.rows[kept[wrong.argmax()]]))
        count = f"{wrong.sum():,} of {len(kept):,} objects"
        notes.append(f"{count} have no outline that can be drawn, and their box stands in, first in {first}")
    return shapes


def _refuse_nonsense(found: FoundBoxes) -> None:
    unfinite = ~np.isfinite(found.boxes).all(axis=1)
    if unfinite.any():
        raise Refused(
            f"{found.title}: {unfinite.sum():,} boxes have a coordinate that is missing or no finite number, "
            f"{_first(found, unfinite)}; correct or remove them"
        )
    inverted = (found.boxes[:, 2:] < 0).any(axis=1)
    if inverted.any():
        raise Refused(
            f"{found.title}: {inverted.sum():,} boxes end before they begin (right < left or bottom < top), "
            f"{_first(found, inverted)}; correct or remove them, or give them in the right format"
        )


def _frames(found: FoundBoxes, headers: np.ndarray, notes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Headers without gaps, and bool[N]: whether an image's boxes refer to the upright image and not to the stored one.

    The annotated size of an image that lies on its side tells. If it can't (no size, a square, an image upside down), the
    other images of the data decide.
    """
    unreadable = headers[:, 0] == 0
    if unreadable.any():
        first = found.name(int(unreadable.argmax()))
        count = f"{unreadable.sum():,} of {len(headers):,} images can't be read, the first is {first}"
        if unreadable.mean() > _SUSPICIOUS:
            raise Refused(f"{found.title}: {count}; mend them, or correct the paths")
        notes.append(count)
        is_size = (found.sizes > 0).all(axis=1) & (found.sizes.prod(axis=1, dtype=np.float64) <= MAX_PIXELS)
        stand_in = np.where(is_size[:, None], found.sizes, 640)
        headers = np.where(
            unreadable[:, None], np.concatenate([stand_in, np.ones_like(headers[:, 2:])], axis=1), headers
        )
    is_told = (found.sizes > 0).all(axis=1)
    as_stored = (headers[:, :2] == found.sizes).all(axis=1)
    as_upright = (upright_sizes(headers) == found.sizes).all(axis=1)
    if (wrong := is_told & ~as_stored & ~as_upright).any():
        row = int(wrong.argmax())
        said, real = (" x ".join(map(str, size[row].tolist())) for size in (found.sizes, upright_sizes(headers)))
        raise Refused(
            f"{found.title}: {wrong.sum():,} of {len(headers):,} images have another size than annotated, first "
            f"{found.name(row)}: {said} in the annotations, {real} in the file; boxes would miss their objects"
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
    return f"first {found.name(int(found.rows[box]))} with left, top, right, bottom {corners}"
