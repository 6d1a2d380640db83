"""Batches of images with boxes, padded to one canvas per step.

Padding changes features, so it must not depend on how the step is split. The canvas follows from
the sizes of the step's images. In an evaluation each image has the canvas that it would have alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from common.data.cache import Cache, EvalCache, open_cache
from common.data.decoding import Picture, resize
from common.data.images import BrokenImage
from common.data.loader import DeviceBatch, prefetch_images
from common.data.notes import Notes
from common.data.stream import Stream
from common.detection import defaults
from common.detection.data.annotated import Annotated, Sample
from common.detection.export import export
from common.detection.grouping import build_stream
from common.detection.models.detectors import ClassRemapper, Detector
from common.detection.samples import blank, nothing
from common.detection.transforms import SMALLEST, BoxAugmentation
from common.errors import Refused
from common.training import drop_path

_FRESH = 2**62  # first position that no step has: from here on, partners are drawn as fresh scenes


@dataclass
class DetectionBatch(DeviceBatch):
    """A micro-batch of B images with their boxes."""

    images: torch.Tensor  # uint8[B, 3, H, W], each at the top left of the canvas
    # One dict per image: boxes float32[n, 4] in pixels of the canvas, labels int64[n], crowd
    # bool[n], position, size, regions (rows that are crowd regions); with masks also masks uint8[n,
    # H, W].
    targets: list[dict]
    positions: torch.Tensor  # int64[B], of the stream; image indices in evaluation
    sizes: torch.Tensor  # int64[B, 2] width and height on the canvas
    # float32[layers + 1, B], see common.training.drop_path.draw_uniforms.
    drop_path: torch.Tensor | None = None
    broken: tuple[str, ...] = ()  # images that could not be read: name and reason
    totals: torch.Tensor | None = None  # divisors of losses, see `Detector.prepare_step`


class Normalize:
    """Images of a batch -> float[B, 3, H, W] with the mean and deviation of `pretrained_cfg`, 0
    around each image.
    """

    def __init__(
        self, pretrained_cfg: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype = dtype
        self._mean = torch.tensor(pretrained_cfg["mean"], device=device, dtype=dtype)[:, None, None]
        self._std = torch.tensor(pretrained_cfg["std"], device=device, dtype=dtype)[:, None, None]

    def __call__(self, batch: DetectionBatch) -> torch.Tensor:
        images = batch.images.to(self._dtype).div_(255).sub_(self._mean).div_(self._std)
        return blank_padding(images, batch.sizes)


class Transforms:
    """How the images of a run become the input of its detector.

    Attributes:
        augment: of a training image and its boxes, in a data worker.
        resize: of an evaluated image, in a data worker.
        normalize: of a batch, on the device.
        stride: sides of the canvas are multiples of this.
        fill: colour around the images, the mean of those that the detector's weights are from.
    """

    def __init__(
        self,
        model: Detector,
        augment: BoxAugmentation,
        resize: BoxAugmentation,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.augment = augment
        self.resize = resize
        self.normalize = Normalize(model.pretrained_cfg, dtype, device)
        self.stride = model.stride
        red, green, blue = (round(255 * value) for value in model.pretrained_cfg["mean"])
        self.fill = (red, green, blue)


@dataclass
class TrainDataset(Dataset):
    """Positions of the stream -> `DetectionBatch`: a pure function."""

    source: Annotated
    stream: Stream
    augmentation: BoxAugmentation
    stride: int  # sides of the canvas are multiples of this
    fill: tuple[int, int, int]  # colour around the images
    seed: int
    drop_path_layers: int = 0
    cache: Cache | None = None
    rows: dict[str, str] = field(default_factory=dict)  # of the start table, about the flags

    unit = 1  # see `training.step.TrainDataset`
    few_shapes = False

    @classmethod
    def from_config(
        cls, config: Any, source: Annotated, model: Detector, transforms: Transforms
    ) -> Self:
        """The samples that the flags describe, as `model` and `transforms` need them. A collective,
        with --cache.
        """
        stream = build_stream(config, source)
        strong_until = stream.count_steps(config.strong_epochs) * stream.global_batch_size
        small = _describe_small(config.data, source, transforms.augment)
        return cls(
            source,
            stream,
            augmentation=replace(transforms.augment, strong_until=strong_until),
            stride=transforms.stride,
            fill=transforms.fill,
            seed=config.seed,
            drop_path_layers=drop_path.count_drop_layers(model),
            cache=open_cache(len(source), config.cache, config.cache_folder),
            rows=defaults.describe(config) | {"objects": small},
        )

    def __post_init__(self) -> None:
        if self.cache and self.source.fresh:
            raise Refused(
                "--cache: every position has an image of its own, so a cache would never be read; "
                "leave it out"
            )

    def describe(self) -> dict[str, str]:
        """Rows of the start table."""
        padding = np.mean([self.padding(step) for step in range(100)])
        return {
            **self.rows,
            "cache": str(self.cache or "none"),
            "padding": f"{padding:.0%} of the canvas, first 100 steps",
        }

    def __getitems__(self, positions: np.ndarray) -> DetectionBatch:
        canvas = self.canvas(int(positions[0]) // self.stream.global_batch_size)
        samples: list[Sample] = []
        broken: list[str] = []
        prefetch_images(self.source, self.stream, positions)
        for index, position in zip(
            self.stream.get_indices(positions).tolist(), positions.tolist(), strict=True
        ):
            draws = self.augmentation.partners(position).tolist()
            partners = [(self._partner(position, draw), _FRESH + draw % _FRESH) for draw in draws]
            samples.append(self._augmented([(index, position), *partners], broken))
        return self._batch(samples, positions, canvas, tuple(broken))

    def _batch(
        self, samples: list[Sample], positions: np.ndarray, canvas, broken=()
    ) -> DetectionBatch:
        batch = _batch(samples, positions, canvas, self.fill, broken)
        batch.drop_path = drop_path.draw_uniforms(
            positions, self.stream.global_batch_size, self.seed, self.drop_path_layers
        )
        return batch

    def make_noise(self, num_samples: int) -> DetectionBatch:
        """Images of noise on the largest canvas of the first 100 steps, with as many boxes as can occur."""
        height, width = max((self.canvas(step) for step in range(100)), key=math.prod)
        samples = []
        for boxes in self._most_boxes(num_samples).tolist():
            corners = torch.rand(2, boxes, 2).sort(0).values * torch.tensor([width, height])
            image = torch.randint(256, (3, height, width), dtype=torch.uint8)
            masks = (
                torch.ones(boxes, height, width, dtype=torch.uint8)
                if self.source.has_masks
                else None
            )
            labels = torch.randint(len(self.source.classes), (boxes,))
            boxes = corners.movedim(0, 1).flatten(1)
            samples.append(Sample(image, boxes, labels, torch.zeros_like(labels).bool(), masks))
        return self._batch(samples, np.arange(num_samples), (height, width))

    def describe_images(self, batch: DetectionBatch) -> list[tuple[str, str, list]]:
        """Of each image: how many objects it has, its name, and their boxes."""
        found = []
        indices = self.stream.get_indices(batch.positions.cpu().numpy()).tolist()
        for index, target in zip(indices, batch.targets, strict=True):
            names = [self.source.classes[label] for label in target["labels"].tolist()]
            boxes = list(zip(target["boxes"].tolist(), names, strict=True))
            found.append(
                (f"{len(boxes)} object" + "s" * (len(boxes) != 1), self.source.name(index), boxes)
            )
        return found

    def _most_boxes(self, count: int) -> np.ndarray:
        """int64[count]: largest numbers of boxes, summed if a position may show several images."""
        ways = self.augmentation
        parts = 1 + 3 * (ways.mosaic > 0) + (ways.mixup > 0)
        if self.source.fresh:  # each position has an image of its own
            counts = np.max([len(self.source.sample(0, position).boxes) for position in range(64)])
        else:
            counts = np.sort(np.diff(self.source.offsets))[::-1]
        return np.resize(counts, (count, parts)).sum(1)

    def padding(self, step: int) -> float:
        """Share of the pixels of the global batch of `step` that are padding."""
        sizes = self._sizes(step)
        return 1 - sizes.prod(1).mean() / np.prod(_canvas(sizes, self.stride))

    def canvas(self, step: int) -> tuple[int, int]:
        """Height and width of the canvas of `step`, which holds all its images."""
        return _canvas(self._sizes(step), self.stride)

    def _sizes(self, step: int) -> np.ndarray:
        positions = self.stream.get_positions(step, (0, self.stream.global_batch_size))
        sizes = self.source.sizes[self.stream.get_indices(positions)]
        return self.augmentation.sizes(positions, sizes)

    def _augmented(self, places: list[tuple[int, int]], broken: list[str]) -> Sample:
        """The sample at the first of `places` (index, position), with the others as its partners."""
        position = places[0][1]
        try:
            return self.augmentation(
                [self.source.sample(*place, self.cache) for place in places], position, self.fill
            )
        except BrokenImage:
            parts, reasons = zip(*(self._decoded(*place) for place in places), strict=True)
            broken += filter(None, reasons[:1])  # a broken partner counts in its own turn
            return self.augmentation([*parts], position, self.fill)

    def _partner(self, position: int, draw: int) -> int:
        """Index of a partner for `position`: of blocks one of the same step, which are being read."""
        if not self.stream.blocks:
            return draw % len(self.source)
        place = (
            position
            - position % self.stream.global_batch_size
            + draw % self.stream.global_batch_size
        )
        return int(self.stream.get_indices(np.array([place]))[0])

    def _decoded(self, index: int, position: int) -> tuple[Sample, str]:
        """The sample, decoded whole, and ""; or an empty scene of its size, and the reason."""
        try:
            sample = self.source.sample(index, position, self.cache)
            return sample._replace(image=Picture(sample.image.decode())), ""
        except BrokenImage as error:
            width, height = self.source.sizes[index].tolist()
            none = np.zeros((0, height, width), np.uint8) if self.source.has_masks else None
            boxes = np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, bool)
            picture, size = Picture(blank(width, height, (0, 0, 0))), np.array([width, height])
            return Sample(picture, *boxes, none, size), f"{self.source.name(index)}: {error}"


class EvalDataset(Dataset):
    """Image indices of one of `batches` -> `DetectionBatch`, resized; an unreadable image is black.

    Images are decoded at their full resolution, as users of an exported detector do.
    """

    cache: EvalCache | None = None  # of a run, which evaluates the same images again and again

    def __init__(self, source: Annotated, transforms: Transforms) -> None:
        self.source = source
        self.augmentation = transforms.resize
        self.stride = transforms.stride
        self.fill = transforms.fill
        self.normalize = transforms.normalize  # on the device, for a batch

    def __getstate__(self) -> dict:
        """A data worker that is not forked gets no tensors of the device."""
        return {name: value for name, value in vars(self).items() if name != "normalize"}

    def adapt(self, model: Detector) -> nn.Module:
        """`model` with the class ids of the data, see `ModelClasses`."""
        if self.source.model_classes is None:
            return model
        return ClassRemapper(model, self.source.model_classes.ids)

    def export(self, model: Detector, train: Annotated, results: dict, folder: Path) -> None:
        """See `detection.export.export`."""
        export(model, train, self.augmentation, results, folder)

    def batches(self, limit: int) -> list[np.ndarray]:
        """All indices, in batches of up to `limit` images with the same canvas, large ones first."""
        canvases = _multiples(self._sizes(np.arange(len(self.source))), self.stride)
        order = np.lexsort((*canvases.T, -canvases.prod(1)))
        alike = np.split(order, np.flatnonzero(np.diff(canvases[order], axis=0).any(1)) + 1)
        return [
            group[start : start + limit] for group in alike for start in range(0, len(group), limit)
        ]

    def __getitems__(self, indices: np.ndarray) -> DetectionBatch:
        sizes = self._sizes(indices)
        if len(np.unique(_multiples(sizes, self.stride), axis=0)) > 1:
            raise ValueError(
                "these images have different canvases: evaluate them in batches from `batches`"
            )
        samples, broken = [], []
        for index, (width, height) in zip(indices.tolist(), sizes.tolist(), strict=True):
            decode = partial(self._decode, index, (height, width))
            try:  # whole images are large: one at a time
                image = self.cache.get(index, decode) if self.cache else decode()
            except BrokenImage as error:
                broken.append(f"{self.source.name(index)}: {error}")
                image = blank(width, height, (0, 0, 0))
            samples.append(nothing(1, 1, self.fill, False)._replace(image=image))
        return _batch(samples, indices, _canvas(sizes, self.stride), self.fill, tuple(broken))

    def _decode(self, index: int, size: tuple[int, int]) -> torch.Tensor:
        """uint8[3, *size]. Raises `BrokenImage`."""
        return resize(self.source.picture(index).decode(), size, "bilinear")

    def _sizes(self, indices: np.ndarray) -> np.ndarray:
        """int64[n, 2]: width and height of these images on their canvas."""
        return self.augmentation.sizes(indices, self.source.sizes[indices])


def _describe_small(title: str, source: Annotated, augmentation: BoxAugmentation) -> str:
    """How many objects are too small to train on even at the largest short side. Raises `Refused`
    if most are.
    """
    owners = np.repeat(np.arange(len(source)), np.diff(source.offsets))
    largest = replace(augmentation, short_sides=(max(augmentation.short_sides),))
    corners = source.boxes * np.tile(largest.scales(owners, source.sizes[owners]), 2)
    is_small = (corners[:, 2:] - corners[:, :2] < SMALLEST).any(axis=1)
    notes = Notes(title, "objects")
    first = source.name(int(owners[is_small].min(initial=0)))
    notes.leave_out(f"below {SMALLEST:g} pixel after resizing", first, is_small.sum())
    return "".join(notes.format_lines(len(owners), "raise --short_sides and --long_side"))


def blank_padding(images: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Set normalised images [B, 3, H, W] to 0 outside their `sizes` int64[B, 2] (width, height), in place."""
    height, width = (torch.arange(side, device=images.device) for side in images.shape[2:])
    inside = (height[:, None] < sizes[:, 1, None, None]) & (width < sizes[:, 0, None, None])
    return images.mul_(inside[:, None])


def _multiples(sizes: np.ndarray, stride: int) -> np.ndarray:
    return -(-sizes // stride) * stride


def _canvas(sizes: np.ndarray, stride: int) -> tuple[int, int]:
    width, height = _multiples(sizes.max(0), stride).tolist()
    return height, width


def _batch(
    samples: list[Sample],
    positions: np.ndarray,
    canvas: tuple[int, int],
    fill: tuple[int, int, int],
    broken: tuple,
) -> DetectionBatch:
    images, targets = torch.empty(len(samples), 3, *canvas, dtype=torch.uint8), []
    ground = torch.tensor(fill, dtype=torch.uint8)[:, None, None]
    for image, sample, position in zip(images, samples, positions.tolist(), strict=True):
        height, width = sample.image.shape[1:]
        image[:, :height, :width] = sample.image
        image[:, :height, width:] = ground
        image[:, height:] = ground
        target = {
            "boxes": sample.boxes,
            "labels": sample.labels,
            "crowd": sample.crowd,
            "position": position,
        }
        target |= {
            "size": torch.tensor([width, height]),
            "regions": sample.crowd.nonzero().flatten().tolist(),
        }
        if sample.masks is not None:
            target["masks"] = F.pad(sample.masks, (0, canvas[1] - width, 0, canvas[0] - height))
        targets.append(target)
    sizes = torch.stack([target["size"] for target in targets])
    return DetectionBatch(images, targets, torch.from_numpy(positions), sizes, broken=broken)
