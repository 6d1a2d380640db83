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
from common.detection.data.masks import Masks, decode_masks

MAX_DETECTIONS = 100  # of a class in an image that COCO's evaluation counts


class Sample(NamedTuple):
    """An image with its n boxes: a `Picture` and arrays from a source, tensors once it is cropped."""

    image: Any  # Picture; once cropped uint8[3, H, W]
    boxes: Any  # float32[n, 4] left, top, right, bottom in pixels
    labels: Any  # int64[n]
    crowd: Any  # bool[n]
    masks: Any = None  # uint8[n, H, W] of 0 and 1, if the source was loaded with masks
    size: Any = None  # of a source's sample: int64[2] width and height that boxes are of


@dataclass(frozen=True, eq=False)
class Annotated(ImageList):
    """N images with M boxes of K classes, which can be pickled and work after a fork.

    Subclasses define `fingerprint`, `get_name` and `get_content`.
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
    """float64[M, 4] left, top, width, height as in the data: unrounded boxes for COCO's evaluation.

    They default to `boxes`, whose rounding may flip an IoU that lies on a threshold."""
    # Of the M objects, if masks were requested.
    masks: Masks | None = field(default=None, kw_only=True)
    # What loading has corrected or left out.
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    # For people: "val.json" or "20 % held out of train.json"
    split_text: str = field(default="", kw_only=True)
    # With --eval_only, the evaluated model's.
    model_classes: ModelClasses | None = field(default=None, kw_only=True)

    counted_items: ClassVar[str] = "boxes"  # what `class_counts` counts, for people
    image_columns: ClassVar[tuple[str, ...]] = ("image_ids", "sizes")  # a row per image
    has_masks = property(lambda self: self.masks is not None)  # True if samples have

    def __post_init__(self) -> None:
        if len(self.truth) != len(self.boxes):
            boxes = self.boxes.astype(np.float64)
            sides = boxes[:, 2:] - boxes[:, :2]
            vars(self)["truth"] = np.concatenate([boxes[:, :2], sides], axis=1)

    def __len__(self) -> int:
        return len(self.image_ids)

    @property
    def class_counts(self) -> np.ndarray | None:
        """int64[K]: number of boxes of each class, without crowd regions; None if scenes are fresh."""
        if self.fresh:
            return None
        return np.bincount(self.labels[~self.crowd], minlength=len(self.classes))

    @property
    def strata(self) -> np.ndarray:
        """int64[M, 2]: image and class of each box, without crowd regions.

        The same share of each class is held out.
        """
        images = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        return np.stack([images, self.labels], axis=1)[~self.crowd]

    @property
    def max_detections(self) -> int:
        """Detections of a class in an image that the evaluation counts.

        COCO's 100, or as many as an image has boxes.
        """
        return int(np.diff(self.offsets).max(initial=MAX_DETECTIONS))

    def select(self, indices: np.ndarray) -> Self:
        """Select the images `indices` int64[n], in this order."""
        box_counts = np.diff(self.offsets)[indices]
        offsets = np.concatenate([[0], np.cumsum(box_counts)])
        shifts = self.offsets[:-1][indices] - offsets[:-1]
        boxes = np.arange(offsets[-1]) + np.repeat(shifts, box_counts)
        columns = {name: getattr(self, name)[indices] for name in self.image_columns}
        for name in ("boxes", "labels", "crowd", "areas", "truth"):
            columns[name] = getattr(self, name)[boxes]
        masks = None
        if self.masks:
            masks = self.masks.select(indices, boxes)
        return replace(self, **columns, offsets=offsets, masks=masks)

    def load_image(self, index: int) -> Image.Image:
        """The image, RGB and upright, of `sizes[index]`. Raises `images.BrokenImage`."""
        return Image.fromarray(self.open_picture(index).decode().permute(1, 2, 0).numpy())

    def open_picture(self, index: int) -> Picture:
        """The same image, decoded only where it is used. Raises `images.BrokenImage`."""
        picture = Picture(self.get_content(index))
        width, height = self.sizes[index].tolist()
        if (picture.width, picture.height) != (width, height):
            raise BrokenImage(
                f"is {picture.width} x {picture.height} pixels large, and was {width} x {height} "
                "when its boxes were read"
            )
        return picture

    def load_sample(self, index: int, position: int, cache: Cache | None = None) -> Sample:
        """The training sample `index` at `position` of the stream. Raises `images.BrokenImage`."""
        open_picture = partial(self.open_picture, index)
        picture = cache.get(index, open_picture) if cache else open_picture()
        return self.load_objects(index)._replace(image=picture)

    def load_objects(self, index: int) -> Sample:
        """The sample `index` of a list, whose image may be None. Raises `images.BrokenImage`."""
        objects = slice(self.offsets[index], self.offsets[index + 1])
        masks = None
        if self.masks:
            masks = decode_masks(self.build_rles(index), self.sizes[index])
        return Sample(
            image=None,
            boxes=self.boxes[objects].copy(),
            labels=self.labels[objects].copy(),
            crowd=self.crowd[objects].copy(),
            masks=masks,
            size=self.sizes[index].astype(np.int64),
        )

    def build_rles(self, index: int) -> list[dict]:
        """Masks of an image's objects as COCO's packed run lengths; none if not loaded."""
        if not self.masks:
            return []
        objects = slice(self.offsets[index], self.offsets[index + 1])
        return self.masks.build_rles(index, objects, self.sizes[index], self.boxes[objects])


def build_empty_columns(classes: Sequence[str], sizes: np.ndarray) -> dict:
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


def build_image_files(root: str, paths: pa.LargeBinaryArray) -> Files:
    """Files below `root`, which have no labels."""
    zeros = np.zeros(len(paths), np.int64)
    return Files(root, paths, sizes=zeros, labels=zeros, classes=())


@dataclass(frozen=True, eq=False)
class AnnotatedImages(Annotated):
    """Files or rows of a table, with their boxes."""

    images: Any  # `Files`, `Table` or `Shards`; their labels are not used
    byte_counts: np.ndarray  # int64[N] size of each image

    image_columns = Annotated.image_columns + ("byte_counts",)

    @property
    def blocks(self) -> Blocks | None:
        return self.images.blocks

    def prefetch(self, indices: np.ndarray) -> None:
        self.images.prefetch(indices)

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
        if self.masks:
            columns.append(self.masks.to_bytes())
        chunks = [np.ascontiguousarray(column).reshape(-1).view(np.uint8) for column in columns]
        paths = getattr(self.images, "paths", None)
        return hash_source(self.classes, self.labels, np.concatenate(chunks), paths)

    def get_name(self, index: int) -> str:
        return self.images.get_name(index)

    def get_listed_name(self, index: int) -> str:
        return self.images.get_listed_name(index)

    def get_content(self, index: int) -> str | bytes | Image.Image:
        return self.images.get_content(index)

    def select(self, indices: np.ndarray) -> Self:
        return replace(super().select(indices), images=self.images.select(indices))

    def list_files(self) -> tuple[pa.LargeBinaryArray | None, np.ndarray] | None:
        listing = self.images.list_files()
        if listing is None:
            return None
        paths, _ = listing
        return paths, self.byte_counts

    def hash_images(self, key: int) -> np.ndarray:
        """uint64[N], each a function of its image's path or row and `key` alone."""
        return self.images.hash_images(key)
