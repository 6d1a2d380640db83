"""Batches of images with masks, as data workers make them for training and for evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from common.classification.batches import SelectClasses
from common.data.cache import Cache, EvalCache, open_cache
from common.data.decoding import resize
from common.data.images import BrokenImage
from common.data.loader import DeviceBatch
from common.data.stream import Stream
from common.detection.batches import Normalize
from common.errors import Refused
from common.segmentation import plots
from common.segmentation.augmentation import CropAugmentation
from common.segmentation.export import export_segmenter
from common.segmentation.masks import IGNORED
from common.segmentation.models import Segmenter
from common.segmentation.source import Masked
from common.segmentation.sources import load_checked_mask, load_checked_picture
from common.training import defaults, drop_path


@dataclass
class SegmentationBatch(DeviceBatch):
    """A micro-batch of B images with their masks."""

    images: torch.Tensor  # uint8[B, 3, H, W], each at the top left of the canvas
    labels: (
        torch.Tensor
    )  # int16[B, H, W] class ids or `IGNORED`; in evaluation of the image's own size
    positions: torch.Tensor  # int64[B], of the stream; image indices in evaluation
    sizes: torch.Tensor  # int64[B, 2] width and height on the canvas
    # float32[layers + 1, B], see common.training.drop_path.draw_uniforms.
    drop_path: torch.Tensor | None = None
    broken: tuple[str, ...] = ()  # images that could not be read: name and reason
    totals: torch.Tensor | None = None  # int64[2], see `Segmenter.prepare_step`


class Transforms:
    """How the images of a run become the input of its model.

    Attributes:
        augment: of a training image and its mask, in a data worker.
        short_side: to which an evaluated image is resized; 0: as it is.
        normalize: of a batch, on the device.
        stride: sides of the canvas of an evaluated image are multiples of this.
    """

    def __init__(
        self,
        model: Segmenter,
        augment: CropAugmentation,
        eval_short_side: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if augment.crop_size % model.stride:
            multiple = max(1, round(augment.crop_size / model.stride)) * model.stride
            raise Refused(
                f"--crop_size {augment.crop_size}: must be a multiple of {model.stride}, the stride of "
                f"the model's coarsest features; take {multiple}"
            )
        self.augment = augment
        self.short_side = eval_short_side
        self.normalize = Normalize(model.pretrained_cfg, dtype, device)
        self.stride = model.stride

    def describe_input(self) -> str:
        """For the start table."""
        side = self.augment.crop_size
        evaluated = f"whole images, short side {self.short_side or 'as it is'}"
        return f"crops of 3 x {side} x {side}; evaluated: {evaluated}"


@dataclass
class TrainDataset(Dataset):
    """Positions of the stream -> `SegmentationBatch`: a pure function, the same in every worker."""

    source: Masked
    stream: Stream
    augmentation: CropAugmentation
    seed: int
    drop_path_layers: int = 0
    cache: Cache | None = None
    rows: dict[str, str] = field(default_factory=dict)  # of the start table, about the flags

    unit_size = 1  # see `training.step.TrainDataset`
    has_few_shapes = True

    @classmethod
    def from_config(
        cls, config: Any, source: Masked, model: Segmenter, transforms: Transforms
    ) -> Self:
        """The samples that the flags describe, as `model` and `transforms` need them. A collective,
        with --cache.
        """
        return cls(
            source,
            stream=Stream.from_config(config, len(source), blocks=source.blocks),
            augmentation=transforms.augment,
            seed=config.seed,
            drop_path_layers=drop_path.count_drop_layers(model),
            cache=open_cache(len(source), config.cache, config.cache_folder),
            rows=defaults.suggest_pretrained(config) | {"input": transforms.describe_input()},
        )

    def describe(self) -> dict[str, str]:
        """Rows of the start table."""
        return {**self.rows, "cache": str(self.cache or "none")}

    def __getitems__(self, positions: np.ndarray) -> SegmentationBatch:
        side = self.augmentation.crop_size
        images = torch.zeros(len(positions), 3, side, side, dtype=torch.uint8)
        labels = torch.full((len(positions), side, side), IGNORED, dtype=torch.int16)
        sizes = torch.ones(len(positions), 2, dtype=torch.int64)
        broken = []
        indices = self.stream.get_indices(positions).tolist()
        for i, (index, position) in enumerate(zip(indices, positions.tolist(), strict=True)):
            try:
                pair = self.source.load_pair(index, position, self.cache)
                image, mask = self.augmentation(pair, position)
            except BrokenImage as error:  # it stays without a labelled pixel
                broken.append(f"{self.source.get_name(index)}: {error}")
                continue
            height, width = mask.shape
            images[i, :, :height, :width] = image
            labels[i, :height, :width] = mask
            sizes[i] = torch.tensor([width, height])
        return self._make_batch(images, labels, positions, sizes, tuple(broken))

    def make_noise(self, num_samples: int) -> SegmentationBatch:
        """Images and masks of noise that take as much memory as any batch of this run."""
        side = self.augmentation.crop_size
        images = torch.randint(256, (num_samples, 3, side, side), dtype=torch.uint8)
        num_classes = len(self.source.classes)
        labels = torch.randint(num_classes, (num_samples, side, side), dtype=torch.int16)
        sizes = torch.full((num_samples, 2), side)
        return self._make_batch(images, labels, np.arange(num_samples), sizes)

    def describe_images(self, batch: SegmentationBatch) -> list[tuple[str, str, list, np.ndarray]]:
        """The classes of each image by their share, its name, no boxes, and the colours of its mask."""
        descriptions: list[tuple[str, str, list, np.ndarray]] = []
        indices = self.stream.get_indices(batch.positions.cpu().numpy()).tolist()
        for index, labels in zip(indices, batch.labels.cpu(), strict=True):
            ids = labels[labels != IGNORED].long()
            counts = ids.bincount(minlength=len(self.source.classes))
            lines = []
            for class_id in counts.argsort(descending=True, stable=True)[:3].tolist():
                if counts[class_id]:
                    share = counts[class_id] / len(ids)
                    lines.append(f"{self.source.classes[class_id]}: {100 * share:.0f} %")
            text = "\n".join(lines) if lines else "no label"
            overlay = plots.make_overlay(labels.numpy())
            descriptions.append((text, self.source.get_name(index), [], overlay))
        return descriptions

    def _make_batch(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        positions: np.ndarray,
        sizes: torch.Tensor,
        broken: tuple[str, ...] = (),
    ) -> SegmentationBatch:
        uniforms = drop_path.draw_uniforms(
            positions, self.stream.global_batch_size, self.seed, self.drop_path_layers
        )
        return SegmentationBatch(
            images,
            labels,
            positions=torch.from_numpy(positions),
            sizes=sizes,
            drop_path=uniforms,
            broken=broken,
        )


class EvalDataset(Dataset):
    """Image indices -> `SegmentationBatch`: a whole image alone, so that no other changes its canvas.

    An image that can't be read has a size of 0 x 0.
    """

    cache: EvalCache | None = None  # of a run, which evaluates the same images again and again

    def __init__(self, source: Masked, transforms: Transforms) -> None:
        self.source = source
        self.short_side = transforms.short_side
        self.stride = transforms.stride
        self.normalize = transforms.normalize  # on the device, for a batch

    def __getstate__(self) -> dict:
        """A data worker that is not forked gets no tensors of the device."""
        return {name: value for name, value in vars(self).items() if name != "normalize"}

    def adapt(self, model: nn.Module) -> nn.Module:
        """`model` with logits for the classes of the data, then for the others that it knows; see
        `ModelClasses`.
        """
        model_classes = self.source.model_classes
        if model_classes is None:
            return model
        return SelectClasses(model, list(model_classes.ids) + model_classes.absent_ids)

    def batches(self, limit: int) -> list[np.ndarray]:
        """The indices of all images, one in each batch, whatever the `limit`."""
        return list(np.arange(len(self.source))[:, None])

    def export(self, model: nn.Module, train: Masked, results: dict, folder: Path) -> None:
        """See `export_segmenter`."""
        export_segmenter(model, train.classes, self.short_side, results, folder)

    def __getitems__(self, indices: Sequence[int]) -> SegmentationBatch:
        (index,) = np.asarray(indices).tolist()
        broken: tuple[str, ...] = ()
        labels = load_checked_mask(self.source, index)
        decode = partial(self._decode, index, labels)
        try:
            image = self.cache.get(index, decode) if self.cache else decode()
            height, width = image.shape[1:]
        except BrokenImage as error:
            broken = (f"{self.source.get_name(index)}: {error}",)
            image = torch.zeros(3, 1, 1, dtype=torch.uint8)
            height = width = 0
        canvas_height, canvas_width = [
            max(1, (side + self.stride - 1) // self.stride) * self.stride
            for side in (height, width)
        ]
        canvas = torch.zeros(1, 3, canvas_height, canvas_width, dtype=torch.uint8)
        canvas[0, :, :height, :width] = image[:, :height, :width]
        return SegmentationBatch(
            canvas,
            torch.from_numpy(labels)[None],
            positions=torch.tensor([index]),
            sizes=torch.tensor([[width, height]]),
            broken=broken,
        )

    def _decode(self, index: int, mask: np.ndarray) -> torch.Tensor:
        """uint8[3, H, W]. Raises `BrokenImage`, or `Refused` if the mask has another size."""
        image = load_checked_picture(self.source, index, mask).decode()
        if not self.short_side:
            return image
        height, width = image.shape[1:]
        scale = self.short_side / min(height, width)
        size = (max(1, round(height * scale)), max(1, round(width * scale)))
        return resize(image, size, "bilinear")
