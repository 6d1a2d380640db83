"""Batches of labelled images, as data workers make them for training and for evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import Dataset

from common.classification import device_decoding
from common.classification.augmentation import Augmentation
from common.classification.image_sizes import StepSizes
from common.classification.transforms import TrainingTransform
from common.data.cache import Cache
from common.data.decoding import Picture
from common.data.device_decoding import Encoded, Jpeg, noise
from common.data.images import BrokenImage
from common.data.loader import DeviceBatch
from common.data.source import Source
from common.data.stream import Stream
from common.randomness import key_of, mix, seed_generators
from common.training import drop_path

_NEIGHBOURS = 100  # after as many broken images in a row, a black one replaces them


@dataclass
class Batch(DeviceBatch):
    """A micro-batch of B samples."""

    images: torch.Tensor  # uint8[B, 3, H, W]; in training in channels_last memory format
    labels: torch.Tensor  # int64[B], or bool[B, classes] for multi-label data
    positions: torch.Tensor  # int64[B], of the stream; sample indices in evaluation
    draws: list[torch.Tensor] = field(default_factory=list)  # one for each augmentation, in order
    drop_path: torch.Tensor | None = None  # float32[layers, B], see common.training.drop_path.draws
    readable: torch.Tensor | None = None  # bool[B] in evaluation; in training a neighbour replaces a broken image
    broken: tuple[str, ...] = ()  # images that could not be read: name and reason
    encoded: Encoded | None = None  # images that the device has yet to decode into `images`

    def complete(self) -> "Batch":
        """The batch with all of its images, decoded on its device."""
        if self.encoded is None:
            return self
        images, broken = device_decoding.decoded(self.images, self.encoded)
        return replace(self, images=images, broken=self.broken + broken, encoded=None)


@dataclass
class TrainingSamples(Dataset):
    """Positions of the stream -> `Batch`: a pure function, so that it does not matter which worker computes it."""

    source: Source
    stream: Stream
    transform: TrainingTransform  # in the worker, an image at a time; its size gives way to `image_sizes`
    seed: int
    augmentations: Sequence[Augmentation] = ()  # on the device; a worker draws their numbers
    drop_path_layers: int = 0
    cache: Cache | None = None
    decode: str = "worker"  # or "device"
    image_sizes: StepSizes | None = None  # None: that of `transform`

    def __post_init__(self) -> None:
        self.image_sizes = self.image_sizes or StepSizes((self.transform.size,))
        if self.decode == "device":
            device_decoding.check(self.transform, self.cache is not None)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """What the tracker's configuration says of the images: the largest in training."""
        return {"input_size": (3, *self.image_sizes.largest)}

    @property
    def input(self) -> str:
        """What the start table says of the images."""
        evaluated = StepSizes((self.transform.size,))
        is_same = self.image_sizes.choices == evaluated.choices
        return str(evaluated) if is_same else f"{self.image_sizes}; evaluated at {evaluated}"

    def __getitems__(self, positions: np.ndarray) -> Batch:
        transform = self._transform(self.image_sizes.of(positions[:1])[0])  # one step's positions: they have one size
        keys = mix(positions, key_of(self.seed, "augmentation")).tolist()
        images, indices, broken = [], [], []
        for index, key in zip(self.stream.indices(positions).tolist(), keys, strict=True):
            image, index = self._read(transform, index, key, broken)
            images.append(image)
            indices.append(index)
        names = [self.source.name(index) for index in indices] if self.decode == "device" else []
        batch = self._batch(transform, images, names, self.source.labels[indices], positions)
        batch.broken = tuple(broken)
        return batch

    def blank(self, count: int) -> Batch:
        """`count` samples of noise with everything that a batch of this run has: a step takes as much memory at most."""
        transform = self._transform(self.image_sizes.largest)
        if self.decode == "device":
            images = [noise(transform.size)] * count
        else:
            images = list(torch.randint(256, (count, 3, *transform.size), dtype=torch.uint8))
        labels = np.zeros((count, *self.source.labels.shape[1:]), self.source.labels.dtype)
        return self._batch(transform, images, ["noise"] * count, labels, np.arange(count))

    def shown(self, batch: Batch) -> list[tuple[str, str, list]]:
        """Of each image: its labels, with their shares where images are mixed; its name; and no boxes."""
        classes, labels = self.source.classes, batch.labels
        targets = labels.float() if labels.ndim == 2 else F.one_hot(labels, len(classes)).float()
        images = batch.images.float()
        for augmentation, draws in zip(self.augmentations, batch.draws, strict=True):
            images, targets = augmentation.apply(images, targets, draws)
        found = []
        indices = self.stream.indices(batch.positions.cpu().numpy()).tolist()
        for index, row in zip(indices, targets.tolist(), strict=True):
            shares = sorted(
                ((round(100 * share), name) for share, name in zip(row, classes, strict=True)), reverse=True
            )
            parts = [name + f": {share} %" * (share < 100) for share, name in shares if share]
            found.append(("\n".join(parts[:3]), self.source.name(index), []))
        return found

    def _transform(self, size: Sequence[int]) -> TrainingTransform:
        """To images of `size`. No policy depends on it: timm's translate by shares of the image."""
        return replace(self.transform, size=tuple(map(int, size)))

    def _batch(
        self,
        transform: TrainingTransform,
        images: list[torch.Tensor | Jpeg],
        names: list[str],
        labels: np.ndarray,
        positions: np.ndarray,
    ) -> Batch:
        """A batch of these images, with the draws for their positions."""
        images, encoded = device_decoding.stack(images, names, transform)
        draws = [torch.from_numpy(augmentation.draw(positions)) for augmentation in self.augmentations]
        batch = Batch(images, torch.from_numpy(labels), torch.from_numpy(positions), draws, encoded=encoded)
        batch.drop_path = drop_path.draws(positions, self.seed, self.drop_path_layers)
        return batch

    def _read(
        self, transform: TrainingTransform, index: int, key: int, broken: list[str]
    ) -> tuple[torch.Tensor | Jpeg, int]:
        """The transformed image at `index`, or at the next index that can be read, and the index that it comes from."""
        for distance in range(_NEIGHBOURS):
            neighbour = (index + distance) % len(self.source)
            seed_generators(key)
            try:
                return self._transformed(transform, neighbour), neighbour
            except BrokenImage as error:
                if distance == 0:  # a broken neighbour is reported when it is drawn itself
                    broken.append(f"{self.source.name(index)}: {error}")
        seed_generators(key)
        return transform(Picture(_black())), index

    def _transformed(self, transform: TrainingTransform, index: int) -> torch.Tensor | Jpeg:
        if self.decode == "device":
            return device_decoding.varied(transform, self._picture(index))
        return transform(self._picture(index))

    def _picture(self, index: int) -> Picture:
        if self.cache is None:
            return Picture(self.source.content(index))
        return self.cache.picture(index, lambda: Picture(self.source.content(index)))


@dataclass
class EvaluationSamples(Dataset):
    """Sample indices -> `Batch`. An image that can't be read is black and marked as not readable."""

    source: Source
    transform: Callable[[Image.Image], torch.Tensor]  # see common.classification.transforms.evaluation_transform
    rows: np.ndarray | None = None  # int64[n], of the source; None: all

    def batches(self, most: int) -> list[np.ndarray]:
        """The indices of all samples, or of `rows`, in order, in batches of up to `most`."""
        rows = np.arange(len(self.source)) if self.rows is None else self.rows
        return [rows[start : start + most] for start in range(0, len(rows), most)]

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
