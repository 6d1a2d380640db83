"""Operations on one image with its boxes; `common.detection.transforms` draws their arguments.

`crop` turns a sample of a source into one of tensors: image uint8[3, H, W], boxes float32[n, 4],
labels int64[n], crowd bool[n], masks uint8[n, H, W]. The others take and return such samples.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from common.data.decoding import resize
from common.detection.data.annotated import Sample

# For each edge of a box the first, or the last one on its axis; quicker than np.tile.
FIRST = [0, 1, 0, 1]
LAST = [2, 3, 2, 3]


def empty_sample(width: int, height: int, fill: tuple[int, int, int], has_masks: bool) -> Sample:
    """A sample of tensors without boxes, whose image has the colour `fill`."""
    masks = None
    if has_masks:
        masks = torch.zeros(0, height, width, dtype=torch.uint8)
    return Sample(
        image=create_canvas(width, height, fill),
        boxes=torch.zeros(0, 4),
        labels=torch.zeros(0, dtype=torch.int64),
        crowd=torch.zeros(0, dtype=torch.bool),
        masks=masks,
    )


def crop(sample: Sample, region: np.ndarray, size: tuple[int, int], indices: np.ndarray) -> Sample:
    """Crop an image to `region` int[4] (left, top, right, bottom) and resize it to `size` (height, width).

    Of the objects, only `indices` int[n] remain. Edges are moved to whole pixels of what is decoded.
    """
    picture = sample.image
    full_size = np.array([picture.width, picture.height])
    cache_scale = full_size / sample.size  # 1, or less in a cache
    width, height = ((region[2:] - region[:2]) * cache_scale).tolist()
    reduction = picture.choose_reduction(height, width, size)
    decoded_scale = (cache_scale / reduction)[FIRST]
    decoded_size = ceil_div(full_size, reduction)

    edges = np.rint(region * decoded_scale).astype(int)
    edges[:2] = np.minimum(edges[:2], decoded_size - 1)
    edges[2:] = edges[2:].clip(edges[:2] + 1, decoded_size)
    left, top, right, bottom = edges.tolist()
    image = resize(picture.decode_crop(reduction, top, left, bottom, right), size, "bilinear")

    crop_box = (edges / decoded_scale).astype(np.float32)  # in pixels of the original image
    scale = (size[::-1] / (crop_box[2:] - crop_box[:2])).astype(np.float32)
    boxes = sample.boxes[indices].clip(crop_box[FIRST], crop_box[LAST])
    boxes = (boxes - crop_box[FIRST]) * scale[FIRST]
    masks = None
    if sample.masks is not None:
        left, top, right, bottom = np.rint(crop_box).astype(int).tolist()
        masks = torch.from_numpy(sample.masks[indices, top:bottom, left:right])
        masks = _resize_masks(masks, size)
    return Sample(
        image=image,
        boxes=torch.from_numpy(boxes),
        labels=torch.from_numpy(sample.labels[indices]),
        crowd=torch.from_numpy(sample.crowd[indices]),
        masks=masks,
    )


def _resize_masks(masks: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    if not len(masks):  # `interpolate` refuses a tensor without channels
        return masks.new_zeros(0, *size)
    return F.interpolate(masks[None], size, mode="nearest")[0]


def ceil_div(x: Any, divisor: int) -> Any:
    """The quotient of integers, or of an array of them, rounded up."""
    return -(-x // divisor)


def hflip(sample: Sample) -> Sample:
    """Mirror an image, its boxes and its masks left to right."""
    left, top, right, bottom = sample.boxes.unbind(1)
    width = sample.image.shape[2]
    masks = sample.masks
    if masks is not None:
        masks = masks.flip(2)
    return Sample(
        image=sample.image.flip(2),
        boxes=torch.stack([width - right, top, width - left, bottom], dim=1),
        labels=sample.labels,
        crowd=sample.crowd,
        masks=masks,
    )


def create_canvas(width: int, height: int, fill: tuple[int, int, int]) -> torch.Tensor:
    """uint8[3, height, width] in the colour `fill`."""
    return torch.tensor(fill, dtype=torch.uint8)[:, None, None].repeat(1, height, width)


def pad(
    sample: Sample, left: int, top: int, width: int, height: int, fill: tuple[int, int, int]
) -> Sample:
    """Put a sample at (left, top) on a canvas of `width` x `height` in the colour `fill`."""
    image_height, image_width = sample.image.shape[1:]
    if (left, top, width, height) == (0, 0, image_width, image_height):
        return sample
    right = left + image_width
    bottom = top + image_height
    canvas = create_canvas(width, height, fill)
    canvas[:, top:bottom, left:right] = sample.image
    boxes = sample.boxes + torch.tensor([left, top, left, top])
    masks = sample.masks
    if masks is not None:
        masks = F.pad(masks, (left, width - right, top, height - bottom))
    return sample._replace(image=canvas, boxes=boxes, masks=masks)


def concat_annotations(image: torch.Tensor, samples: list[Sample]) -> Sample:
    """Give `image` the objects of several samples."""
    masks = None
    if samples[0].masks is not None:
        masks = torch.cat([sample.masks for sample in samples])
    return Sample(
        image=image,
        boxes=torch.cat([sample.boxes for sample in samples]),
        labels=torch.cat([sample.labels for sample in samples]),
        crowd=torch.cat([sample.crowd for sample in samples]),
        masks=masks,
    )


def clip_boxes_to_image(sample: Sample) -> Sample:
    """Move the edges of boxes into the image: scaling may round up."""
    height, width = sample.image.shape[1:]
    limits = torch.tensor([width, height, width, height])
    return sample._replace(boxes=torch.minimum(sample.boxes.clamp(min=0), limits))


def remove_empty_masks(sample: Sample) -> Sample:
    """Leave out objects whose mask has no pixel, but not crowd regions."""
    if sample.masks is None:
        return sample
    has_pixels = (sample.masks.flatten(1) > 0).any(1)
    is_used = sample.crowd | has_pixels
    return Sample(
        image=sample.image,
        boxes=sample.boxes[is_used],
        labels=sample.labels[is_used],
        crowd=sample.crowd[is_used],
        masks=sample.masks[is_used],
    )
