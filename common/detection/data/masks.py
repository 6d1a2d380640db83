"""Masks of objects: COCO's polygons or run lengths, in columns until an image needs them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from common.data.images import BrokenImage

# Fields of a shape, of which an object has one.
SHAPE_FIELDS = {
    # polygons x, y, x, y, ..., one per visible part
    "segmentation": pa.list_(pa.list_(pa.float64())),
    "rle": pa.struct(
        # Height, width.
        {"counts": pa.list_(pa.int64()), "packed": pa.string(), "size": pa.list_(pa.int64())}
    ),
}
_MIN_COORDINATES = 6  # of a polygon
# Sides of the image: a corner further out is a mistake that would take gigabytes.
_MAX_DISTANCE = 2.0
_MASK_THRESHOLD = 0.5


@dataclass(frozen=True, eq=False)
class Masks:
    """The shapes of M objects in N images. A null shape means that only the box is known."""

    shapes: pa.StructArray  # M rows with `SHAPE_FIELDS`, in pixels of the stored image
    orientations: np.ndarray  # uint8[N]: EXIF orientation of the shapes; 1 if they are upright

    def select(self, images: np.ndarray, objects: np.ndarray) -> "Masks":
        return Masks(self.shapes.take(pa.array(objects)), self.orientations[images])

    def build_rles(
        self, image: int, objects: slice, size: np.ndarray, boxes: np.ndarray
    ) -> list[dict]:
        """COCO's packed run lengths of each object of an upright image of `size` (width, height).

        Raises `BrokenImage` if packed runs are invalid.
        """
        orientation = int(self.orientations[image])
        width, height = size.tolist()
        if orientation >= 5:
            width, height = height, width
        rles = []
        for shape, box in zip(self.shapes[objects].to_pylist(), boxes, strict=True):
            if shape is None:
                rle = encode_masks(_draw_box(box, size))[0]
            else:
                rle = _encode_shape(shape, height, width)
                if orientation != 1:
                    mask = decode_masks([rle], np.array([width, height]))[0]
                    rle = encode_masks(_rotate_upright(mask, orientation)[None])[0]
            rles.append(rle)
        return rles

    def to_bytes(self) -> np.ndarray:
        """uint8[...]: all shapes as bytes, for a fingerprint."""
        sink = pa.BufferOutputStream()
        batch = pa.RecordBatch.from_arrays([pa.concat_arrays([self.shapes])], ["shapes"])
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return np.concatenate([np.frombuffer(sink.getvalue(), np.uint8), self.orientations])


def _encode_shape(shape: dict[str, Any], height: int, width: int) -> dict:
    """COCO's packed run lengths of polygons or of run lengths."""
    from faster_coco_eval.core import mask as coco_mask  # imported late: few runs need it

    size = [height, width]
    if shape["segmentation"]:
        return coco_mask.merge(coco_mask.frPyObjects(shape["segmentation"], height, width))
    if shape["rle"]["packed"] is not None:
        return {"size": size, "counts": shape["rle"]["packed"].encode()}
    runs = {"size": size, "counts": shape["rle"]["counts"]}
    return coco_mask.frPyObjects(runs, height, width)


def check_shapes(shapes: pa.StructArray, sizes: np.ndarray) -> tuple[pa.StructArray, np.ndarray]:
    """The shapes, null if one can't be drawn, and bool[M] for these. `sizes` int[M, 2] of their images."""
    is_polygon, is_wrong = _check_polygons(pc.struct_field(shapes, "segmentation"), sizes)
    is_rle = _check_rles(pc.struct_field(shapes, "rle"), sizes)
    is_wrong |= ~is_polygon & ~is_rle
    return pc.if_else(pa.array(is_wrong), pa.scalar(None, shapes.type), shapes), is_wrong


def _check_polygons(polygons: pa.ListArray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool[M] each: whether an object has polygons, and whether one of them can't be drawn."""
    rings = polygons.flatten()  # all objects' polygons
    owners = pc.list_parent_indices(polygons).to_numpy()
    lengths = pc.list_value_length(rings).fill_null(0).to_numpy()
    coordinates = rings.flatten().fill_null(np.nan).to_numpy(zero_copy_only=False)
    limits = np.repeat(_MAX_DISTANCE * sizes.max(1)[owners], lengths)
    is_invalid = (np.abs(coordinates) > limits) | np.isnan(coordinates)
    is_polygon = np.zeros(len(polygons), bool)
    is_polygon[owners] = True
    is_wrong = np.zeros(len(polygons), bool)
    is_wrong[owners[(lengths < _MIN_COORDINATES) | (lengths % 2 == 1)]] = True
    is_wrong[np.repeat(owners, lengths)[is_invalid]] = True
    return is_polygon, is_wrong


def _check_rles(rles: pa.StructArray, sizes: np.ndarray) -> np.ndarray:
    """bool[M]: whether an object has run lengths of all pixels of an image of its size."""
    counts = pc.struct_field(rles, "counts")
    runs = counts.flatten().fill_null(-1).to_numpy(zero_copy_only=False)
    owners = pc.list_parent_indices(counts).to_numpy()
    num_pixels = np.bincount(owners, runs, len(rles))
    is_packed = pc.struct_field(rles, "packed").is_valid().to_numpy(zero_copy_only=False)
    is_complete = is_packed | (num_pixels == sizes.prod(1))
    is_complete[owners[runs < 0]] = False

    rle_sizes = pc.struct_field(rles, "size")
    is_pair = pc.equal(pc.list_value_length(rle_sizes), 2).fill_null(False)
    pairs = rle_sizes.filter(is_pair).flatten().to_numpy(zero_copy_only=False).reshape(-1, 2)
    has_size = is_pair.to_numpy(zero_copy_only=False).copy()
    has_size[has_size] = (pairs == sizes[has_size, ::-1]).all(1)
    return has_size & is_complete


def encode_masks(masks: np.ndarray) -> list[dict]:
    """uint8[n, H, W] of 0 and 1 -> COCO's packed run lengths."""
    from faster_coco_eval.core import mask as coco_mask

    if not len(masks):
        return []
    return coco_mask.encode(np.asfortranarray(masks.transpose(1, 2, 0)))


def decode_masks(rles: list[dict], size: np.ndarray) -> np.ndarray:
    """Packed run lengths -> uint8[n, H, W] of 0 and 1; `size`: width, height. Raises `BrokenImage`."""
    from faster_coco_eval.core import mask as coco_mask

    if not rles:
        width, height = size.tolist()
        return np.zeros((0, height, width), np.uint8)
    try:
        return coco_mask.decode(rles).transpose(2, 0, 1)
    except ValueError as error:
        raise BrokenImage(f"has an outline that can't be drawn: {error}") from None


def paste_masks(masks: torch.Tensor, boxes: torch.Tensor, size: np.ndarray) -> list[dict]:
    """Masks [n, m, m] in 0..1 on the grids of boxes [n, 4] -> packed run lengths for an image of `size`."""
    from torchvision.models.detection.roi_heads import paste_masks_in_image

    width, height = size.tolist()
    rles = []
    # One by one: images may be large.
    for mask, box in zip(masks.float().cpu(), boxes.float().cpu(), strict=True):
        pasted = paste_masks_in_image(mask[None, None], box[None], (height, width))
        is_inside = pasted[:, 0] > _MASK_THRESHOLD
        rles += encode_masks(is_inside.numpy().view(np.uint8))
    return rles


def _draw_box(box: np.ndarray, size: np.ndarray) -> np.ndarray:
    """uint8[1, H, W]: 1 in the pixels that a box touches."""
    width, height = size.tolist()
    mask = np.zeros((1, height, width), np.uint8)
    left, top = np.floor(box[:2]).astype(int).tolist()
    right, bottom = np.ceil(box[2:]).astype(int).tolist()
    mask[:, top:bottom, left:right] = 1
    return mask


def _rotate_upright(mask: np.ndarray, orientation: int) -> np.ndarray:
    """Make a stored mask [H, W] upright, given its EXIF orientation 1 to 8."""
    if orientation >= 5:
        mask = mask.T
    if orientation in (2, 3, 6, 7):
        mask = np.flip(mask, 1)
    if orientation in (3, 4, 7, 8):
        mask = np.flip(mask, 0)
    return mask
