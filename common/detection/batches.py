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
from common.detection.samples import ceil_div, create_canvas, empty_sample
from common.detection.transforms import MIN_SIDE, BoxAugmentation
from common.errors import Refused
from common.training import drop_path

# The first position that no step has: from here on, partners are drawn as fresh scenes.
_FIRST_PARTNER = 2**62


@dataclass(frozen=True)
class _Draw:
    """A sample of the source, as it is drawn for a position."""

    index: int
    position: int  # of the stream, or from `_FIRST_PARTNER` on


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
    """Normalises a batch to float[B, 3, H, W] by the mean and deviation of `pretrained_cfg`.

    The canvas around each image is 0.
    """

    def __init__(
        self, pretrained_cfg: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype = dtype
        self._mean = torch.tensor(pretrained_cfg["mean"], device=device, dtype=dtype)[:, None, None]
        self._std = torch.tensor(pretrained_cfg["std"], device=device, dtype=dtype)[:, None, None]

    def __call__(self, batch: DetectionBatch) -> torch.Tensor:
        images = batch.images.to(self._dtype).div_(255).sub_(self._mean).div_(self._std)
        return zero_padding(images, batch.sizes)


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
    table_rows: dict[str, str] = field(default_factory=dict)  # of the start table, about the flags

    unit_size = 1  # see `training.step.TrainDataset`
    has_few_shapes = False

    @classmethod
    def from_config(
        cls, config: Any, source: Annotated, model: Detector, transforms: Transforms
    ) -> Self:
        """The samples that the flags describe, as `model` and `transforms` need them.

        With --cache, this is a collective.
        """
        stream = build_stream(config, source)
        strong_until = stream.count_steps(config.strong_epochs) * stream.global_batch_size
        table_rows = defaults.describe_settings(config)
        table_rows["objects"] = _describe_small(config.data, source, transforms.augment)
        return cls(
            source,
            stream,
            augmentation=replace(transforms.augment, strong_until=strong_until),
            stride=transforms.stride,
            fill=transforms.fill,
            seed=config.seed,
            drop_path_layers=drop_path.count_drop_layers(model),
            cache=open_cache(len(source), config.cache, config.cache_folder),
            table_rows=table_rows,
        )

    def __post_init__(self) -> None:
        if self.cache and self.source.fresh:
            raise Refused(
                "--cache: every position has an image of its own, so a cache would never be read; "
                "leave it out"
            )

    def describe(self) -> dict[str, str]:
        """Rows of the start table."""
        padding = np.mean([self.compute_padding(step) for step in range(100)])
        return {
            **self.table_rows,
            "cache": str(self.cache or "none"),
            "padding": f"{padding:.0%} of the canvas, first 100 steps",
        }

    def __getitems__(self, positions: np.ndarray) -> DetectionBatch:
        canvas = self.compute_canvas(int(positions[0]) // self.stream.global_batch_size)
        samples: list[Sample] = []
        broken: list[str] = []
        prefetch_images(self.source, self.stream, positions)
        indices = self.stream.get_indices(positions).tolist()
        for index, position in zip(indices, positions.tolist(), strict=True):
            draws = [_Draw(index, position)]
            for number in self.augmentation.draw_partners(position).tolist():
                partner = self._choose_partner(position, number)
                draws.append(_Draw(partner, _FIRST_PARTNER + number % _FIRST_PARTNER))
            samples.append(self._load_augmented(draws, broken))
        return self._collate(samples, positions, canvas, tuple(broken))

    def _collate(
        self,
        samples: list[Sample],
        positions: np.ndarray,
        canvas: tuple[int, int],
        broken: tuple[str, ...] = (),
    ) -> DetectionBatch:
        batch = _collate(samples, positions, canvas, self.fill, broken)
        batch.drop_path = drop_path.draw_uniforms(
            positions, self.stream.global_batch_size, self.seed, self.drop_path_layers
        )
        return batch

    def make_noise(self, num_samples: int) -> DetectionBatch:
        """Images of noise on the largest canvas of the first 100 steps, with as many boxes as can occur."""
        canvases = [self.compute_canvas(step) for step in range(100)]
        height, width = max(canvases, key=math.prod)
        samples = []
        for num_boxes in self._count_max_boxes(num_samples).tolist():
            corners = torch.rand(2, num_boxes, 2).sort(0).values * torch.tensor([width, height])
            image = torch.randint(256, (3, height, width), dtype=torch.uint8)
            masks = None
            if self.source.has_masks:
                masks = torch.ones(num_boxes, height, width, dtype=torch.uint8)
            labels = torch.randint(len(self.source.classes), (num_boxes,))
            boxes = corners.movedim(0, 1).flatten(1)
            crowd = torch.zeros_like(labels).bool()
            samples.append(Sample(image, boxes, labels, crowd, masks))
        return self._collate(samples, np.arange(num_samples), (height, width))

    def describe_images(self, batch: DetectionBatch) -> list[tuple[str, str, list]]:
        """Of each image: how many objects it has, its name, and their boxes."""
        descriptions = []
        indices = self.stream.get_indices(batch.positions.cpu().numpy()).tolist()
        for index, target in zip(indices, batch.targets, strict=True):
            names = [self.source.classes[label] for label in target["labels"].tolist()]
            boxes = list(zip(target["boxes"].tolist(), names, strict=True))
            noun = "object" if len(boxes) == 1 else "objects"
            descriptions.append((f"{len(boxes)} {noun}", self.source.get_name(index), boxes))
        return descriptions

    def _count_max_boxes(self, num_samples: int) -> np.ndarray:
        """int64[num_samples]: largest numbers of boxes, summed if a position may show several images."""
        num_images = 1
        if self.augmentation.mosaic > 0:
            num_images += 3
        if self.augmentation.mixup > 0:
            num_images += 1
        if self.source.fresh:  # each position has an image of its own
            num_boxes = [len(self.source.load_sample(0, position).boxes) for position in range(64)]
            box_counts = np.max(num_boxes)
        else:
            box_counts = np.sort(np.diff(self.source.offsets))[::-1]
        return np.resize(box_counts, (num_samples, num_images)).sum(1)

    def compute_padding(self, step: int) -> float:
        """Share of the pixels of the global batch of `step` that are padding."""
        sizes = self._compute_sizes(step)
        return 1 - sizes.prod(1).mean() / np.prod(_fit_canvas(sizes, self.stride))

    def compute_canvas(self, step: int) -> tuple[int, int]:
        """Height and width of the canvas of `step`, which holds all its images."""
        return _fit_canvas(self._compute_sizes(step), self.stride)

    def _compute_sizes(self, step: int) -> np.ndarray:
        positions = self.stream.get_positions(step, (0, self.stream.global_batch_size))
        sizes = self.source.sizes[self.stream.get_indices(positions)]
        return self.augmentation.compute_sizes(positions, sizes)

    def _load_augmented(self, draws: list[_Draw], broken: list[str]) -> Sample:
        """The augmented sample of the first of `draws`, with the others as its partners."""
        position = draws[0].position
        try:
            samples = [
                self.source.load_sample(draw.index, draw.position, self.cache) for draw in draws
            ]
            return self.augmentation(samples, position, self.fill)
        except BrokenImage:
            samples = []
            for i, draw in enumerate(draws):
                sample, reason = self._load_decoded(draw)
                samples.append(sample)
                if reason and i == 0:  # a broken partner counts in its own turn
                    broken.append(reason)
            return self.augmentation(samples, position, self.fill)

    def _choose_partner(self, position: int, number: int) -> int:
        """Index of a partner for `position`: of blocks one of the same step, which are being read."""
        if not self.stream.blocks:
            return number % len(self.source)
        batch_size = self.stream.global_batch_size
        first_position = position - position % batch_size
        return int(self.stream.get_indices(np.array([first_position + number % batch_size]))[0])

    def _load_decoded(self, draw: _Draw) -> tuple[Sample, str]:
        """The sample, decoded whole, and ""; or an empty scene of its size, and the reason."""
        try:
            sample = self.source.load_sample(draw.index, draw.position, self.cache)
            return sample._replace(image=Picture(sample.image.decode())), ""
        except BrokenImage as error:
            width, height = self.source.sizes[draw.index].tolist()
            masks = None
            if self.source.has_masks:
                masks = np.zeros((0, height, width), np.uint8)
            sample = Sample(
                image=Picture(create_canvas(width, height, (0, 0, 0))),
                boxes=np.zeros((0, 4), np.float32),
                labels=np.zeros(0, np.int64),
                crowd=np.zeros(0, bool),
                masks=masks,
                size=np.array([width, height]),
            )
            return sample, f"{self.source.get_name(draw.index)}: {error}"


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
        canvases = _round_up(self._compute_sizes(np.arange(len(self.source))), self.stride)
        order = np.lexsort((*canvases.T, -canvases.prod(1)))
        differs = np.diff(canvases[order], axis=0).any(1)
        batches = []
        for group in np.split(order, np.flatnonzero(differs) + 1):
            for start in range(0, len(group), limit):
                batches.append(group[start : start + limit])
        return batches

    def __getitems__(self, indices: np.ndarray) -> DetectionBatch:
        sizes = self._compute_sizes(indices)
        if len(np.unique(_round_up(sizes, self.stride), axis=0)) > 1:
            raise ValueError(
                "these images have different canvases: evaluate them in batches from `batches`"
            )
        samples = []
        broken = []
        for index, (width, height) in zip(indices.tolist(), sizes.tolist(), strict=True):
            decode = partial(self._decode, index, (height, width))
            try:  # whole images are large: one at a time
                image = self.cache.get(index, decode) if self.cache else decode()
            except BrokenImage as error:
                broken.append(f"{self.source.get_name(index)}: {error}")
                image = create_canvas(width, height, (0, 0, 0))
            samples.append(empty_sample(1, 1, self.fill, has_masks=False)._replace(image=image))
        canvas = _fit_canvas(sizes, self.stride)
        return _collate(samples, indices, canvas, self.fill, tuple(broken))

    def _decode(self, index: int, size: tuple[int, int]) -> torch.Tensor:
        """uint8[3, *size]. Raises `BrokenImage`."""
        return resize(self.source.open_picture(index).decode(), size, "bilinear")

    def _compute_sizes(self, indices: np.ndarray) -> np.ndarray:
        """int64[n, 2]: width and height of these images on their canvas."""
        return self.augmentation.compute_sizes(indices, self.source.sizes[indices])


def _describe_small(title: str, source: Annotated, augmentation: BoxAugmentation) -> str:
    """How many objects are too small to train on even at the largest short side.

    Raises `Refused` if most are.
    """
    owners = np.repeat(np.arange(len(source)), np.diff(source.offsets))
    largest = replace(augmentation, short_sides=(max(augmentation.short_sides),))
    scales = largest.compute_scales(owners, source.sizes[owners])
    corners = source.boxes * np.tile(scales, 2)
    is_small = (corners[:, 2:] - corners[:, :2] < MIN_SIDE).any(axis=1)
    notes = Notes(title, "objects")
    first = source.get_name(int(owners[is_small].min(initial=0)))
    notes.leave_out(f"below {MIN_SIDE:g} pixel after resizing", first, is_small.sum())
    return "".join(notes.format_lines(len(owners), "raise --short_sides and --long_side"))


def zero_padding(images: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Set normalised images [B, 3, H, W] to 0 outside their `sizes` int64[B, 2] (width, height), in place."""
    height, width = images.shape[2:]
    y = torch.arange(height, device=images.device)
    x = torch.arange(width, device=images.device)
    is_inside = (y[:, None] < sizes[:, 1, None, None]) & (x < sizes[:, 0, None, None])
    return images.mul_(is_inside[:, None])


def _round_up(sizes: np.ndarray, stride: int) -> np.ndarray:
    return ceil_div(sizes, stride) * stride


def _fit_canvas(sizes: np.ndarray, stride: int) -> tuple[int, int]:
    """Height and width of the smallest canvas for images of `sizes` int64[n, 2] (width, height)."""
    width, height = _round_up(sizes.max(0), stride).tolist()
    return height, width


def _collate(
    samples: list[Sample],
    positions: np.ndarray,
    canvas: tuple[int, int],
    fill: tuple[int, int, int],
    broken: tuple[str, ...],
) -> DetectionBatch:
    images = torch.empty(len(samples), 3, *canvas, dtype=torch.uint8)
    targets = []
    colour = torch.tensor(fill, dtype=torch.uint8)[:, None, None]
    for image, sample, position in zip(images, samples, positions.tolist(), strict=True):
        height, width = sample.image.shape[1:]
        image[:, :height, :width] = sample.image
        image[:, :height, width:] = colour
        image[:, height:] = colour
        target = {
            "boxes": sample.boxes,
            "labels": sample.labels,
            "crowd": sample.crowd,
            "position": position,
            "size": torch.tensor([width, height]),
            "regions": sample.crowd.nonzero().flatten().tolist(),
        }
        if sample.masks is not None:
            target["masks"] = F.pad(sample.masks, (0, canvas[1] - width, 0, canvas[0] - height))
        targets.append(target)
    sizes = torch.stack([target["size"] for target in targets])
    return DetectionBatch(images, targets, torch.from_numpy(positions), sizes, broken=broken)
