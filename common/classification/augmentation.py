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
from common.randomness import key_of, sample_uniform

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's and torchvision's grey
# Of an erased rectangle.
_MIN_AREA = 0.02  # share of the image
_MAX_AREA = 0.33
_MIN_RATIO = 0.3  # height to width
_MAX_RATIO = 3.3
_NUM_TRIES = 10  # to draw a rectangle that fits
_OUTSIDE, _TOP, _BOTTOM, _LEFT, _RIGHT, _TARGET = range(6)  # columns of `Mixing.sample`


class Augmentation:
    """One augmentation of a run. It has no state."""

    # Consecutive positions that stay in one micro-batch, from a multiple of this number on.
    unit_size = 1

    def sample(self, positions: np.ndarray) -> np.ndarray:
        """Random numbers for the samples at `positions` int64[B] of the stream: [B, ...] of any type.

        Runs in a data worker. It must be a pure function of the seed and of each position, see
        `common.randomness`.
        """
        return np.zeros((len(positions), 0), np.float32)

    def apply(
        self, images: torch.Tensor, targets: torch.Tensor, random_params: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [B, 3, H, W] and targets [B, K] after this augmentation, in the type of the run (`--dtype`).

        `random_params` are what `sample` returned. Pixels are 0..255 before `Normalize` in the list and
        normalised after it. No sample may depend on other samples, except in its unit of `unit_size`.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict:
        """A worker that is not forked gets no tensors, which may be in the memory of a GPU."""
        state = vars(self)
        return {name: state[name] for name in state if not isinstance(state[name], torch.Tensor)}


class Normalize(Augmentation):
    """Subtracts the mean of each channel and divides by its standard deviation."""

    def __init__(
        self,
        data_config: dict,
        dtype: torch.dtype,
        device: torch.device,
        channels_last: bool = False,
    ):
        mean = torch.tensor(data_config["mean"], device=device, dtype=dtype)
        std = torch.tensor(data_config["std"], device=device, dtype=dtype)
        self._mean = 255 * mean[:, None, None]
        self._std = 255 * std[:, None, None]
        self.dtype = dtype
        self._layout = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] of 0..255 of any type -> a new tensor in the type and memory format of the run."""
        if images.shape[1] != len(self._mean):
            raise Refused(
                f"images have {images.shape[1]} channels, the model takes {len(self._mean)}: "
                "build it with their in_chans, as docs/change_it.md does"
            )
        images = images.to(self.dtype, memory_format=self._layout, copy=True)
        return images.sub_(self._mean).div_(self._std)

    def apply(self, images, targets, random_params):
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
        low = max(0.0, 1 - self.strength)
        high = 1 + self.strength
        columns = []
        for name in ("brightness", "contrast", "saturation"):
            columns.append(sample_uniform(positions, key_of(self.seed, "colours", name)))
        return (low + (high - low) * np.stack(columns, axis=1)).astype(np.float32)

    def apply(self, images, targets, random_params):
        factors = random_params.to(images.dtype)[:, :, None, None, None]
        brightness, contrast, saturation = factors.unbind(1)
        # Filled on the device: the host would wait for a copy of torch.tensor.
        luma = torch.stack([images.new_full((1, 1), weight) for weight in _LUMA])
        images = (images * brightness).clamp(0, 255)
        mean_grey = (images * luma).sum(1, keepdim=True).mean((2, 3), keepdim=True)
        images = torch.lerp(mean_grey, images, contrast).clamp(0, 255)
        grey = (images * luma).sum(1, keepdim=True)
        images = torch.lerp(grey, images, saturation).clamp(0, 255)
        return images, targets


class RandomErasing(Augmentation):
    """Replaces a rectangle of an image by noise with `probability`. It stands after `Normalize`.

    The noise of each image begins at a random pixel of one table of normal noise, [3, H, W].
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
        self.seed = seed
        self.probability = probability
        self.size = size
        generator = torch.Generator().manual_seed(key_of(seed, "erasing") & 0x7FFFFFFFFFFFFFFF)
        noise = torch.randn(3, *size, generator=generator, dtype=torch.float32)
        self.noise = noise.to(device, dtype)

    def sample(self, positions: np.ndarray) -> np.ndarray:
        """float32[B, 6]: top, bottom, left and right, all 0 for none; row and column where noise begins."""
        height, width = self.size
        heights, widths = self._draw_sizes(positions)
        fits = (heights < height) & (widths < width)
        first_fit = (np.arange(len(positions)), fits.argmax(1))
        is_drawn = self._draw(positions, "whether")[:, 0] < self.probability
        is_erased = is_drawn & fits.any(1)
        params = np.zeros((len(positions), 6), np.float32)
        params[:, 0:2] = self._draw_edges(positions, "top", heights[first_fit], height, is_erased)
        params[:, 2:4] = self._draw_edges(positions, "left", widths[first_fit], width, is_erased)
        params[:, 4] = np.floor(self._draw(positions, "down")[:, 0] * height)
        params[:, 5] = np.floor(self._draw(positions, "across")[:, 0] * width)
        return params

    def _draw_sizes(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Heights and widths in pixels of several tries: float64[B, tries] each."""
        height, width = self.size
        share = _MIN_AREA + (_MAX_AREA - _MIN_AREA) * self._draw(positions, "area", _NUM_TRIES)
        area = height * width * share
        exponent = self._draw(positions, "ratio", _NUM_TRIES)
        ratio = _MIN_RATIO * (_MAX_RATIO / _MIN_RATIO) ** exponent
        return np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))

    def _draw_edges(
        self,
        positions: np.ndarray,
        name: str,
        side: np.ndarray,
        image_side: int,
        is_erased: np.ndarray,
    ) -> np.ndarray:
        """float32[B, 2]: first and last edge on an axis of rectangles with `side` [B]; 0 for none."""
        start = np.floor(self._draw(positions, name)[:, 0] * (image_side - side + 1)) * is_erased
        start = start.astype(np.float32)
        end = (start + side) * is_erased
        return np.stack([start, end], axis=1)

    def _draw(self, positions: np.ndarray, name: str, num_draws: int = 1) -> np.ndarray:
        """Uniform random numbers for each position: float64[B, num_draws]."""
        x = positions[:, None] * num_draws + np.arange(num_draws)
        return sample_uniform(x, key_of(self.seed, "erasing", name))

    def apply(self, images, targets, random_params):
        # [B, 1] each.
        edges = random_params.to(torch.int64)[:, :, None].unbind(1)
        top, bottom, left, right, noise_row, noise_column = edges
        height, width = images.shape[2:]
        y = torch.arange(height, device=images.device)
        x = torch.arange(width, device=images.device)
        in_rows = (y >= top) & (y < bottom)  # [B, H]
        in_columns = (x >= left) & (x < right)  # [B, W]
        is_outside = ~(in_rows[:, :, None] & in_columns[:, None, :])[:, None]  # [B, 1, H, W]
        rows = ((y + noise_row) % height)[:, :, None]
        columns = ((x + noise_column) % width)[:, None, :]
        noise = self.noise[:, rows, columns].transpose(0, 1)  # [B, 3, H, W]
        # In the memory format of `images`
        return torch.where(is_outside, images, noise), targets


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

    unit_size = 2  # neighbours are partners

    def sample(self, positions: np.ndarray) -> np.ndarray:
        """For each pair of `positions` (whole pairs): float32[B / 2, 6].

        The weight of an image's pixels outside a box, the box (top, bottom, left, right) that shows
        the partner's, and the weight of the image's target.
        """
        from scipy.special import betaincinv  # takes 0.1 s to import, which only runs that mix need

        pairs = positions[::2] // 2
        height, width = self.size
        cutmix_share = float(self.cutmix > 0)
        if self.mixup and self.cutmix:
            cutmix_share = 0.5
        is_cutmix = self._draw(pairs, "choice") < cutmix_share
        alpha = np.where(is_cutmix, self.cutmix, self.mixup)
        # Beta(alpha, alpha) by inversion
        share = betaincinv(alpha, alpha, self._draw(pairs, "share"))
        half = np.sqrt(1 - share) / 2
        y = self._draw(pairs, "y")
        x = self._draw(pairs, "x")
        params = np.zeros((len(pairs), 6), np.float32)
        params[:, _OUTSIDE] = np.where(is_cutmix, 1, share)
        params[:, _TOP] = is_cutmix * np.floor(np.clip(y - half, 0, 1) * height)
        params[:, _BOTTOM] = is_cutmix * np.floor(np.clip(y + half, 0, 1) * height)
        params[:, _LEFT] = is_cutmix * np.floor(np.clip(x - half, 0, 1) * width)
        params[:, _RIGHT] = is_cutmix * np.floor(np.clip(x + half, 0, 1) * width)
        box_heights = params[:, _BOTTOM] - params[:, _TOP]
        box_widths = params[:, _RIGHT] - params[:, _LEFT]
        box_share = box_heights * box_widths / np.float32(height * width)
        params[:, _TARGET] = np.where(is_cutmix, 1 - box_share, share)
        return params

    def _draw(self, pairs: np.ndarray, name: str) -> np.ndarray:
        return sample_uniform(pairs, key_of(self.seed, "mixing", name))

    def apply(self, images, targets, random_params):
        params = random_params.to(images.dtype).repeat_interleave(2, dim=0)
        params = params[:, :, None, None]  # [B, 6, 1, 1]
        y = torch.arange(images.shape[2], device=images.device)[:, None]
        x = torch.arange(images.shape[3], device=images.device)[None, :]
        in_rows = (y >= params[:, _TOP]) & (y < params[:, _BOTTOM])  # [B, H, 1]
        in_columns = (x >= params[:, _LEFT]) & (x < params[:, _RIGHT])  # [B, 1, W]
        in_box = (in_rows & in_columns)[:, None]
        weights = torch.where(in_box, 0.0, params[:, _OUTSIDE, None])  # [B, 1, H, W]
        target_weights = params[:, _TARGET, :, 0].to(targets.dtype)  # [B, 1]
        mixed_images = images * weights + _swap_pairs(images) * (1 - weights)
        partner_targets = _swap_pairs(targets) * (1 - target_weights)
        return mixed_images, targets * target_weights + partner_targets


def _swap_pairs(batch: torch.Tensor) -> torch.Tensor:
    """Each sample's partner."""
    return batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


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
        """Apply all augmentations to a training batch and its targets [B, K].

        Returns images [B, 3, H, W] and targets.
        """
        images = batch.images
        if self.augmentations[0] is not self._normalize:
            images = images.to(self._normalize.dtype)
        for augmentation, params in zip(self.augmentations, batch.random_params, strict=True):
            images, targets = augmentation.apply(images, targets, params)
        return images, targets

    def normalize(self, batch: Any) -> torch.Tensor:
        """A batch of an evaluation -> images [B, 3, H, W]."""
        return self._normalize(batch.images)
