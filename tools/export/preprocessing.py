"""Preprocessing inside an exported classifier: resizes and crops a picture of any size as the
evaluation does.

Runtimes disagree about resizing: OpenVINO ignores the anti-aliasing of ONNX's Resize, which moves
pixels by up to 80 of 255 levels, and torch's own differs from Pillow's in some pixels by one level.
So resizing is two products with matrices here, whose weights are computed inside from the picture's
size, as Pillow computes them (`Resize.c` of Pillow, resampling in 8 bits).
"""

import torch

_STEPS = 2.0**22  # of a weight: Pillow's are multiples of 1 / _STEPS


def _linear(x: torch.Tensor) -> torch.Tensor:
    return (1 - x).clamp(min=0)


def _cubic(x: torch.Tensor) -> torch.Tensor:
    """Keys' kernel with a = -0.5, for x >= 0."""
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


KERNELS = {"bilinear": _linear, "bicubic": _cubic}


def half_even(dividend: torch.Tensor, divisor: torch.Tensor | int) -> torch.Tensor:
    """`round(dividend / divisor)` of whole numbers, as Python rounds."""
    return (2 * dividend + divisor - 1 + dividend // divisor % 2) // (2 * divisor)


class Preprocessing(torch.nn.Module):
    """uint8[N, 3, height, width] of any size -> float32[N, 3, H, W]: resized, cropped at the
    centre, normalised.

    `covered` is a size (height, width) and `size` the size of the crop. timm's `crop_mode` says how
    a picture is resized: so that it covers `covered` (`center`), fills it (`squash`), or fits into
    it (`border`). What is then missing in the crop has the mean colour.
    """

    def __init__(
        self,
        size: tuple[int, int],
        covered: tuple[int, int],
        interpolation: str,
        mean,
        std,
        crop_mode: str | None,
    ):
        super().__init__()
        self.smallest = (1, 1) if crop_mode == "border" else covered
        self.largest = covered if crop_mode in ("border", "squash") else (None, None)
        self.size, self.covered, self.kernel = size, covered, KERNELS[interpolation]
        self.register_buffer("mean", 255 * torch.tensor(mean)[:, None, None])
        self.register_buffer("std", 255 * torch.tensor(std)[:, None, None])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # Sizes are tensors: not every runtime knows all arithmetic of plain numbers.
        height, width = (torch.full((), side, dtype=torch.int64) for side in images.shape[2:])
        rows, columns = self.resized(height, width)
        horizontal = self.weights(torch.arange(images.shape[3]), width, columns, self.size[1])
        vertical = self.weights(torch.arange(images.shape[2]), height, rows, self.size[0])
        # Rounded after each direction, as Pillow does.
        pixels = self.levels(images.double() @ horizontal.T)
        pixels = self.levels(vertical @ pixels)
        pixels += self.mean.round() * (vertical.sum(1)[:, None] * horizontal.sum(1) < 0.5)
        return (pixels.float() - self.mean) / self.std

    def resized(
        self, height: torch.Tensor, width: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Height and width after resizing; timm rounds otherwise for squares."""
        top, side = self.covered
        divided = torch.floor_divide if top == side and self.largest != self.covered else half_even
        rows = divided(height * side, width).clamp(self.smallest[0], self.largest[0])
        columns = divided(width * top, height).clamp(self.smallest[1], self.largest[1])
        return rows, columns

    def weights(
        self, pixels: torch.Tensor, length: torch.Tensor, resized: torch.Tensor, count: int
    ) -> torch.Tensor:
        """float64[count, length]: how much each of `pixels` of a line counts in each of `count`
        resized ones, at the centre.

        0 beyond the picture.
        """
        # A crop is rounded to even, a border down.
        start = torch.where(
            resized > count, half_even(resized - count, 2), (resized - count + 1) // 2
        )
        places = torch.arange(count) + start
        # In units of half a resized pixel, so that they are whole.
        centres = (2 * places + 1) * length
        whole = centres // (2 * resized)
        part = (centres - whole * (2 * resized)).double() / (2 * resized)
        distances = (pixels - whole[:, None]).double() + (0.5 - part)[:, None]
        reach = (length.double() / resized).clamp(min=1)
        weights = self.kernel((distances / reach).abs())
        weights = weights / weights.sum(1, keepdim=True)
        weights = torch.floor(weights * _STEPS + 0.5) / _STEPS
        return torch.where(((places >= 0) & (places < resized))[:, None], weights, 0)

    @staticmethod
    def levels(pixels: torch.Tensor) -> torch.Tensor:
        return torch.floor(pixels + 0.5).clamp(0, 255)
