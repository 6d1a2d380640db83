"""Detectors that can be exported: a picture of any size -> boxes in its pixels, with resizing,
decoding and selection inside.

The sizes of the canvas depend on the picture. Only its numbers of cells are read from tensors, as
whole numbers that torch knows nothing else about. All sizes in the graph are multiples of them, so
that the exporter can tell which ones are equal.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torchvision.ops import roi_align

from common.detection import BoxAugmentation
from common.detection.models.detectors import Detector
from common.detection.models.rf_detr import RFDETR
from tools.export.preprocessing import half_even

_WEIGHT_BITS, _MOST_SHIFT = 15, 22  # of torch's resizing weights for 8 bit images


class Preprocessing(nn.Module):
    """uint8[1, 3, height, width] of any size -> the normalised canvas float32[1, 3, H, W], and the
    picture's size on it.

    Sizes and pixels equal `EvalDataset`': resized as torch resizes 8 bit images on a CPU, columns
    before rows and whole levels after each, then padded to multiples of `stride`. Resizing is two
    products with matrices that also pad: runtimes disagree about everything else, and only the
    numbers of cells become sizes that depend on the picture.
    """

    def __init__(
        self, plain: BoxAugmentation, stride: int, mean: Sequence[float], std: Sequence[float]
    ):
        super().__init__()
        self.square, self.stride = plain.square, stride
        (self.short,), self.long = plain.short_sides, plain.long_side
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])

    def forward(self, picture: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The canvas, int64[2] width and height of the picture on it, and int64[2] of the picture itself."""
        height, width = picture.shape[2:]
        original = torch.stack(
            [torch.scalar_tensor(side, dtype=torch.int64) for side in (width, height)]
        )
        size = self.resized(original)
        columns, rows = self.canvas(size)
        pixels = levels(picture.to(torch.float32) @ weights(width, original[0], columns, size[0]).T)
        pixels = levels(weights(height, original[1], rows, size[1]) @ pixels)
        inside = (torch.arange(rows) < size[1])[:, None] & (torch.arange(columns) < size[0])
        return (pixels / 255 - self.mean) / self.std * inside, size, original

    def resized(self, original: Tensor) -> Tensor:
        """int64[2]: width and height after resizing, by `BoxAugmentation.sizes`.

        That rounds products of float64. If one is exactly half a pixel it may round the other way:
        4 of 100,000 random sizes differ by one pixel.
        """
        if self.square:
            return torch.full_like(original, self.short)
        by_short = half_even(original * self.short, original.min())
        by_long = half_even(original * self.long, original.max())
        return torch.minimum(by_short, by_long).clamp(min=1)

    def canvas(self, size: Tensor) -> tuple[int, int]:
        """Width and height of the canvas, whole numbers of which the exporter knows that `stride`
        divides them.
        """
        if self.square:
            return self.short, self.short
        columns, rows = ((size - 1) // self.stride + 1).tolist()
        for cells in (columns, rows):
            torch._check(cells >= 1)
            torch._check(cells <= (max(self.short, self.long) - 1) // self.stride + 1)
        return columns * self.stride, rows * self.stride


def weights(length: int, original: Tensor, count: int, resized: Tensor) -> Tensor:
    """float32[count, length]: how much each pixel of a line counts in each of `resized` ones; 0 for
    the rest of `count`.

    Anti-aliased, linear. As torch's, a weight is a multiple of the finest power of 2 with which all
    fit into 16 bits. `original` and `resized` are int64[], `length` is `original` as a size.
    """
    # In halves of a pixel of both lines, so that distances are exact.
    centres = (2 * torch.arange(count) + 1)[:, None] * original
    distances = ((2 * torch.arange(length) + 1) * resized - centres).abs()
    reach = 2 * torch.maximum(original, resized)
    linear = (1 - distances.double() / reach).clamp(min=0)
    linear = linear * (torch.arange(count) < resized)[:, None]
    linear = linear / linear.sum(1, keepdim=True).clamp(min=1e-6)
    shift = torch.log2((2**_WEIGHT_BITS - 0.5) / linear.max()).floor().clamp(max=_MOST_SHIFT)
    unit = torch.exp2(shift)
    return (levels(linear * unit) / unit).to(torch.float32)


def levels(values: Tensor) -> Tensor:
    return torch.floor(values + 0.5)


class Exportable(nn.Module):
    """uint8[1, 3, height, width] -> boxes float32[n, 4] left, top, right, bottom in its pixels,
    scores [n], labels int64[n].

    Best first. With masks, float32[n, 28, 28] in 0..1, each on the grid of its box, or mask_logits
    float32[n, h, w], each on a grid of the whole picture.
    """

    def __init__(self, detector: Detector, plain: BoxAugmentation):
        super().__init__()
        self.detector = detector
        self.preprocessing = Preprocessing(
            plain, detector.stride, *(detector.pretrained_cfg[k] for k in ("mean", "std"))
        )
        self.prepare(max(plain.short_sides))

    def prepare(self, side: int) -> None:
        """Replace what can't be exported by what computes the same."""
        detector = self.detector
        if hasattr(detector, "_pool"):
            blank = torch.zeros(1, 3, *2 * (4 * detector.stride,))
            # Sets the scales of the pooled levels.
            detector.detect(blank, torch.tensor([blank.shape[:1:-1]]))
            detector._pool = _pooled
        if isinstance(detector, RFDETR):  # the runtimes' cubic interpolation is another one
            embeddings = detector.backbone.embeddings
            with torch.no_grad():
                tokens = torch.zeros(1, 1 + (side // detector.patch_size) ** 2, 1)
                positions = embeddings.interpolate_pos_encoding(tokens, side, side)
            embeddings.register_buffer("positions", positions)
            embeddings.interpolate_pos_encoding = lambda *_: embeddings.positions

    def forward(self, picture: Tensor) -> tuple[Tensor, ...]:
        with _traceable():
            canvas, size, original = self.preprocessing(picture)
            (found,) = self.detector.detect(canvas, size[None])
        scale = original.to(torch.float32) / size.to(torch.float32)
        masks = [found[name] for name in ("masks", "mask_logits") if name in found]
        return found["boxes"] * scale.repeat(2), found["scores"], found["labels"], *masks


def _pooled(
    pool: nn.Module, features: list[Tensor], places: list[Tensor], _canvas: tuple[int, int]
) -> Tensor:
    """As `FasterRCNN._pool` of one image, without taking places apart by levels: all are pooled
    from each level.
    """
    (boxes,) = places
    level_of, rows = (
        pool.map_levels([boxes])[:, None, None, None],
        torch.cat([torch.zeros_like(boxes[:, :1]), boxes], 1),
    )
    parts = [
        roi_align(maps.to(boxes.dtype), rows, pool.output_size, scale, pool.sampling_ratio)
        for maps, scale in zip(features, pool.scales, strict=False)
    ]
    result = parts[0]
    for level, part in enumerate(parts[1:], 1):
        result = torch.where(level_of == level, part, result)
    return result


@contextlib.contextmanager
def _traceable() -> Iterator[None]:
    """Leave out of the graph what only checks, or only matters under mixed precision."""
    with (
        patch("torch.autocast", lambda *_, **__: contextlib.nullcontext()),
        patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1"),
    ):
        yield


@torch.library.register_fake("torchvision::nms")
def _(boxes: Tensor, _scores: Tensor, _threshold: float) -> Tensor:
    """Any number of boxes may be left; torchvision tells exporters that there are at least two."""
    return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)
