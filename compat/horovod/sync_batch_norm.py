"""SyncBatchNorm: batch normalisation by the statistics of all ranks' samples together."""

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from common.training.shared_normalization import normalize_shared
from compat.horovod import engine, world


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of [batch, channels, ...] over the batches of all ranks.

    Unlike Horovod's it works on the CPU, too. Ranks may hold different numbers of samples. The
    result, its gradients and the running statistics equal BatchNorm's on the whole batch. Weight
    and bias get this rank's share of the gradient, as all parameters do: the DistributedOptimizer
    sums up. In training every rank has to call it, in the same order; so does the backward. In
    evaluation the running statistics are used, and nothing is communicated.

    Args: as torch.nn.BatchNorm2d.
    """

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm takes [batch, channels, ...], got {x.dim()} dimensions"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(x)
        if world.size() == 1 or not (self.training or self.running_mean is None):
            return super().forward(x)
        y, (mean, variance, _) = normalize_shared(x, self.weight, self.bias, self.eps, _get_group())
        if self.training and self.running_mean is not None:
            assert self.running_var is not None and self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            momentum = self.momentum
            if momentum is None:
                momentum = 1 / int(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
        return y


def _get_group() -> dist.ProcessGroup:
    """The group over which the layers talk; the first call is a collective.

    It has no other users, since its collectives follow the layers' order, which negotiated ones
    don't.
    """
    world = engine.current()
    if world.layers is None:
        world.layers = dist.new_group(use_local_synchronization=True)
    return world.layers
