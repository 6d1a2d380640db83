"""Operations on one image with its boxes: to tensors, geometry, padding, joining.

They know nothing of chance: `common.detection.transforms` draws what is done.
"""

import numpy as np
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from common.detection.data.annotated import Sample


def size_of(sample: Sample) -> np.ndarray:
    """int64[2]: width and height of a sample that is not of tensors yet."""
    image = sample.image
    return np.array(image.shape[1::-1] if isinstance(image, np.ndarray) else image.size)


def areas_of(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2:] - boxes[:, :2]).prod(1)


def to_tensors(sample: Sample) -> Sample:
    width, height = size_of(sample).tolist()
    return Sample(
        F.to_image(sample.image),
        tv_tensors.BoundingBoxes(sample.boxes, format="XYXY", canvas_size=(height, width)),
        torch.from_numpy(sample.labels),
        torch.from_numpy(sample.crowd),
        None if sample.masks is None else tv_tensors.Mask(sample.masks),
    )


def nothing(sample: Sample) -> Sample:
    """A sample of tensors without pixels or boxes."""
    empty = select(to_tensors(sample), np.zeros(0, int))
    return geometric(empty, F.crop, 0, 0, 0, 0)


def select(sample: Sample, rows: np.ndarray) -> Sample:
    """Only these boxes."""
    rows = torch.from_numpy(rows)
    masks = None if sample.masks is None else tv_tensors.Mask(sample.masks[rows])
    boxes = tv_tensors.wrap(sample.boxes[rows], like=sample.boxes)
    return Sample(sample.image, boxes, sample.labels[rows], sample.crowd[rows], masks)


def geometric(sample: Sample, function, *arguments, **options) -> Sample:
    """Apply a geometric function of torchvision to image, boxes and masks."""
    image, boxes, labels, crowd, masks = sample
    image, boxes = (function(part, *arguments, **options) for part in (image, boxes))
    return Sample(image, boxes, labels, crowd, None if masks is None else function(masks, *arguments, **options))


def padded(sample: Sample, left: int, top: int, width: int, height: int, fill: tuple[int, int, int]) -> Sample:
    """The sample at (left, top) on a canvas of this size."""
    h, w = sample.image.shape[1:]
    if (left, top, width, height) == (0, 0, w, h):
        return sample
    around = [left, top, width - left - w, height - top - h]
    padded = geometric(sample, F.pad, around)
    return padded._replace(image=F.pad(sample.image, around, fill=list(fill)))


def joined(image: torch.Tensor, samples: list[Sample]) -> Sample:
    """The boxes of several samples on one image."""
    _, *columns = zip(*samples, strict=True)
    masks = None if columns[3][0] is None else torch.cat(columns[3])
    return Sample(image, *(torch.cat(column) for column in columns[:3]), masks)


def finished(sample: Sample) -> Sample:
    """A sample of plain tensors, without objects whose mask has no pixel left."""
    image, boxes, labels, crowd, masks = sample
    image, boxes = image.as_subclass(torch.Tensor), boxes.as_subclass(torch.Tensor).float()
    boxes = torch.minimum(boxes.clamp(min=0), torch.tensor(image.shape[:0:-1]).repeat(2))  # scaling may round up
    if masks is None:
        return Sample(image, boxes, labels, crowd)
    masks = masks.as_subclass(torch.Tensor)
    rows = (masks.flatten(1) > 0).any(1) | crowd
    return Sample(image, boxes[rows], labels[rows], crowd[rows], masks[rows])
