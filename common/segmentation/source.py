"""Sources of images with a class id for each pixel."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
from PIL import Image

from common.data.cache import Cache
from common.data.decoding import Picture
from common.data.images import BrokenImage
from common.data.source import Files, ImageList, ModelClasses, format_path, hash_source, join_path
from common.data.stream import Blocks
from common.detection.data.annotated import Annotated
from common.segmentation.masks import paint_masks, read_mask

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


@dataclass(frozen=True, eq=False)
class MaskFiles(Files, Masked):
    """Image files, with a file of class ids for each."""

    mask_root: str
    mask_paths: pa.LargeBinaryArray  # below mask_root
    mask_sizes: np.ndarray  # int64[N] bytes
    ignore_zero: bool  # see `read_mask`
    id_map: tuple[int, ...] = ()  # class id of each id in the files; empty if they are the same

    class_counts = None  # type: ignore[assignment]

    @property
    def strata(self) -> np.ndarray:
        return np.zeros(len(self), np.int64)

    @cached_property
    def fingerprint(self) -> str:
        contents = np.stack([self.sizes, self.mask_sizes])
        return hash_source(self.classes, self.labels, contents, self.paths)

    def load_pair(self, index: int, position: int, cache: Cache | None = None) -> Pair:
        mask = self.load_mask(index)
        read_picture = partial(self._open_picture, index, mask.shape)
        picture = cache.get(index, read_picture) if cache else read_picture()
        return Pair(picture, mask)

    def load_mask(self, index: int) -> np.ndarray:
        path = join_path(self.mask_root, self.mask_paths, index)
        num_ids = len(self.id_map) if self.id_map else len(self.classes)
        try:
            mask = read_mask(path, num_ids, self.ignore_zero)
        except BrokenImage as error:
            raise BrokenImage(f"{self.mask_name(index)}: {error}") from None
        if self.id_map:
            class_ids = np.array(self.id_map, np.int16)
            mask = class_ids[np.minimum(mask, len(class_ids) - 1)]
        return mask

    def mask_name(self, index: int) -> str:
        """The mask's file, for people."""
        return format_path(self.mask_root, self.mask_paths, index)

    def _open_picture(self, index: int, mask_size: tuple[int, ...]) -> Picture:
        picture = Picture(self.get_content(index))
        if (picture.height, picture.width) != mask_size:
            raise BrokenImage(
                f"is {picture.width} x {picture.height} pixels large (after its EXIF rotation), its "
                f"mask {mask_size[1]} x {mask_size[0]}"
            )
        return picture


@dataclass(frozen=True, eq=False)
class PaintedObjects(Masked):
    """Images with the outlines of objects, as a class id for each pixel; the first class is the
    background.
    """

    objects: Annotated  # with masks
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    split_text: str
    model_classes: ModelClasses | None = None

    @classmethod
    def from_objects(cls, objects: Annotated) -> Self:
        """The images of `objects`, which have masks."""
        names = (BACKGROUND,) + tuple(objects.classes)
        return cls(objects, classes=names, notes=objects.notes, split_text=objects.split_text)

    @property
    def fresh(self) -> bool:  # type: ignore[override]
        return self.objects.fresh

    @property
    def fingerprint(self) -> str:
        return self.objects.fingerprint

    @property
    def blocks(self) -> Blocks | None:
        return self.objects.blocks

    def __len__(self) -> int:
        return len(self.objects)

    def get_name(self, index: int) -> str:
        return self.objects.get_name(index)

    def get_content(self, index: int) -> Any:
        return self.objects.get_content(index)

    def list_files(self) -> tuple[pa.LargeBinaryArray | None, np.ndarray] | None:
        return self.objects.list_files()

    def load_pair(self, index: int, position: int, cache: Cache | None = None) -> Pair:
        sample = self.objects.load_sample(index, position, cache)
        mask = paint_masks(sample.masks, sample.labels + 1, sample.crowd, background=0)
        return Pair(sample.image, mask)

    def load_mask(self, index: int) -> np.ndarray:
        return self.load_pair(index, index).mask
