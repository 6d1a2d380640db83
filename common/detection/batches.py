"""Batches of images with boxes, padded to one canvas.

All micro-batches of a step have the same canvas: padding changes features, so it must not depend on how the step is
split. The canvas is a function of the sizes of the step's images, which every worker knows without decoding them. In an
evaluation each image has the canvas that it would have alone.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as transforms

from common.data.images import BrokenImage
from common.data.loader import Movable
from common.data.stream import Stream
from common.detection.data import outlines
from common.detection.data.annotated import Annotated, Sample
from common.detection.transforms import BoxAugmentation
from common.training import drop_path

_FRESH = 2**62  # first position that no step has: from here on partners of mosaic and MixUp are drawn as fresh scenes


@dataclass
class DetectionBatch(Movable):
    """A micro-batch of B images with their boxes."""

    images: torch.Tensor  # uint8[B, 3, H, W], each at the top left of the canvas
    # One dict per image: boxes float32[n, 4] in pixels of the canvas, labels int64[n], crowd bool[n], position, size, regions
    # (list of the rows that are crowd regions); from some sources also masks uint8[n, H, W].
    targets: list[dict]
    positions: torch.Tensor  # int64[B], of the stream; image indices in evaluation
    sizes: torch.Tensor  # int64[B, 2] width and height on the canvas
    drop_path: torch.Tensor | None = None  # float32[layers, B], see common.training.drop_path.draws
    broken: tuple[str, ...] = ()  # images that could not be read: name and reason
    totals: torch.Tensor | None = None  # what losses are divided by, over the global batch


@dataclass
class TrainingScenes(Dataset):
    """Positions of the stream -> `DetectionBatch`: a pure function, so any worker may compute it."""

    source: Annotated
    stream: Stream
    augmentation: BoxAugmentation
    stride: int  # sides of the canvas are multiples of this
    fill: tuple[int, int, int]  # colour around the images
    seed: int
    drop_path_layers: int = 0

    def __getitems__(self, positions: np.ndarray) -> DetectionBatch:
        canvas = self.canvas(int(positions[0]) // self.stream.global_batch_size)
        samples, broken = [], []
        for index, position in zip(self.stream.indices(positions).tolist(), positions.tolist(), strict=True):
            parts = [self._read(index, position, broken)]
            parts += [
                self._read(
                    draw % len(self.source), _FRESH + draw % _FRESH, []
                )  # a broken partner counts in its own turn
                for draw in self.augmentation.partners(position).tolist()
            ]
            samples.append(self.augmentation(parts, position, self.fill))
        batch = _batch(samples, positions, canvas, self.fill, tuple(broken))
        batch.drop_path = drop_path.draws(positions, self.seed, self.drop_path_layers)
        return batch

    def blank(self, count: int) -> DetectionBatch:
        """`count` images of noise on the largest canvas of the first hundred steps, with the most boxes that can occur."""
        height, width = max((self.canvas(step) for step in range(100)), key=math.prod)
        samples = []
        for boxes in self._most_boxes(count).tolist():
            corners = torch.rand(2, boxes, 2).sort(0).values * torch.tensor([width, height])
            image = torch.randint(256, (3, height, width), dtype=torch.uint8)
            masks = torch.ones(boxes, height, width, dtype=torch.uint8) if self.source.has_masks else None
            labels = torch.randint(len(self.source.classes), (boxes,))
            samples.append(
                Sample(image, corners.movedim(0, 1).flatten(1), labels, torch.zeros_like(labels).bool(), masks)
            )
        positions = np.arange(count)
        batch = _batch(samples, positions, (height, width), self.fill, ())
        batch.drop_path = drop_path.draws(positions, self.seed, self.drop_path_layers)
        return batch

    def _most_boxes(self, count: int) -> np.ndarray:
        """int64[count]: numbers of boxes, of the images that have the most; with mosaic and MixUp, sums over several images."""
        parts = 1 + 3 * (self.augmentation.mosaic > 0) + (self.augmentation.mixup > 0)
        if self.source.fresh:  # each position has an image of its own
            most = np.max([len(self.source.sample(0, position).boxes) for position in range(64)])
        else:
            most = np.sort(np.diff(self.source.offsets))[::-1]
        return np.resize(most, (count, parts)).sum(1)

    def padding(self, step: int) -> float:
        """Share of the pixels of the global batch of `step` that are padding."""
        sizes = self._sizes(step)
        return 1 - sizes.prod(1).mean() / np.prod(_canvas(sizes, self.stride))

    def canvas(self, step: int) -> tuple[int, int]:
        """Height and width of the canvas of `step`, which holds all its images."""
        return _canvas(self._sizes(step), self.stride)

    def _sizes(self, step: int) -> np.ndarray:
        positions = self.stream.positions(step, (0, self.stream.global_batch_size))
        sizes = self.source.sizes[self.stream.indices(positions)]
        return self.augmentation.sizes(positions, sizes)

    def _read(self, index: int, position: int, broken: list[str]) -> Sample:
        """The sample; if it can't be read, an empty scene of its size, so that the step's canvas stays the same."""
        try:
            return self.source.sample(index, position)
        except BrokenImage as error:
            broken.append(f"{self.source.name(index)}: {error}")
            return _empty(self.source.sizes[index], self.source.has_masks)


@dataclass
class EvaluationScenes(Dataset):
    """Image indices -> `DetectionBatch`, resized without augmentation; an image that can't be read is black.

    A batch must be one of `batches`: padding changes what is detected, so all images of a batch have the same canvas.
    """

    source: Annotated
    augmentation: BoxAugmentation
    stride: int
    fill: tuple[int, int, int]

    def batches(self, most: int) -> list[np.ndarray]:
        """The indices of all images, in batches of up to `most` images with the same canvas, large ones first."""
        canvases = _multiples(self._sizes(np.arange(len(self.source))), self.stride)
        order = np.lexsort((*canvases.T, -canvases.prod(1)))
        alike = np.split(order, np.flatnonzero(np.diff(canvases[order], axis=0).any(1)) + 1)
        return [group[start : start + most] for group in alike for start in range(0, len(group), most)]

    def __getitems__(self, indices: np.ndarray) -> DetectionBatch:
        sizes = self._sizes(indices)
        if len(np.unique(_multiples(sizes, self.stride), axis=0)) > 1:
            raise ValueError("these images have different canvases: evaluate them in batches from `batches`")
        samples, broken = [], []
        for index, (width, height) in zip(indices.tolist(), sizes.tolist(), strict=True):
            try:
                image = self.source.image(index)
            except BrokenImage as error:
                broken.append(f"{self.source.name(index)}: {error}")
                image = _empty(self.source.sizes[index]).image
            pixels = transforms.resize(transforms.to_image(image), [height, width], antialias=True)
            samples.append(Sample(pixels, *map(torch.from_numpy, _NO_BOXES)))
        return _batch(samples, indices, _canvas(sizes, self.stride), self.fill, tuple(broken))

    def _sizes(self, indices: np.ndarray) -> np.ndarray:
        return self.augmentation.sizes(indices, self.source.sizes[indices])

    def restored(self, found: dict[str, torch.Tensor], index: int, size: torch.Tensor) -> dict:
        """Detections on the canvas -> with boxes in pixels of the original image, and masks as `rles` of its pixels."""
        found = found | {"boxes": self.to_original(found["boxes"], index, size)}
        if "masks" in found:
            found["rles"] = outlines.pasted(found.pop("masks"), found["boxes"], self.source.sizes[index])
        return found

    def to_original(self, boxes: torch.Tensor, index: int, size: torch.Tensor) -> torch.Tensor:
        """Boxes [n, 4] in pixels of the canvas -> pixels of the original image."""
        original = torch.from_numpy(self.source.sizes[index]).to(boxes)
        return boxes * (original / size.to(boxes))[[0, 1, 0, 1]]


_NO_BOXES = np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, bool)


def _empty(size: np.ndarray, masks: bool = False) -> Sample:
    """A black image of `size` (width, height)."""
    width, height = size.tolist()
    none = np.zeros((0, height, width), np.uint8) if masks else None
    return Sample(np.zeros((height, width, 3), np.uint8), *_NO_BOXES, none)


def blank_padding(images: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Set normalised images [B, 3, H, W] to 0 outside their `sizes` int64[B, 2] (width, height), in place, on the device."""
    height, width = (torch.arange(side, device=images.device) for side in images.shape[2:])
    inside = (height[:, None] < sizes[:, 1, None, None]) & (width < sizes[:, 0, None, None])
    return images.mul_(inside[:, None])


def _multiples(sizes: np.ndarray, stride: int) -> np.ndarray:
    """`sizes` rounded up to multiples of `stride`."""
    return -(-sizes // stride) * stride


def _canvas(sizes: np.ndarray, stride: int) -> tuple[int, int]:
    width, height = _multiples(sizes.max(0), stride).tolist()
    return height, width


def _batch(samples, positions, canvas, fill, broken) -> DetectionBatch:
    images = torch.tensor(fill, dtype=torch.uint8)[None, :, None, None].repeat(len(samples), 1, *canvas)
    targets = []
    for place, (sample, position) in enumerate(zip(samples, positions.tolist(), strict=True)):
        height, width = sample.image.shape[1:]
        images[place, :, :height, :width] = sample.image
        targets.append(
            {
                "boxes": sample.boxes,
                "labels": sample.labels,
                "crowd": sample.crowd,
                "position": position,
                "size": torch.tensor([width, height]),
                "regions": sample.crowd.nonzero().flatten().tolist(),
            }
        )
        if sample.masks is not None:
            targets[-1]["masks"] = F.pad(sample.masks, (0, canvas[1] - width, 0, canvas[0] - height))
    sizes = torch.stack([target["size"] for target in targets])
    return DetectionBatch(images, targets, torch.from_numpy(positions), sizes, broken=broken)
