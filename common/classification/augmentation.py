"""Augmentation: the base class of everything that varies a batch on the device, and normalisation.

An augmentation is one class. Its `sample` computes random numbers in a data worker, its `apply` uses them on the device, for
a whole micro-batch at once: there, element-wise work costs next to nothing, while a worker would need as long for it as for
decoding. The recipe's `build_augmentation` lists the augmentations of a run in order. One of your own is a class like this
and one more line in that list:

    @dataclass
    class RandomGreyscale(Augmentation):
        seed: int
        probability: float

        def sample(self, positions):
            return uniforms(positions, key_of(self.seed, "greyscale")) < self.probability  # bool[B]

        def apply(self, images, targets, draws):
            grey = images.mean(1, keepdim=True)
            return torch.where(draws[:, None, None, None], grey, images), targets
"""

import numpy as np
import torch


class Augmentation:
    """One augmentation of a run. It has no state: batches are the same on any layout and after any resume."""

    unit = 1  # consecutive positions that it needs in one micro-batch, from a multiple of this number on

    def sample(self, positions: np.ndarray) -> np.ndarray:
        """Random numbers for the samples at `positions` int64[B] of the stream: [B, ...] of any type.

        Runs in a data worker. It must be a pure function of the seed and of each position (see `common.randomness`), because
        other layouts split a global batch differently.
        """
        return np.zeros((len(positions), 0), np.float32)

    def apply(
        self, images: torch.Tensor, targets: torch.Tensor, draws: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [B, 3, H, W] and targets [B, K] after this augmentation, in the type of the run (`--dtype`).

        Runs on the device, where `draws` is what `sample` returned. Pixels are 0..255 before `Normalize` in the list and
        normalised after it. No sample may depend on other samples of its micro-batch, except in its `unit`.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict:
        """A worker that is not forked gets no tensors, which may be in the memory of a GPU."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, torch.Tensor)}


class Normalize(Augmentation):
    """Subtracts the mean of each channel and divides by its standard deviation."""

    def __init__(self, data_config: dict, dtype: torch.dtype, device: torch.device, channels_last: bool = False):
        self._mean, self._std = (
            255 * torch.tensor(data_config[key], device=device, dtype=dtype)[:, None, None] for key in ("mean", "std")
        )
        self._dtype = dtype
        self._layout = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] of 0..255 of any type -> a new tensor in the type and memory format of the run."""
        return images.to(self._dtype, memory_format=self._layout, copy=True).sub_(self._mean).div_(self._std)

    def apply(self, images, targets, draws):
        return self(images), targets
