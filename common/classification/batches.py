"""Batches of labelled images: what a training and an evaluation of a classifier get."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from common.classification import device_decoding, mixing
from common.classification.device_decoding import Encoded, decoder
from common.classification.device_transforms import draw_colours, draw_erasing
from common.classification.transforms import TrainingTransform
from common.config.fields import AugmentationConfig
from common.data.cache import Cache
from common.data.decoding import Picture
from common.data.images import BrokenImage
from common.data.loader import Movable
from common.data.source import Source
from common.data.stream import Stream
from common.randomness import key_of, mix, seed_generators
from common.training import drop_path

_NEIGHBOURS = 100  # how many broken images in a row are passed over before a black one stands in


@dataclass
class Batch(Movable):
    """A micro-batch of B samples."""

    images: torch.Tensor  # uint8[B, 3, H, W], of training with the colours of a pixel together (channels_last)
    labels: torch.Tensor  # int64[B], or bool[B, classes] for multi-label data
    positions: torch.Tensor  # int64[B], of the stream; sample indices in evaluation
    colours: torch.Tensor | None = None  # float32[B, 3], see common.classification.device_transforms.draw_colours
    erasing: torch.Tensor | None = None  # float32[B, 6], see common.classification.device_transforms.draw_erasing
    mixing: torch.Tensor | None = None  # float32[B / 2, 6], see common.classification.mixing.draw
    drop_path: torch.Tensor | None = None  # float32[layers, B], see common.training.drop_path.draws
    readable: torch.Tensor | None = None  # bool[B] in evaluation; in training a neighbour stands in
    broken: tuple[str, ...] = ()  # images that could not be read: name and reason
    encoded: Encoded | None = None  # images that are not in `images` yet: the device decodes them

    def complete(self) -> "Batch":
        """The batch with all of its images, decoded on the device that it is on."""
        if self.encoded is None:
            return self
        images, broken = decoder(self.images.device)(self.images, self.encoded)
        return replace(self, images=images, broken=self.broken + broken, encoded=None)


@dataclass
class TrainingSamples(Dataset):
    """Positions of the stream -> `Batch`; a pure function, whichever worker computes it."""

    source: Source
    stream: Stream
    transform: TrainingTransform
    seed: int
    varied: AugmentationConfig  # of which the transform does one part, and the device will do the other
    drop_path_layers: int = 0
    cache: Cache | None = None
    decode: str = "worker"  # or "device"

    def __post_init__(self) -> None:
        if self.decode == "device":
            device_decoding.check(self.transform, self.cache is not None)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """What the tracker's configuration says of the images."""
        return {"input_size": (3, *self.transform.size)}

    def __getitems__(self, positions: np.ndarray) -> Batch:
        keys = mix(positions, key_of(self.seed, "augmentation")).tolist()
        images, indices, broken = [], [], []
        for index, key in zip(self.stream.indices(positions).tolist(), keys, strict=True):
            image, index = self._read(index, key, broken)
            images.append(image)
            indices.append(index)
        batch = self._batch(images, self.source.labels[indices], positions)
        batch.broken = tuple(broken)
        return batch

    def blank(self, count: int) -> Batch:
        """`count` samples of noise with everything that a batch of this run has: a step of them needs a step's memory."""
        if self.decode == "device":
            images = [device_decoding.noise()] * count
        else:
            images = list(torch.randint(256, (count, 3, *self.transform.size), dtype=torch.uint8))
        labels = np.zeros((count, *self.source.labels.shape[1:]), self.source.labels.dtype)
        return self._batch(images, labels, np.arange(count))

    def _batch(
        self, images: list[torch.Tensor | device_decoding.Jpeg], labels: np.ndarray, positions: np.ndarray
    ) -> Batch:
        """These images, and what is drawn for their positions."""
        images, encoded = device_decoding.stack(images, self.transform)
        batch = Batch(images, torch.from_numpy(labels), torch.from_numpy(positions), encoded=encoded)
        varied, size = self.varied, self.transform.size
        if varied.color_jitter:
            batch.colours = torch.from_numpy(draw_colours(positions, self.seed, varied.color_jitter))
        if varied.random_erasing:
            batch.erasing = torch.from_numpy(draw_erasing(positions, self.seed, varied.random_erasing, *size))
        if varied.mixup or varied.cutmix:
            batch.mixing = torch.from_numpy(mixing.draw(positions, self.seed, varied.mixup, varied.cutmix, *size))
        if self.drop_path_layers:
            batch.drop_path = torch.as_tensor(drop_path.draws(positions, self.seed, self.drop_path_layers))
        return batch

    def _read(self, index: int, key: int, broken: list[str]) -> tuple[torch.Tensor | device_decoding.Jpeg, int]:
        """The varied image at `index`, or its nearest readable neighbour above, and the index it really has."""
        for distance in range(_NEIGHBOURS):
            neighbour = (index + distance) % len(self.source)
            seed_generators(key)
            try:
                return self._varied(neighbour), neighbour
            except BrokenImage as error:
                if distance == 0:  # a broken neighbour counts when its own turn comes
                    broken.append(f"{self.source.name(index)}: {error}")
        seed_generators(key)
        return self.transform(Picture(_black())), index

    def _varied(self, index: int) -> torch.Tensor | device_decoding.Jpeg:
        if self.decode == "device":
            return device_decoding.varied(self.transform, self._picture(index), self.source.name(index))
        return self.transform(self._picture(index))

    def _picture(self, index: int) -> Picture:
        if self.cache is None:
            return Picture(self.source.content(index))
        return self.cache.picture(index, lambda: Picture(self.source.content(index)))


@dataclass
class EvaluationSamples(Dataset):
    """Sample indices -> `Batch`; an image that can't be read is black, and marked."""

    source: Source
    transform: Callable[[Image.Image], torch.Tensor]  # see common.classification.transforms.evaluation_transform

    def batches(self, most: int) -> list[np.ndarray]:
        """The indices of all samples, in order, in batches of up to `most`."""
        return [np.arange(start, min(start + most, len(self.source))) for start in range(0, len(self.source), most)]

    def __getitems__(self, indices: np.ndarray) -> Batch:
        images, broken = [], []
        readable = torch.ones(len(indices), dtype=torch.bool)
        for place, index in enumerate(indices.tolist()):
            try:
                image = self.transform(self.source.image(index))
            except BrokenImage as error:
                broken.append(f"{self.source.name(index)}: {error}")
                image, readable[place] = self.transform(_black()), False
            images.append(image)
        labels = torch.from_numpy(self.source.labels[indices])
        return Batch(torch.stack(images), labels, torch.from_numpy(indices), readable=readable, broken=tuple(broken))


def _black() -> Image.Image:
    return Image.new("RGB", (32, 32))
