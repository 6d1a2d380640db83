"""Augmentation: whatever varies a batch on the device, and normalisation.

Its `sample` computes random numbers in a data worker; its `apply` uses them on the device, for a
micro-batch at once. The recipe's `build_transforms` lists the augmentations of a run in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.errors import Refused
from common.randomness import key_of, uniforms

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's and torchvision's grey
_AREA, _RATIO = (0.02, 0.33), (0.3, 3.3)  # of an erased rectangle: share, height to width
_TRIES = 10  # to draw a rectangle that fits
_OUTSIDE, _TOP, _BOTTOM, _LEFT, _RIGHT, _TARGET = range(6)  # columns of a row of `Mixing.sample`


class Augmentation:
    """One augmentation of a run. It has no state."""

    # Consecutive positions that stay in one micro-batch, from a multiple of this number on.
    unit = 1

    def sample(self, positions: np.ndarray) -> np.ndarray:
        """Random numbers for the samples at `positions` int64[B] of the stream: [B, ...] of any type.

        Runs in a data worker. It must be a pure function of the seed and of each position, see
        `common.randomness`.
        """
        return np.zeros((len(positions), 0), np.float32)

    def apply(
        self, images: torch.Tensor, targets: torch.Tensor, draws: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [B, 3, H, W] and targets [B, K] after this augmentation, in the type of the run (`--dtype`).

        `draws` is what `sample` returned. Pixels are 0..255 before `Normalize` in the list and
        normalised after it. No sample may depend on other samples, except in its `unit`.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict:
        """A worker that is not forked gets no tensors, which may be in the memory of a GPU."""
        return {
            name: value for name, value in vars(self).items() if not isinstance(value, torch.Tensor)
        }


class Normalize(Augmentation):
    """Subtracts the mean of each channel and divides by its standard deviation."""

    def __init__(
        self,
        data_config: dict,
        dtype: torch.dtype,
        device: torch.device,
        channels_last: bool = False,
    ):
        self._mean, self._std = (
            255 * torch.tensor(data_config[key], device=device, dtype=dtype)[:, None, None]
            for key in ("mean", "std")
        )
        self.dtype = dtype
        self._layout = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] of 0..255 of any type -> a new tensor in the type and memory format of the run."""
        if images.shape[1] != len(self._mean):
            raise Refused(
                f"images have {images.shape[1]} channels, the model takes {len(self._mean)}: "
                "build it with their in_chans, as docs/change_it.md does"
            )
        return (
            images.to(self.dtype, memory_format=self._layout, copy=True)
            .sub_(self._mean)
            .div_(self._std)
        )

    def apply(self, images, targets, draws):
        return self(images), targets


@dataclass
class ColorJitter(Augmentation):
    """torchvision's ColorJitter in a fixed order: they differ only where values are clamped.

    It stands before `Normalize`: images of 0..255 come in and go out.
    """

    seed: int
    strength: float

    def sample(self, positions: np.ndarray) -> np.ndarray:
        """float32[B, 3]: brightness, contrast and saturation within 1 +- `strength`, not below 0."""
        low, high = max(0.0, 1 - self.strength), 1 + self.strength
        names = ("brightness", "contrast", "saturation")
        shares = np.stack(
            [uniforms(positions, key_of(self.seed, "colours", name)) for name in names], 1
        )
        return (low + (high - low) * shares).astype(np.float32)

    def apply(self, images, targets, draws):
        brightness, contrast, saturation = draws.to(images.dtype)[:, :, None, None, None].unbind(1)
        # Filled on the device: the host would wait for a copy of torch.tensor.
        luma = torch.stack([images.new_full((1, 1), weight) for weight in _LUMA])
        images = (images * brightness).clamp(0, 255)
        grey = (images * luma).sum(1, keepdim=True).mean((2, 3), keepdim=True)
        images = torch.lerp(grey, images, contrast).clamp(0, 255)
        return torch.lerp((images * luma).sum(1, keepdim=True), images, saturation).clamp(
            0, 255
        ), targets


class RandomErasing(Augmentation):
    """Replaces a rectangle of an image by noise with `probability`. It stands after `Normalize`.

    All show parts of one table of normal noise, [3, H, W], from a pixel of their own on.
    Source: Zhong et al., "Random Erasing Data Augmentation", 2017.
    """

    def __init__(
        self,
        seed: int,
        probability: float,
        size: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.seed, self.probability, self.size = seed, probability, size
        generator = torch.Generator().manual_seed(key_of(seed, "erasing") & 0x7FFFFFFFFFFFFFFF)
        self.noise = torch.randn(3, *size, generator=generator, dtype=torch.float32).to(
            device, dtype
        )

    def sample(self, positions: np.ndarray) -> np.ndarray:
        """float32[B, 6]: top, bottom, left and right, all 0 for none; row and column where noise begins."""
        height, width = self.size
        area = (
            height
            * width
            * (_AREA[0] + (_AREA[1] - _AREA[0]) * self._uniforms(positions, "area", _TRIES))
        )
        ratio = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** self._uniforms(positions, "ratio", _TRIES)
        heights, widths = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (heights < height) & (widths < width)
        first = np.arange(len(positions)), fits.argmax(1)  # the first try that fits
        struck = (self._uniforms(positions, "whether")[:, 0] < self.probability) & fits.any(1)
        rows = np.zeros((len(positions), 6), np.float32)
        for place, name, sides, room in ((0, "top", heights, height), (2, "left", widths, width)):
            side = sides[first]
            rows[:, place] = (
                np.floor(self._uniforms(positions, name)[:, 0] * (room - side + 1)) * struck
            )
            rows[:, place + 1] = (rows[:, place] + side) * struck
        begins = np.hstack([self._uniforms(positions, name) for name in ("down", "across")])
        rows[:, 4:] = np.floor(begins * self.size)
        return rows

    def _uniforms(self, positions: np.ndarray, name: str, count: int = 1) -> np.ndarray:
        """`count` numbers for each position: float64[B, count]."""
        return uniforms(
            positions[:, None] * count + np.arange(count), key_of(self.seed, "erasing", name)
        )

    def apply(self, images, targets, draws):
        # [B, 1] each.
        top, bottom, left, right, down, across = draws.to(torch.int64)[:, :, None].unbind(1)
        height, width = images.shape[2:]
        y, x = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
        rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)  # [B, H], [B, W]
        outside = ~(rows[:, :, None] & columns[:, None, :])[:, None]  # [B, 1, H, W]
        # [3, B, H, W]
        noise = self.noise[:, ((y + down) % height)[:, :, None], ((x + across) % width)[:, None, :]]
        # In the memory format of `images`
        return torch.where(outside, images, noise.transpose(0, 1)), targets


@dataclass
class Mixing(Augmentation):
    """MixUp, CutMix, or, if both are on, one of them for each pair at even odds.

    Positions 2i and 2i + 1 of the sample stream are partners, so that pairs are the same on any
    layout. Sources: Zhang et al., "mixup", 2018; Yun et al., "CutMix", 2019.
    """

    seed: int
    mixup: float  # alpha of the Beta distribution of the shares; 0: off
    cutmix: float
    size: tuple[int, int]  # height and width of the images

    unit = 2  # neighbours are partners

    def sample(self, positions: np.ndarray) -> np.ndarray:
        """For each pair of `positions` (whole pairs): float32[B / 2, 6].

        The weight of an image's own pixels outside a box, the box (top, bottom, left, right) that
        shows the partner's, and the weight of its own target.
        """
        from scipy.special import betaincinv  # takes 0.1 s to import, which only runs that mix need

        pairs, (height, width) = positions[::2] // 2, self.size
        choice, quantile, y, x = (
            uniforms(pairs, key_of(self.seed, "mixing", name))
            for name in ("choice", "share", "y", "x")
        )
        cut = choice < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        alpha = np.where(cut, self.cutmix, self.mixup)
        share = betaincinv(alpha, alpha, quantile)  # Beta(alpha, alpha) by inversion
        half = np.sqrt(1 - share) / 2
        rows = np.zeros((len(pairs), 6), np.float32)
        rows[:, _OUTSIDE] = np.where(cut, 1, share)
        for first, last, centre, side in ((_TOP, _BOTTOM, y, height), (_LEFT, _RIGHT, x, width)):
            rows[:, first] = cut * np.floor(np.clip(centre - half, 0, 1) * side)
            rows[:, last] = cut * np.floor(np.clip(centre + half, 0, 1) * side)
        area = (rows[:, _BOTTOM] - rows[:, _TOP]) * (rows[:, _RIGHT] - rows[:, _LEFT])
        rows[:, _TARGET] = np.where(cut, 1 - area / np.float32(height * width), share)
        return rows

    def apply(self, images, targets, draws):
        rows = draws.to(images.dtype).repeat_interleave(2, dim=0)[:, :, None, None]  # [B, 6, 1, 1]
        y = torch.arange(images.shape[2], device=images.device)[:, None]
        x = torch.arange(images.shape[3], device=images.device)[None, :]
        in_rows = (y >= rows[:, _TOP]) & (y < rows[:, _BOTTOM])  # [B, H, 1]
        in_columns = (x >= rows[:, _LEFT]) & (x < rows[:, _RIGHT])  # [B, 1, W]
        # [B, 1, H, W]
        own = torch.where((in_rows & in_columns)[:, None], 0.0, rows[:, _OUTSIDE, None])
        own_target = rows[:, _TARGET, :, 0].to(targets.dtype)  # [B, 1]
        partners, partner_targets = (
            batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1) for batch in (images, targets)
        )
        return images * own + partners * (1 - own), targets * own_target + partner_targets * (
            1 - own_target
        )


class Transforms:
    """How the images of a run become the input of its model, on the device.

    Attributes:
        data_config: size, mean, standard deviation and resizing of the images, see
            `timm_models.resolve_data_config`.
        augmentations: what happens to a batch in training, in order; normalisation is one of them.
    """

    def __init__(
        self,
        data_config: dict,
        normalize: Normalize,
        augmentations: Sequence[Augmentation],
        compiled: bool = False,
    ) -> None:
        """With `compiled`, `augment` is compiled by torch."""
        self.data_config = data_config
        self.augmentations = list(augmentations)
        self._normalize = normalize
        if compiled:
            self.augment = torch.compile(self.augment, dynamic=False)  # type: ignore[method-assign]

    def augment(self, batch: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of training and its targets [B, K] -> images [B, 3, H, W] and targets after all
        augmentations.
        """
        images = batch.images
        if self.augmentations[0] is not self._normalize:
            images = images.to(self._normalize.dtype)
        for augmentation, draws in zip(self.augmentations, batch.draws, strict=True):
            images, targets = augmentation.apply(images, targets, draws)
        return images, targets

    def normalize(self, batch: Any) -> torch.Tensor:
        """A batch of an evaluation -> images [B, 3, H, W]."""
        return self._normalize(batch.images)
