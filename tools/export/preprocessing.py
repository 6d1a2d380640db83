"""Preprocessing inside an exported classifier: resizes and crops pictures as the evaluation does.

Runtimes disagree about resizing: OpenVINO ignores the anti-aliasing of ONNX's Resize, which moves
pixels by up to 80 of 255 levels, and torch's own differs from Pillow's in some pixels by one level.
So resizing is two products with matrices here, whose weights are computed inside from the picture's
size, as Pillow computes them (`Resize.c` of Pillow, resampling in 8 bits).
"""

from collections.abc import Callable, Sequence

import torch

_STEPS = 2.0**22  # of a weight: Pillow's are multiples of 1 / _STEPS


def _linear(x: torch.Tensor) -> torch.Tensor:
    return (1 - x).clamp(min=0)


def _cubic(x: torch.Tensor) -> torch.Tensor:
    """Keys' kernel with a = -0.5, for x >= 0."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


KERNELS = {"bilinear": _linear, "bicubic": _cubic}


def divide_half_even(dividend: torch.Tensor, divisor: torch.Tensor | int) -> torch.Tensor:
    """`round(dividend / divisor)` of whole numbers, as Python rounds."""
    return (2 * dividend + divisor - 1 + dividend // divisor % 2) // (2 * divisor)


class Preprocessing(torch.nn.Module):
    """Resizes, crops at the centre and normalises: uint8[N, 3, height, width] -> float32[N, 3, H, W].

    `covered` is a size (height, width) and `size` the size of the crop. timm's `crop_mode` says how
    a picture is resized: so that it covers `covered` (`center`), fills it (`squash`), or fits into
    it (`border`). What is then missing in the crop has the mean colour.
    """

    def __init__(
        self,
        size: tuple[int, int],
        covered: tuple[int, int],
        interpolation: str,
        mean: Sequence[float],
        std: Sequence[float],
        crop_mode: str | None,
    ):
        super().__init__()
        self.min_size = (1, 1) if crop_mode == "border" else covered
        self.max_size = covered if crop_mode in ("border", "squash") else (None, None)
        self.size = size
        self.covered = covered
        self.kernel = KERNELS[interpolation]
        self.register_buffer("mean", 255 * torch.tensor(mean)[:, None, None])
        self.register_buffer("std", 255 * torch.tensor(std)[:, None, None])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # Sizes are tensors: not every runtime knows all arithmetic of plain numbers.
        height = torch.full((), images.shape[2], dtype=torch.int64)
        width = torch.full((), images.shape[3], dtype=torch.int64)
        resized_height, resized_width = self.compute_size(height, width)
        horizontal = self.compute_weights(
            torch.arange(images.shape[3]), width, resized_width, self.size[1]
        )
        vertical = self.compute_weights(
            torch.arange(images.shape[2]), height, resized_height, self.size[0]
        )
        # Rounded after each direction, as Pillow does.
        pixels = self.round_levels(images.double() @ horizontal.T)
        pixels = self.round_levels(vertical @ pixels)
        is_outside = vertical.sum(1)[:, None] * horizontal.sum(1) < 0.5
        pixels += self.mean.round() * is_outside
        return (pixels.float() - self.mean) / self.std

    def compute_size(
        self, height: torch.Tensor, width: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Height and width after resizing; timm rounds otherwise for squares."""
        covered_height, covered_width = self.covered
        divide: Callable = divide_half_even
        if covered_height == covered_width and self.max_size != self.covered:
            divide = torch.floor_divide
        resized_height = divide(height * covered_width, width)
        resized_width = divide(width * covered_height, height)
        return (
            resized_height.clamp(self.min_size[0], self.max_size[0]),
            resized_width.clamp(self.min_size[1], self.max_size[1]),
        )

    def compute_weights(
        self, pixels: torch.Tensor, length: torch.Tensor, resized: torch.Tensor, num_outputs: int
    ) -> torch.Tensor:
        """float64[num_outputs, length]: how much each pixel of a line counts in each resized pixel.

        `pixels` are 0 to `length` - 1. The line has `resized` pixels afterwards; the outputs are
        those at its centre. Weights of outputs beyond the picture are 0.
        """
        # A crop is rounded to even, a border down.
        crop_start = divide_half_even(resized - num_outputs, 2)
        border_start = (resized - num_outputs + 1) // 2
        start = torch.where(resized > num_outputs, crop_start, border_start)
        outputs = torch.arange(num_outputs) + start
        # In units of half a resized pixel, so that they are whole.
        centres = (2 * outputs + 1) * length
        whole = centres // (2 * resized)
        fraction = (centres - whole * (2 * resized)).double() / (2 * resized)
        distances = (pixels - whole[:, None]).double() + (0.5 - fraction)[:, None]
        reach = (length.double() / resized).clamp(min=1)
        weights = self.kernel((distances / reach).abs())
        weights = weights / weights.sum(1, keepdim=True)
        weights = torch.floor(weights * _STEPS + 0.5) / _STEPS
        is_inside = (outputs >= 0) & (outputs < resized)
        return torch.where(is_inside[:, None], weights, 0)

    @staticmethod
    def round_levels(pixels: torch.Tensor) -> torch.Tensor:
        return torch.floor(pixels + 0.5).clamp(0, 255)
