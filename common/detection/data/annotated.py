"""Sources of images with boxes, in columns: data workers would copy the memory of objects."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pyarrow as pa
from PIL import Image

from common.data.cache import Cache
from common.data.decoding import Picture
from common.data.images import BrokenImage
from common.data.source import Files, ImageList, ModelClasses, hash_source
from common.data.stream import Blocks
from common.detection.data.masks import Masks, decode

MAX_DETECTIONS = 100  # of a class in an image that COCO's evaluation counts


class Sample(NamedTuple):
    """An image with its n boxes: a `Picture` and arrays from a source, tensors once a part of it is shown."""

    image: Any  # Picture; once shown uint8[3, H, W]
    boxes: Any  # float32[n, 4] left, top, right, bottom in pixels
    labels: Any  # int64[n]
    crowd: Any  # bool[n]
    masks: Any = None  # uint8[n, H, W] of 0 and 1, if the source was loaded with masks
    size: Any = None  # of a source's sample: int64[2] width and height that boxes are of


@dataclass(frozen=True, eq=False)
class Annotated(ImageList):
    """N images with M boxes of K classes, which can be pickled and work after a fork.

    Subclasses define `fingerprint`, `name` and `content`.
    """

    classes: tuple[str, ...]  # K names, by class id
    # int64[K]: ids of the classes in the data; -1 for a class that it does not have.
    category_ids: np.ndarray
    image_ids: np.ndarray  # int64[N], unique: ids of the images in the data
    sizes: np.ndarray  # int32[N, 2] width and height in pixels, upright
    # int64[N + 1]: rows offsets[i] to offsets[i + 1] below are boxes of image i.
    offsets: np.ndarray
    boxes: np.ndarray  # float32[M, 4] left, top, right, bottom in pixels of the upright image
    labels: np.ndarray  # int64[M] class ids
    crowd: np.ndarray  # bool[M]: crowds or difficult objects: neither objects nor background
    # float64[M] in square pixels: of the mask if the data has it, else of the box.
    areas: np.ndarray
    truth: np.ndarray = field(default_factory=lambda: np.zeros(0), kw_only=True)
    """float64[M, 4] left, top, width, height as in the data, not clipped: for the evaluation. The
    default is `boxes`, which are rounded: an overlap on a threshold may then count otherwise than
    in COCO's."""
    # Of the M objects, if masks were asked for.
    masks: Masks | None = field(default=None, kw_only=True)
    # What loading has corrected or left out.
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    # For people: "val.json" or "20 % held out of train.json"
    part: str = field(default="", kw_only=True)
    # With --eval_only, the evaluated model's.
    model_classes: ModelClasses | None = field(default=None, kw_only=True)

    counted_items: ClassVar[str] = "boxes"  # what `class_counts` counts, for people
    of_images: ClassVar[tuple[str, ...]] = ("image_ids", "sizes")  # columns with a row per image
    has_masks = property(lambda self: self.masks is not None)  # True if samples have

    def __post_init__(self) -> None:
        if len(self.truth) != len(self.boxes):
            boxes = self.boxes.astype(np.float64)
            vars(self)["truth"] = np.concatenate(
                [boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1
            )

    def __len__(self) -> int:
        return len(self.image_ids)

    @property
    def class_counts(self) -> np.ndarray | None:
        """int64[K]: number of boxes of each class, without crowd regions; None if scenes are fresh."""
        return (
            None
            if self.fresh
            else np.bincount(self.labels[~self.crowd], minlength=len(self.classes))
        )

    @property
    def strata(self) -> np.ndarray:
        """int64[M, 2]: image and class of each box, without crowd regions; the same share of each
        class is held out.
        """
        images = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        return np.stack([images, self.labels], axis=1)[~self.crowd]

    @property
    def max_detections(self) -> int:
        """Detections of a class in an image that the evaluation counts: COCO's 100, or as many as
        an image has boxes.
        """
        return int(np.diff(self.offsets).max(initial=MAX_DETECTIONS))

    def select(self, rows: np.ndarray) -> Self:
        """The images `rows` int64[n] alone, in this order."""
        counts = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        taken = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], counts)
        images = {name: getattr(self, name)[rows] for name in self.of_images}
        boxes = {
            name: getattr(self, name)[taken]
            for name in ("boxes", "labels", "crowd", "areas", "truth")
        }
        masks = self.masks and self.masks.select(rows, taken)
        return replace(self, **images, **boxes, offsets=offsets, masks=masks)

    def image(self, index: int) -> Image.Image:
        """The image, RGB and upright, of `sizes[index]`. Raises `images.BrokenImage`."""
        return Image.fromarray(self.picture(index).decode().permute(1, 2, 0).numpy())

    def picture(self, index: int) -> Picture:
        """The same image, decoded only where it is used. Raises `images.BrokenImage`."""
        picture = Picture(self.content(index))
        width, height = self.sizes[index].tolist()
        if (picture.width, picture.height) != (width, height):
            raise BrokenImage(
                f"is {picture.width} x {picture.height} pixels large, and was {width} x {height} "
                "when its boxes were read"
            )
        return picture

    def sample(self, index: int, position: int, cache: Cache | None = None) -> Sample:
        """The training sample `index` at `position` of the stream. Raises `images.BrokenImage`."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        read = partial(self.picture, index)
        picture = cache.get(index, read) if cache else read()
        masks = decode(self.rles(index), self.sizes[index]) if self.masks else None
        boxes, labels, crowd = (
            column[rows].copy() for column in (self.boxes, self.labels, self.crowd)
        )
        return Sample(picture, boxes, labels, crowd, masks, self.sizes[index].astype(np.int64))

    def rles(self, index: int) -> list[dict]:
        """Masks of an image's objects as COCO's packed run lengths; none if not loaded."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return (
            self.masks.rles(index, rows, self.sizes[index], self.boxes[rows]) if self.masks else []
        )


def no_boxes(classes: Sequence[str], sizes: np.ndarray) -> dict:
    """The columns of images of `sizes` int[N, 2] (width, height) without a box."""
    return {
        "classes": tuple(classes),
        "category_ids": np.arange(len(classes)),
        "image_ids": np.arange(len(sizes)),
        "sizes": sizes.astype(np.int32),
        "offsets": np.zeros(len(sizes) + 1, np.int64),
        "boxes": np.zeros((0, 4), np.float32),
        "labels": np.zeros(0, np.int64),
        "crowd": np.zeros(0, bool),
        "areas": np.zeros(0),
    }


def image_files(root: str, paths: pa.LargeBinaryArray) -> Files:
    """Files below `root`, which have no labels."""
    none = np.zeros(len(paths), np.int64)
    return Files(root, paths, none, labels=none, classes=())


@dataclass(frozen=True, eq=False)
class AnnotatedImages(Annotated):
    """Files or rows of a table, with their boxes."""

    images: Any  # `Files`, `Table` or `Shards`; their labels are not used
    byte_counts: np.ndarray  # int64[N] size of each image

    of_images = (*Annotated.of_images, "byte_counts")

    @property
    def blocks(self) -> Blocks | None:
        return self.images.blocks

    def expect(self, indices: np.ndarray) -> None:
        self.images.expect(indices)

    @cached_property
    def fingerprint(self) -> str:
        columns = [
            self.byte_counts,
            self.image_ids,
            self.sizes,
            self.offsets,
            self.boxes,
            self.crowd,
        ]
        columns += [self.masks.bytes()] if self.masks else []
        contents = np.concatenate(
            [np.ascontiguousarray(column).reshape(-1).view(np.uint8) for column in columns]
        )
        return hash_source(self.classes, self.labels, contents, getattr(self.images, "paths", None))

    def name(self, index: int) -> str:
        return self.images.name(index)

    def listed_name(self, index: int) -> str:
        return self.images.listed_name(index)

    def content(self, index: int) -> str | bytes | Image.Image:
        return self.images.content(index)

    def select(self, rows: np.ndarray) -> Self:
        return replace(super().select(rows), images=self.images.select(rows))

    def list_files(self) -> tuple[pa.LargeBinaryArray | None, np.ndarray] | None:
        listing = self.images.list_files()
        return listing and (listing[0], self.byte_counts)

    def hash_images(self, key: int) -> np.ndarray:
        """uint64[N], each a function of its image's path or row and `key` alone."""
        return self.images.hash_images(key)
