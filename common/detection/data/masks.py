"""Masks of objects: COCO's polygons or run lengths, in columns until an image needs them."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F

from common.data.images import BrokenImage

KIND = {
    # polygons x, y, x, y, ..., one per visible part
    "segmentation": pa.list_(pa.list_(pa.float64())),
    "rle": pa.struct(
        # Height, width.
        {"counts": pa.list_(pa.int64()), "packed": pa.string(), "size": pa.list_(pa.int64())}
    ),
}
_CORNERS = 6  # a polygon has at least so many numbers
_FAR = 2.0  # sides of the image: a corner further out is a mistake that would take gigabytes


@dataclass(frozen=True, eq=False)
class Masks:
    """The shapes of M objects in N images. A null shape means that only the box is known."""

    shapes: pa.StructArray  # M rows with the fields of KIND, in pixels of the stored image
    turns: np.ndarray  # uint8[N]: EXIF orientation of the shapes; 1 if they are upright

    def select(self, images: np.ndarray, objects: np.ndarray) -> "Masks":
        return Masks(self.shapes.take(pa.array(objects)), self.turns[images])

    def rles(self, image: int, objects: slice, size: np.ndarray, boxes: np.ndarray) -> list[dict]:
        """COCO's packed run lengths of each object of an upright image of `size` (width, height).

        Raises `BrokenImage` if packed runs are invalid.
        """
        from faster_coco_eval.core import mask as coco_mask  # imported late: few runs need it

        turn = int(self.turns[image])
        width, height = size.tolist() if turn < 5 else size[::-1].tolist()
        found = []
        for shape, box in zip(self.shapes[objects].to_pylist(), boxes, strict=True):
            if shape is None:
                found.append(encode(_box_mask(box, size))[0])
                continue
            if shape["segmentation"]:
                rle = coco_mask.merge(coco_mask.frPyObjects(shape["segmentation"], height, width))
            elif shape["rle"]["packed"] is not None:
                rle = {"size": [height, width], "counts": shape["rle"]["packed"].encode()}
            else:
                rle = coco_mask.frPyObjects(
                    {"size": [height, width], "counts": shape["rle"]["counts"]}, height, width
                )
            if turn != 1:
                (rle,) = encode(_turned(decode([rle], np.array([width, height]))[0], turn)[None])
            found.append(rle)
        return found

    def bytes(self) -> np.ndarray:
        """uint8[...]: all shapes as bytes, for a fingerprint."""
        sink = pa.BufferOutputStream()
        batch = pa.RecordBatch.from_arrays([pa.concat_arrays([self.shapes])], ["shapes"])
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return np.concatenate([np.frombuffer(sink.getvalue(), np.uint8), self.turns])


def check_shapes(shapes: pa.StructArray, sizes: np.ndarray) -> tuple[pa.StructArray, np.ndarray]:
    """The shapes, null if one can't be drawn, and bool[M] for these. `sizes` int[M, 2] of their images."""
    polygons, rle = (pc.struct_field(shapes, name) for name in KIND)
    rings = polygons.flatten()  # all objects' polygons
    owners = pc.list_parent_indices(polygons).to_numpy()
    lengths = pc.list_value_length(rings).fill_null(0).to_numpy()
    numbers = rings.flatten().fill_null(np.nan).to_numpy(zero_copy_only=False)
    far = np.abs(numbers) > np.repeat(_FAR * sizes.max(1)[owners], lengths)
    is_polygon, wrong = np.zeros(len(shapes), bool), np.zeros(len(shapes), bool)
    is_polygon[owners] = True
    wrong[owners[(lengths < _CORNERS) | (lengths % 2 == 1)]] = True
    wrong[np.repeat(owners, lengths)[far | np.isnan(numbers)]] = True

    counts, packed, stated = (pc.struct_field(rle, name) for name in ("counts", "packed", "size"))
    runs = counts.flatten().fill_null(-1).to_numpy(zero_copy_only=False)
    owners = pc.list_parent_indices(counts).to_numpy()
    sums = np.bincount(owners, runs, len(shapes))
    is_packed = packed.is_valid().to_numpy(zero_copy_only=False)
    whole = is_packed | (sums == sizes.prod(1))
    whole[owners[runs < 0]] = False
    pairs = pc.equal(pc.list_value_length(stated), 2).fill_null(False)
    same = pairs.to_numpy(zero_copy_only=False).copy()
    said = stated.filter(pairs).flatten().to_numpy(zero_copy_only=False).reshape(-1, 2)
    same[same] = (said == sizes[same, ::-1]).all(1)
    wrong |= ~is_polygon & ~(same & whole)
    return pc.if_else(pa.array(wrong), pa.scalar(None, shapes.type), shapes), wrong


def encode(masks: np.ndarray) -> list[dict]:
    """uint8[n, H, W] of 0 and 1 -> COCO's packed run lengths."""
    from faster_coco_eval.core import mask as coco_mask

    return coco_mask.encode(np.asfortranarray(masks.transpose(1, 2, 0))) if len(masks) else []


def decode(rles: list[dict], size: np.ndarray) -> np.ndarray:
    """Packed run lengths -> uint8[n, H, W] of 0 and 1; `size`: width, height. Raises `BrokenImage`."""
    from faster_coco_eval.core import mask as coco_mask

    if not rles:
        return np.zeros((0, *size[::-1].tolist()), np.uint8)
    try:
        return coco_mask.decode(rles).transpose(2, 0, 1)
    except ValueError as error:
        raise BrokenImage(f"has an outline that can't be drawn: {error}") from None


def pasted(masks: torch.Tensor, boxes: torch.Tensor, size: np.ndarray) -> list[dict]:
    """Masks [n, m, m] in 0..1 on the grids of boxes [n, 4] -> packed run lengths for an image of `size`."""
    from torchvision.models.detection.roi_heads import paste_masks_in_image

    width, height = size.tolist()
    found = []
    # One by one: images may be large.
    for mask, box in zip(masks.float().cpu(), boxes.float().cpu(), strict=True):
        whole = paste_masks_in_image(mask[None, None], box[None], (height, width))[:, 0] > 0.5
        found += encode(whole.numpy().view(np.uint8))
    return found


def encode_logits(mask_logits: torch.Tensor, size: np.ndarray) -> list[dict]:
    """Mask logits [n, h, w] on a grid of the whole image -> packed run lengths for its `size`.

    As transformers' `post_process_instance_segmentation`.
    """
    width, height = size.tolist()
    rles = []
    # One by one: images may be large.
    for logits in mask_logits.float().cpu():
        resized = F.interpolate(logits[None, None], (height, width), mode="bilinear")
        rles += encode((resized[0] > 0).numpy().view(np.uint8))
    return rles


def _box_mask(box: np.ndarray, size: np.ndarray) -> np.ndarray:
    """uint8[1, H, W]: 1 in the pixels that a box touches."""
    mask = np.zeros((1, *size[::-1].tolist()), np.uint8)
    left, top = np.floor(box[:2]).astype(int).tolist()
    right, bottom = np.ceil(box[2:]).astype(int).tolist()
    mask[:, top:bottom, left:right] = 1
    return mask


def _turned(mask: np.ndarray, turn: int) -> np.ndarray:
    """A stored mask [H, W] made upright, given its EXIF orientation 1 to 8."""
    mask = mask.T if turn >= 5 else mask
    flips = tuple(axis for axis, turns in ((1, (2, 3, 6, 7)), (0, (3, 4, 7, 8))) if turn in turns)
    return np.flip(mask, flips)
