"""How do images with boxes become batches on one canvas?

A canvas is the same for all micro-batches of a step: padding changes features, so it must not depend on how the step is
split. It is a function of the sizes of the step's images, which every worker knows without decoding them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from common import drop_path
from common.detection.annotated import Annotated
from common.detection.augmentation import BoxAugmentation
from common.images import BrokenImage
from common.loading import Movable
from common.stream import Stream


@dataclass
class DetectionBatch(Movable):
    """A micro-batch of B images with their boxes."""

    images: torch.Tensor  # uint8[B, 3, H, W], at the canvas's top left
    targets: list[
        dict
    ]  # of each: boxes float32[n, 4] in pixels of the canvas, labels int64[n], crowd bool[n], position, size
    positions: torch.Tensor  # int64[B], of the stream; image indices in evaluation
    sizes: torch.Tensor  # int64[B, 2] width and height on the canvas
    drop_path: torch.Tensor | None = None  # float32[layers, B], see common.drop_path.draws
    broken: tuple[str, ...] = ()  # images that could not be read: name and reason


@dataclass
class TrainingScenes(Dataset):
    """Positions of the stream -> `DetectionBatch`; a pure function, whichever worker computes it."""

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
            samples.append(self.augmentation(*self._read(index, position, broken), position))
        batch = _batch(samples, positions, canvas, self.fill, tuple(broken))
        batch.drop_path = drop_path.draws(positions, self.seed, self.drop_path_layers)
        return batch

    def blank(self, count: int) -> DetectionBatch:
        """A batch of `count` empty images, of the size of the first step's."""
        height, width = self.canvas(0)
        empty = torch.zeros(3, height, width, dtype=torch.uint8), *_NO_BOXES
        positions = np.arange(count)
        batch = _batch([empty] * count, positions, (height, width), self.fill, ())
        batch.drop_path = drop_path.draws(positions, self.seed, self.drop_path_layers)
        return batch

    def canvas(self, step: int) -> tuple[int, int]:
        """Height and width that hold every image of `step`."""
        positions = self.stream.positions(step, (0, self.stream.global_batch_size))
        sizes = self.source.sizes[self.stream.indices(positions)]
        return _canvas(self.augmentation.sizes(positions, sizes), self.stride)

    def _read(self, index: int, position: int, broken: list[str]):
        """The sample, or for one that can't be read an empty scene of its size, so that the step's canvas stays."""
        try:
            return self.source.sample(index, position)
        except BrokenImage as error:
            broken.append(f"{self.source.name(index)}: {error}")
            return _black(self.source.sizes[index]), *_NO_BOXES


@dataclass
class EvaluationScenes(Dataset):
    """Image indices -> `DetectionBatch`, resized without any variation; one that can't be read is black."""

    source: Annotated
    augmentation: BoxAugmentation
    stride: int
    fill: tuple[int, int, int]

    def __getitems__(self, indices: np.ndarray) -> DetectionBatch:
        canvas = _canvas(self.augmentation.sizes(indices, self.source.sizes[indices]), self.stride)
        samples, broken = [], []
        for index in indices.tolist():
            try:
                image = self.source.image(index)
            except BrokenImage as error:
                broken.append(f"{self.source.name(index)}: {error}")
                image = _black(self.source.sizes[index])
            samples.append(self.augmentation(image, *_NO_BOXES, index))
        return _batch(samples, indices, canvas, self.fill, tuple(broken))

    def to_original(self, boxes: torch.Tensor, index: int, size: torch.Tensor) -> torch.Tensor:
        """Boxes [n, 4] in pixels of the canvas -> pixels of the original image, inside it."""
        original = torch.from_numpy(self.source.sizes[index]).to(boxes)
        scaled = boxes * (original / size.to(boxes))[[0, 1, 0, 1]]
        return torch.minimum(scaled.clamp(min=0), original[[0, 1, 0, 1]])


_NO_BOXES = np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, bool)


def _black(size: np.ndarray) -> np.ndarray:
    return np.zeros((size[1], size[0], 3), np.uint8)


def _canvas(sizes: np.ndarray, stride: int) -> tuple[int, int]:
    width, height = (-(-sizes.max(0) // stride) * stride).tolist()
    return height, width


def _batch(samples, positions, canvas, fill, broken) -> DetectionBatch:
    images = torch.tensor(fill, dtype=torch.uint8)[None, :, None, None].repeat(len(samples), 1, *canvas)
    targets = []
    for place, ((pixels, boxes, labels, crowd), position) in enumerate(zip(samples, positions.tolist(), strict=True)):
        height, width = pixels.shape[1:]
        images[place, :, :height, :width] = pixels
        targets.append(
            {
                "boxes": torch.from_numpy(boxes),
                "labels": torch.from_numpy(labels),
                "crowd": torch.from_numpy(crowd),
                "position": position,
                "size": torch.tensor([width, height]),
            }
        )
    sizes = torch.stack([target["size"] for target in targets])
    return DetectionBatch(images, targets, torch.from_numpy(positions), sizes, broken)
