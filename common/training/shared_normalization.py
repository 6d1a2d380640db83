"""Normalisation by the statistics of the samples of several processes."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_Group = dist.ProcessGroup | None
_Results = tuple[Tensor, Tensor]


def normalize_shared(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: _Group
) -> _Results:
    """Normalise [batch, channels, ...] by the mean and variance of all samples of the ranks of a
    group, which may differ.

    Returns the result, and [3, channels]: the mean, the unbiased variance, and one. A collective,
    and so is its backward.
    """
    # Inductor does not know the fused kernels, and fuses the plain form itself.
    fused = x.is_cuda and not torch.compiler.is_compiling()
    return (_FusedSharedNormalization if fused else _SharedNormalization).apply(
        x, weight, bias, eps, group
    )


class _SharedNormalization(torch.autograd.Function):
    """Parameters get this rank's share of the gradient; the gradient of `x` includes its effect on
    other ranks.

    Statistics are float32 for half precision and of `x`'s precision otherwise. Means and squared
    deviations are merged (Chan, Golub & LeVeque 1979), so that nothing cancels if the mean is
    large.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: _Group
    ) -> _Results:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, [0, *range(2, x.dim())], correction=0)
        share = torch.full_like(mean, x.numel() // x.shape[1])
        own = torch.stack([mean, variance, share])
        shares = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shares, own, group=group)
        means, variances, counts = torch.stack(shares, dim=1)  # each [ranks, channels]
        count = counts.sum(0)
        mean = (means * counts).sum(0) / count
        squares = ((variances + (means - mean).square()) * counts).sum(0)
        variance = squares / count
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.group = group
        statistics = torch.stack([mean, squares / (count - 1), torch.ones_like(mean)])
        ctx.mark_non_differentiable(statistics)
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps), statistics

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_deviation, count = ctx.saved_tensors
        others, channels = [0, *range(2, x.dim())], (1, -1) + (1,) * (x.dim() - 2)
        wide = gradient.to(mean.dtype)
        normalized = (x.to(mean.dtype) - mean.view(channels)) * inverse_deviation.view(channels)
        own = torch.stack([wide.sum(others), (wide * normalized).sum(others)])
        dist.all_reduce(total := own.clone(), group=ctx.group)
        offset, slope = (total / count).unbind()
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        x_gradient = (
            wide - offset.view(channels) - normalized * slope.view(channels)
        ) * scale.view(channels)
        _, weight_needs, bias_needs, _, _ = ctx.needs_input_grad
        return (
            x_gradient.to(x.dtype),
            own[1] if weight_needs else None,
            own[0] if bias_needs else None,
            None,
            None,
        )


class _FusedSharedNormalization(torch.autograd.Function):
    """`_SharedNormalization` by the kernels of torch.nn.SyncBatchNorm, without float32 copies of
    the activations. CUDA only.

    Unlike in torch, the host never waits for the device.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: _Group
    ) -> _Results:
        is_channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        ctx.memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
        x = x.contiguous(memory_format=ctx.memory_format)
        mean, inverse_deviation = torch.batch_norm_stats(x, eps)
        own = torch.cat([mean, inverse_deviation, mean.new_full((1,), x.numel() // x.shape[1])])
        shares = own.new_empty(dist.get_world_size(group), len(own))
        dist.all_gather_into_tensor(shares, own, group=group)
        means, inverse_deviations, counts = shares.split([len(mean), len(mean), 1], dim=1)
        # With momentum 1 the kernel writes mean and unbiased variance here.
        statistics = mean.new_ones(3, len(mean))
        mean, inverse_deviation = torch.batch_norm_gather_stats_with_counts(
            x, means, inverse_deviations, statistics[0], statistics[1], 1.0, eps, counts.flatten()
        )
        ctx.save_for_backward(x, weight, mean, inverse_deviation, counts.flatten().int())
        ctx.group = group
        ctx.mark_non_differentiable(statistics)
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse_deviation, eps), statistics

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_deviation, counts = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=ctx.memory_format)
        *sums, weight_gradient, bias_gradient = torch.batch_norm_backward_reduce(
            gradient, x, mean, inverse_deviation, weight, True, *ctx.needs_input_grad[1:3]
        )
        dist.all_reduce(total := torch.cat(sums), group=ctx.group)
        of_both = gradient, x, mean, inverse_deviation, weight, *total.chunk(2), counts
        return torch.batch_norm_backward_elemt(*of_both), weight_gradient, bias_gradient, None, None
