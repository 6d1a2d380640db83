"""Sources of images with a class id for each pixel."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from PIL import Image

from common.data.cache import Cache
from common.data.decoding import Picture
from common.data.images import BrokenImage
from common.data.source import ImageList, ModelClasses, hash_source
from common.detection.data.annotated import Annotated, Sample
from common.segmentation.masks import IGNORED, paint_masks, read_mask

BACKGROUND = "background"  # class of the pixels of no object


class Pair(NamedTuple):
    """An image and its mask."""

    picture: Picture  # of a cache it may be smaller than the mask
    mask: np.ndarray  # int16[H, W] class ids, or `IGNORED`


class Masked(ImageList, Protocol):
    """A list of images with masks."""

    counted_items: ClassVar[str] = "pixels"
    has_audit: ClassVar[bool] = False
    # To count pixels, every mask would have to be read.
    class_counts: np.ndarray | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def load_pair(self, index: int, position: int, cache: Cache | None = None) -> Pair:
        """The image and the mask `index` at `position` of the stream. Raises `BrokenImage`."""
        raise NotImplementedError

    def load_mask(self, index: int) -> np.ndarray:
        """The mask alone. Raises `BrokenImage`."""
        raise NotImplementedError

    def load_picture(self, index: int) -> Picture:
        """The image alone. Raises `BrokenImage`."""
        return Picture(self.get_content(index))

    def load_image(self, index: int) -> Image.Image:
        """The image, RGB and upright. Raises `BrokenImage`."""
        return Image.fromarray(self.load_picture(index).decode().permute(1, 2, 0).numpy())


def check_size(picture: Picture, mask: np.ndarray) -> None:
    """Raise `BrokenImage` if an image has another size than its mask."""
    height, width = mask.shape
    if (picture.height, picture.width) != (height, width):
        raise BrokenImage(
            f"is {picture.width} x {picture.height} pixels large (after its EXIF rotation), its mask "
            f"{width} x {height}"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Composed(Masked):
    """The images of another source, with masks."""

    images: Any  # their labels are not used
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    split_text: str = ""
    model_classes: ModelClasses | None = None
    fresh: bool = False

    def __len__(self) -> int:
        return len(self.images)

    def get_name(self, index: int) -> str:
        return self.images.get_name(index)

    def get_content(self, index: int) -> Any:
        return self.images.get_content(index)

    def list_files(self) -> Any:
        return self.images.list_files()


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskedImages(_Composed):
    """Images in files or in a column of a table, with a file or a cell of class ids for each."""

    masks: Any  # a source like `images`, `Files` or `Table`
    ignore_zero: bool  # see `read_mask`
    id_map: tuple[int, ...] = ()  # class id of each id in the masks; empty if they are the same

    @property
    def strata(self) -> np.ndarray:
        return self.images.strata

    @cached_property
    def fingerprint(self) -> str:
        fingerprints = (self.images.fingerprint, self.masks.fingerprint)
        return hash_source(self.classes + fingerprints, self.images.labels, self.images.labels)

    def hash_images(self, key: int) -> np.ndarray:
        return self.images.hash_images(key)

    def select(self, indices: np.ndarray) -> Self:
        """The source of these images alone."""
        return replace(self, images=self.images.select(indices), masks=self.masks.select(indices))

    def load_pair(self, index: int, position: int, cache: Cache | None = None) -> Pair:
        mask = self.load_mask(index)
        open_picture = partial(self._open_picture, index, mask)
        return Pair(cache.get(index, open_picture) if cache else open_picture(), mask)

    def load_mask(self, index: int) -> np.ndarray:
        num_ids = len(self.id_map) if self.id_map else len(self.classes)
        try:
            mask = read_mask(self.masks.get_content(index), num_ids, self.ignore_zero)
        except BrokenImage as error:
            raise BrokenImage(f"mask {self.masks.get_name(index)}: {error}") from None
        if self.id_map:
            class_ids = np.array(self.id_map + (IGNORED,), np.int16)  # the index -1 is the last
            mask = class_ids[mask]
        return mask

    def _open_picture(self, index: int, mask: np.ndarray) -> Picture:
        picture = self.load_picture(index)
        check_size(picture, mask)
        return picture


@dataclass(frozen=True, eq=False, kw_only=True)
class PaintedObjects(_Composed):
    """Images with the outlines of objects, as a class id for each pixel; the first class is the
    background.
    """

    @classmethod
    def from_objects(cls, objects: Annotated) -> Self:
        """The images of `objects`, which have masks."""
        return cls(
            images=objects,
            classes=(BACKGROUND,) + tuple(objects.classes),
            notes=objects.notes,
            split_text=objects.split_text,
            fresh=objects.fresh,
        )

    @property
    def fingerprint(self) -> str:
        return self.images.fingerprint

    def load_pair(self, index: int, position: int, cache: Cache | None = None) -> Pair:
        sample = self.images.load_sample(index, position, cache)
        return Pair(sample.image, _paint_objects(sample))

    def load_mask(self, index: int) -> np.ndarray:
        return _paint_objects(self.images.load_objects(index))


def _paint_objects(sample: Sample) -> np.ndarray:
    return paint_masks(sample.masks, sample.labels + 1, sample.crowd, background=0)
