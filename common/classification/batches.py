"""Batches of labelled images, as data workers make them for training and for evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from common.classification.augmentation import Augmentation, Transforms
from common.classification.balancing import compute_sample_weights
from common.classification.transforms import EvalTransform, TrainingTransform
from common.data.cache import Cache, EvalCache, open_cache
from common.data.decoding import Picture
from common.data.images import BrokenImage, open_rgb
from common.data.loader import DeviceBatch, prefetch_images
from common.data.source import Source
from common.data.stream import Stream
from common.errors import Refused
from common.randomness import key_of, mix, seed_generators
from common.training import defaults, drop_path, timm_models

_MAX_NEIGHBOURS = 100  # after as many broken images in a row, a black one replaces them


@dataclass
class Batch(DeviceBatch):
    """A micro-batch of B samples."""

    images: torch.Tensor  # uint8[B, C, H, W]; in training in channels_last memory format
    labels: torch.Tensor  # int64[B], or bool[B, classes] for multi-label data
    positions: torch.Tensor  # int64[B], of the stream; sample indices in evaluation
    # Of each augmentation, in order.
    random_params: list[torch.Tensor] = field(default_factory=list)
    # float32[layers + 1, B], see common.training.drop_path.draw_uniforms.
    drop_path: torch.Tensor | None = None
    # bool[B] in evaluation; in training a neighbour replaces an unreadable image.
    readable: torch.Tensor | None = None
    broken: tuple[str, ...] = ()  # images that could not be read: name and reason


@dataclass
class TrainDataset(Dataset):
    """Positions of the stream -> `Batch`: a pure function, the same in every worker."""

    source: Source
    stream: Stream
    transform: TrainingTransform  # in the worker, an image at a time
    seed: int
    # On the device; a worker samples their random numbers.
    augmentations: Sequence[Augmentation] = ()
    drop_path_layers: int = 0
    cache: Cache | None = None
    # Of the start table, about the configuration.
    table_rows: dict[str, str] = field(default_factory=dict)

    has_few_shapes = True  # see `training.step.TrainDataset`

    @classmethod
    def from_config(
        cls, config: Any, source: Source, model: torch.nn.Module, transforms: Transforms
    ) -> Self:
        """The samples that the flags describe, as `model` and `transforms` need them.

        With --cache, this is a collective.
        """
        channels = transforms.data_config["input_size"][0]
        needs_colours = any(
            [config.augment, config.cache, config.color_jitter, config.random_erasing]
        )
        if channels != 3 and needs_colours:
            raise Refused(
                "--augment, --cache, --color_jitter and --random_erasing are made for 3 "
                f"channels, the model takes {channels}: leave them out"
            )
        weights = compute_sample_weights(config.sampling, source.labels, len(source.classes))
        stream = Stream.from_config(
            config, len(source), weights, repeats=config.repeats, blocks=source.blocks
        )
        return cls(
            source,
            stream=stream,
            transform=TrainingTransform(config, transforms.data_config),
            seed=config.seed,
            augmentations=transforms.augmentations,
            drop_path_layers=drop_path.count_drop_layers(model),
            cache=open_cache(len(source), config.cache, config.cache_folder),
            table_rows=defaults.suggest_pretrained(config),
        )

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """For the tracker's configuration."""
        return {"input_size": self.transform.input_size}

    @property
    def unit_size(self) -> int:
        """Consecutive positions that stay together: the pairs of MixUp and CutMix."""
        return max((augmentation.unit_size for augmentation in self.augmentations), default=1)

    def describe(self) -> dict[str, str]:
        """Rows of the start table."""
        input_size = " x ".join(str(side) for side in self.transform.input_size)
        return {**self.table_rows, "cache": str(self.cache or "none"), "input": input_size}

    def __getitems__(self, positions: np.ndarray) -> Batch:
        keys = mix(positions, key_of(self.seed, "augmentation")).tolist()
        images = []
        indices = []
        broken: list[str] = []
        prefetch_images(self.source, self.stream, positions)
        for index, key in zip(self.stream.get_indices(positions).tolist(), keys, strict=True):
            image, index = self._read(index, key, broken)
            images.append(image)
            indices.append(index)
        return self._collate(images, self.source.labels[indices], positions, tuple(broken))

    def make_noise(self, num_samples: int) -> Batch:
        """Samples of noise that take as much memory as any batch of this run."""
        shape = (num_samples, *self.transform.input_size)
        images = list(torch.randint(256, shape, dtype=torch.uint8))
        labels = np.zeros((num_samples, *self.source.labels.shape[1:]), self.source.labels.dtype)
        return self._collate(images, labels, np.arange(num_samples))

    def describe_images(self, batch: Batch) -> list[tuple[str, str, list]]:
        """Labels of each image, with their shares where images are mixed; its name; and no boxes."""
        labels = batch.labels
        if labels.ndim == 1:
            labels = F.one_hot(labels, len(self.source.classes))
        targets = labels.float()
        images = batch.images.float()
        for augmentation, params in zip(self.augmentations, batch.random_params, strict=True):
            images, targets = augmentation.apply(images, targets, params)
        descriptions: list[tuple[str, str, list]] = []
        indices = self.stream.get_indices(batch.positions.cpu().numpy()).tolist()
        for index, percentages in zip(indices, (100 * targets).round().int(), strict=True):
            label = self._format_label(percentages)
            descriptions.append((label, self.source.get_name(index), []))
        return descriptions

    def _format_label(self, percentages: torch.Tensor) -> str:
        """The largest classes of an image, a line for each, with their shares if it is mixed."""
        shares = []
        for class_id in percentages.nonzero()[:, 0].tolist():
            shares.append((percentages[class_id].item(), self.source.classes[class_id]))
        lines = []
        for percentage, class_name in sorted(shares, reverse=True)[:3]:
            lines.append(class_name if percentage >= 100 else f"{class_name}: {percentage} %")
        return "\n".join(lines)

    def _collate(
        self, images: list[torch.Tensor], labels: np.ndarray, positions: np.ndarray, broken=()
    ) -> Batch:
        stacked = torch.stack([image.permute(1, 2, 0) for image in images])  # in channels_last
        random_params = [augmentation.sample(positions) for augmentation in self.augmentations]
        return Batch(
            images=stacked.permute(0, 3, 1, 2),
            labels=torch.from_numpy(labels),
            positions=torch.from_numpy(positions),
            random_params=[torch.from_numpy(params) for params in random_params],
            drop_path=drop_path.draw_uniforms(
                positions, self.stream.global_batch_size, self.seed, self.drop_path_layers
            ),
            broken=broken,
        )

    def _read(self, index: int, key: int, broken: list[str]) -> tuple[torch.Tensor, int]:
        """The transformed image at `index`, or the next one that can be read, and its index."""
        for distance in range(_MAX_NEIGHBOURS):
            neighbour = (index + distance) % len(self.source)
            seed_generators(key)
            try:
                return self.transform(self._open_picture(neighbour)), neighbour
            except BrokenImage as error:
                if distance == 0:  # a broken neighbour is reported when it is drawn itself
                    broken.append(f"{self.source.get_name(index)}: {error}")
        return torch.zeros(self.transform.input_size, dtype=torch.uint8), index

    def _open_picture(self, index: int) -> Picture:
        if not self.cache:
            return Picture(self.source.get_content(index))
        return self.cache.get(index, lambda: Picture(self.source.get_content(index)))


class EvalDataset(Dataset):
    """Image indices -> `Batch`. An image that can't be read is black, and not `readable`."""

    cache: EvalCache | None = None  # of a run, which evaluates the same images again and again

    def __init__(self, source: Source, transforms: Transforms) -> None:
        self.source = source
        self.data_config = transforms.data_config
        self.transform = EvalTransform(transforms.data_config)
        self.normalize = transforms.normalize  # on the device, for a batch

    def __getstate__(self) -> dict:
        """A data worker that is not forked gets no tensors of the device."""
        return {name: value for name, value in vars(self).items() if name != "normalize"}

    def adapt(self, model: nn.Module) -> nn.Module:
        """`model` with logits for the classes of the data, then for the others that it knows.

        See `ModelClasses`.
        """
        if self.source.model_classes is None:
            return model
        class_ids = list(self.source.model_classes.ids) + get_other_class_ids(self.source)
        return SelectClasses(model, class_ids)

    def batches(self, limit: int) -> list[np.ndarray]:
        """The indices of all samples, in order, in batches of up to `limit`."""
        indices = np.arange(len(self.source))
        return [indices[start : start + limit] for start in range(0, len(indices), limit)]

    def export(self, model: nn.Module, train: Source, results: dict, folder: Path) -> None:
        """See `timm_models.export_classifier`."""
        timm_models.export_classifier(
            model, train.classes, self.data_config, train.multi_label, results, folder
        )

    def __getitems__(self, indices: np.ndarray) -> Batch:
        self.source.prefetch(indices)
        images = []
        broken = []
        readable = torch.ones(len(indices), dtype=torch.bool)
        for i, index in enumerate(indices.tolist()):
            decode = partial(self._decode, index)
            try:
                image = self.cache.get(index, decode) if self.cache else decode()
            except BrokenImage as error:
                broken.append(f"{self.source.get_name(index)}: {error}")
                image = torch.zeros(self.data_config["input_size"], dtype=torch.uint8)
                readable[i] = False
            images.append(image)
        return Batch(
            images=torch.stack(images),
            labels=torch.from_numpy(self.source.labels[indices]),
            positions=torch.from_numpy(indices),
            readable=readable,
            broken=tuple(broken),
        )

    def _decode(self, index: int) -> torch.Tensor:
        """uint8[C, H, W]. Raises `BrokenImage`."""
        content = self.source.get_content(index)
        if isinstance(content, torch.Tensor):
            channels = [Image.fromarray(channel.numpy()) for channel in content]
            return torch.cat([self.transform(channel) for channel in channels])
        return self.transform(open_rgb(content))


class SelectClasses(nn.Module):
    """A classifier with some of the classes of `model`: images -> logits [B, len(class_ids)]."""

    def __init__(self, model: nn.Module, class_ids: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.class_ids = list(class_ids)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)[:, self.class_ids]


def get_other_class_ids(source: Source) -> list[int]:
    """The evaluated model's class ids that the data do not have: to predict one of them is an error.

    Empty for multi-label data, where each class is a decision of its own.
    """
    if source.model_classes is None or source.multi_label:
        return []
    return source.model_classes.absent_ids
