"""Compression of what an all-reduce sends.

A class of your own with these two methods can be given as `compression`, too.
"""

from typing import Any

import torch
from torch import Tensor


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:  # noqa: ARG004
        """The tensor of the type that `compress` was given."""
        return tensor


class FP16Compressor(NoneCompressor):
    """Sends floating-point tensors in 16 bits; others as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        if not tensor.dtype.is_floating_point:
            return tensor, tensor.dtype
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


Compressor = NoneCompressor  # the base class


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
