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
    """Normalise [batch, channels, ...] by the mean and variance of the samples of all ranks of a group.

    Ranks may have different numbers of samples. Returns the result, and [3, channels]: the mean,
    the unbiased variance, and one. A collective, and so is its backward.
    """
    # Inductor does not know the fused kernels, and fuses the plain form itself.
    if x.is_cuda and not torch.compiler.is_compiling():
        return _FusedSharedNormalization.apply(x, weight, bias, eps, group)
    return _SharedNormalization.apply(x, weight, bias, eps, group)


class _SharedNormalization(torch.autograd.Function):
    """The plain form, of torch's operators.

    Parameters get this rank's share of the gradient; the gradient of `x` includes its effect on
    other ranks. Statistics are float32 for half precision and of `x`'s precision otherwise. Means
    and squared deviations are merged (Chan, Golub & LeVeque 1979), so that nothing cancels if the
    mean is large.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: _Group
    ) -> _Results:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, _get_sample_dims(x), correction=0)
        count = torch.full_like(mean, x.numel() // x.shape[1])
        rank_statistics = torch.stack([mean, variance, count])
        gathered = [torch.empty_like(rank_statistics) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, rank_statistics, group=group)
        means, variances, counts = torch.stack(gathered, dim=1)  # each [ranks, channels]
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
        sample_dims = _get_sample_dims(x)
        channels = (1, -1) + (1,) * (x.dim() - 2)  # the shape of [channels] beside `x`
        wide = gradient.to(mean.dtype)
        normalized = (x.to(mean.dtype) - mean.view(channels)) * inverse_deviation.view(channels)
        bias_gradient = wide.sum(sample_dims)
        weight_gradient = (wide * normalized).sum(sample_dims)
        totals = torch.stack([bias_gradient, weight_gradient])
        dist.all_reduce(totals, group=ctx.group)
        offset, slope = (totals / count).unbind()
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        centered = wide - offset.view(channels) - normalized * slope.view(channels)
        x_gradient = (centered * scale.view(channels)).to(x.dtype)
        _, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        return (
            x_gradient,
            weight_gradient if needs_weight else None,
            bias_gradient if needs_bias else None,
            None,
            None,
        )


def _get_sample_dims(x: Tensor) -> list[int]:
    """All dimensions but the channels."""
    dims = list(range(x.dim()))
    dims.remove(1)
    return dims


class _FusedSharedNormalization(torch.autograd.Function):
    """`_SharedNormalization` by the kernels of torch.nn.SyncBatchNorm. CUDA only.

    It makes no float32 copies of the activations. Unlike in torch, the host never waits for the
    device.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: _Group
    ) -> _Results:
        is_channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        ctx.memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
        x = x.contiguous(memory_format=ctx.memory_format)
        mean, inverse_deviation = torch.batch_norm_stats(x, eps)
        num_channels = len(mean)
        count = mean.new_full((1,), x.numel() // x.shape[1])
        rank_statistics = torch.cat([mean, inverse_deviation, count])
        gathered = rank_statistics.new_empty(dist.get_world_size(group), len(rank_statistics))
        dist.all_gather_into_tensor(gathered, rank_statistics, group=group)
        sizes = [num_channels, num_channels, 1]
        means, inverse_deviations, counts = gathered.split(sizes, dim=1)
        # With momentum 1 the kernel writes mean and unbiased variance here.
        statistics = mean.new_ones(3, num_channels)
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
        _, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        # Sums of the gradient and of gradient * (x - mean), then the gradients of the parameters.
        reduced = torch.batch_norm_backward_reduce(
            gradient, x, mean, inverse_deviation, weight, True, needs_weight, needs_bias
        )
        sum_dy, sum_dy_xmu, weight_gradient, bias_gradient = reduced
        totals = torch.cat([sum_dy, sum_dy_xmu])
        dist.all_reduce(totals, group=ctx.group)
        sum_dy, sum_dy_xmu = totals.chunk(2)
        x_gradient = torch.batch_norm_backward_elemt(
            gradient, x, mean, inverse_deviation, weight, sum_dy, sum_dy_xmu, counts
        )
        return x_gradient, weight_gradient, bias_gradient, None, None
