"""What every detector is: its losses, its forward pass in training, and its detections."""

from typing import Any

from torch import Tensor, nn


class Detector(nn.Module):
    """A module whose losses do not depend on how a global batch is split, and whose classes are 0..K-1 everywhere.

    `targets` has one dict per image: boxes [n, 4] left, top, right, bottom in pixels of the
    canvas; labels int64[n]; crowd bool[n]; position in the stream, int; if known, size int64[2],
    the true width and height on the canvas, and regions, a list of the rows that are crowd
    regions, so that the host need not ask the device. n may be 0. Crowd regions are neither
    foreground nor background; other boxes inside them still count.
    """

    stride: int  # sides of the canvas are multiples of this, in pixels
    backbone: nn.Module  # the part that can be compiled; the rest breaks graphs
    pretrained_cfg: dict[str, Any]  # mean and std of its images, for pixels in 0..1
    begins_with: str  # in words, which weights were loaded
    title: str  # what the start table calls it

    def counts(self, targets: list[dict], canvas: tuple[int, int]) -> Tensor:
        """int64[C]: divisors of the losses, counted in these images; to be summed over the global batch before the forward.

        Here the number of images.
        """
        return targets[0]["labels"].new_full((1,), len(targets))

    def losses(self, images: Tensor, targets: list[dict], totals: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each image [B], and its parts by name, [B] each.

        `images` [B, 3, H, W] are normalised, `totals` int64[C] is the sum of `counts` over the
        global batch. Losses are already divided: their *sum* over the global batch is its loss.
        Every parameter gets a gradient, with boxes or without. Parts carry gradients, too, and the
        loss is their sum.
        """
        raise NotImplementedError

    def forward(self, images: Tensor, targets: list[dict], totals: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """As `losses`, but the *mean* over the global batch is its loss.

        `totals` int64[C + 1] has the sums of `counts` over the global batch, and then the number
        of its images.
        """
        losses, parts = self.losses(images, targets, totals[:-1])
        return totals[-1] * losses, {name: totals[-1] * part for name, part in parts.items()}

    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """Detections of each image, best first: boxes [n, 4] in pixels of the canvas, scores [n], labels int64[n].

        `sizes` [B, 2] are the true widths and heights of the images on the canvas [B, 3, H, W].
        """
        raise NotImplementedError
