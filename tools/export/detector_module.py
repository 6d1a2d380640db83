"""Detectors that can be exported: resizing, decoding and selection of boxes are inside the module.

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
from tools.export.preprocessing import divide_half_even

# Of torch's resizing weights for 8 bit images.
_WEIGHT_BITS = 15
_MAX_SHIFT = 22


class Preprocessing(nn.Module):
    """uint8[1, 3, height, width] -> the normalised canvas float32[1, 3, H, W], and the size on it.

    Sizes and pixels equal `EvalDataset`': resized as torch resizes 8 bit images on a CPU, columns
    before rows and whole levels after each, then padded to multiples of `stride`. Resizing is two
    products with matrices that also pad: runtimes disagree about everything else, and only the
    numbers of cells become sizes that depend on the picture.
    """

    def __init__(
        self, plain: BoxAugmentation, stride: int, mean: Sequence[float], std: Sequence[float]
    ):
        super().__init__()
        self.square = plain.square
        self.stride = stride
        (self.short,) = plain.short_sides
        self.long = plain.long_side
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])

    def forward(self, picture: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The canvas, int64[2] width and height of the picture on it, and int64[2] of the picture itself."""
        height, width = picture.shape[2:]
        original = torch.stack(
            [torch.scalar_tensor(side, dtype=torch.int64) for side in (width, height)]
        )
        size = self.compute_size(original)
        canvas_width, canvas_height = self.compute_canvas_size(size)
        horizontal = compute_weights(width, original[0], canvas_width, size[0])
        vertical = compute_weights(height, original[1], canvas_height, size[1])
        pixels = round_half_up(picture.to(torch.float32) @ horizontal.T)
        pixels = round_half_up(vertical @ pixels)
        is_row_inside = torch.arange(canvas_height) < size[1]
        is_column_inside = torch.arange(canvas_width) < size[0]
        is_inside = is_row_inside[:, None] & is_column_inside
        return (pixels / 255 - self.mean) / self.std * is_inside, size, original

    def compute_size(self, original: Tensor) -> Tensor:
        """int64[2]: width and height after resizing, by `BoxAugmentation.compute_sizes`.

        That rounds products of float64. If one is exactly half a pixel it may round the other way:
        4 of 100,000 random sizes differ by one pixel.
        """
        if self.square:
            return torch.full_like(original, self.short)
        by_short = divide_half_even(original * self.short, original.min())
        by_long = divide_half_even(original * self.long, original.max())
        return torch.minimum(by_short, by_long).clamp(min=1)

    def compute_canvas_size(self, size: Tensor) -> tuple[int, int]:
        """Width and height of the canvas; the exporter knows that `stride` divides these numbers."""
        if self.square:
            return self.short, self.short
        num_columns, num_rows = ((size - 1) // self.stride + 1).tolist()
        for num_cells in (num_columns, num_rows):
            torch._check(num_cells >= 1)
            torch._check(num_cells <= (max(self.short, self.long) - 1) // self.stride + 1)
        return num_columns * self.stride, num_rows * self.stride


def compute_weights(length: int, original: Tensor, num_outputs: int, resized: Tensor) -> Tensor:
    """float32[num_outputs, length]: how much each pixel of a line counts in each resized pixel.

    Outputs from `resized` on have the weights 0. Anti-aliased, linear. As torch's, a weight is a
    multiple of the finest power of 2 with which all fit into 16 bits. `original` and `resized` are
    int64[], `length` is `original` as a size.
    """
    # In halves of a pixel of both lines, so that distances are exact.
    centres = (2 * torch.arange(num_outputs) + 1)[:, None] * original
    distances = ((2 * torch.arange(length) + 1) * resized - centres).abs()
    reach = 2 * torch.maximum(original, resized)
    weights = (1 - distances.double() / reach).clamp(min=0)
    weights = weights * (torch.arange(num_outputs) < resized)[:, None]
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-6)
    shift = torch.log2((2**_WEIGHT_BITS - 0.5) / weights.max()).floor().clamp(max=_MAX_SHIFT)
    unit = torch.exp2(shift)
    return (round_half_up(weights * unit) / unit).to(torch.float32)


def round_half_up(values: Tensor) -> Tensor:
    return torch.floor(values + 0.5)


class Exportable(nn.Module):
    """uint8[1, 3, height, width] of any size -> boxes, scores and labels, best first.

    Boxes float32[n, 4] are left, top, right, bottom in pixels of the picture, scores float32[n],
    labels int64[n]. With masks, float32[n, 28, 28] in 0..1, each on the grid of its box.
    """

    def __init__(self, detector: Detector, plain: BoxAugmentation):
        super().__init__()
        self.detector = detector
        config = detector.pretrained_cfg
        self.preprocessing = Preprocessing(plain, detector.stride, config["mean"], config["std"])
        self.prepare(max(plain.short_sides))

    def prepare(self, side: int) -> None:
        """Replace what can't be exported by what computes the same."""
        detector = self.detector
        if hasattr(detector, "_pool"):
            blank_side = 4 * detector.stride
            blank = torch.zeros(1, 3, blank_side, blank_side)
            # Sets the scales of the pooled levels.
            detector.detect(blank, torch.tensor([[blank_side, blank_side]]))
            detector._pool = _pool_all_levels
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
            (detections,) = self.detector.detect(canvas, size[None])
        scale = original.to(torch.float32) / size.to(torch.float32)
        boxes = detections["boxes"] * scale.repeat(2)
        outputs = (boxes, detections["scores"], detections["labels"])
        if "masks" in detections:
            return (*outputs, detections["masks"])
        return outputs


def _pool_all_levels(
    pool: nn.Module, features: list[Tensor], proposals: list[Tensor], _canvas: tuple[int, int]
) -> Tensor:
    """Pool the boxes of one image as `FasterRCNN._pool`, but each box from all levels.

    The box's own level is then chosen, so that boxes need not be divided by levels.
    """
    (boxes,) = proposals
    levels = pool.map_levels([boxes])[:, None, None, None]
    rois = torch.cat([torch.zeros_like(boxes[:, :1]), boxes], 1)
    pooled = []
    for maps, scale in zip(features, pool.scales, strict=False):
        maps = maps.to(boxes.dtype)
        pooled.append(roi_align(maps, rois, pool.output_size, scale, pool.sampling_ratio))
    result = pooled[0]
    for level, level_result in enumerate(pooled[1:], 1):
        result = torch.where(levels == level, level_result, result)
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
