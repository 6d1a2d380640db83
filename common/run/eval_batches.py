"""The batches of an evaluation, as a recipe's `evaluate` gets them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from common.data.loader import DeviceBatch
from common.distributed import gather_objects


class EvalBatches:
    """This rank's share of the images to evaluate, batch by batch: on the device, and normalised.

    All ranks together have every image once, in the same batches on any layout.

    Attributes:
        device: of this rank.
        loader: of the data set, whose `source` has the images.
    """

    def __init__(
        self, loader: Any, normalize: Callable[[DeviceBatch], Tensor], accelerator: Accelerator
    ) -> None:
        """`normalize` makes the images [B, 3, H, W] of a batch that is on the device."""
        self.loader = loader
        self.device: torch.device = accelerator.device
        self._normalize = normalize
        self._accelerator = accelerator
        self._broken: list[str] = []  # images that this rank could not read: name and reason

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self._broken += batch.broken
            batch = batch.to(self.device)
            batch.images = self._normalize(batch)
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def describe_broken(self) -> list[str]:
        """A line for each image that a rank could not read. A collective, called after the last batch."""
        names_by_rank = gather_objects(self._broken)
        return [
            f"can't be read, counts as wrong: {name}" for names in names_by_rank for name in names
        ]

    def autocast(self) -> AbstractContextManager:
        """The precision of the launch, for a forward pass."""
        return self._accelerator.autocast()
