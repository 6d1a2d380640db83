"""SyncBatchNorm equals BatchNorm on the whole batch, forward, backward and in its running
statistics, on uneven shares.
"""

import pytest
import torch
from torch import nn

import compat.horovod as hvd

SHARES = (1, 5, 3)  # samples per rank of the whole batch of 9


def compute_outcome(norm: nn.Module, x: torch.Tensor, first: int) -> dict[str, torch.Tensor]:
    """What two training steps and an evaluation leave. The loss weights each sample differently."""
    norm = norm.double()
    seen = {}
    nn.init.normal_(norm.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(first, first + len(x), dtype=x.dtype).view(-1, 1, 1, 1)
    for step in range(2):
        part = (x * (step + 1)).detach().requires_grad_()
        y = norm(part)
        (y.square() * weights + y.sin()).sum().backward()
        seen |= {f"y{step}": y.detach(), f"x_gradient{step}": part.grad}
    seen |= {f"{name}.grad": parameter.grad for name, parameter in norm.named_parameters()}
    seen |= {name: buffer.clone() for name, buffer in norm.named_buffers()}
    return seen | {"evaluated": norm.eval()(x).detach()}


def test_equals_batch_norm_on_the_whole_batch() -> None:
    rank = hvd.rank()
    local = slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1]))
    x = 3 + torch.randn(9, 4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for momentum in (0.1, None):
        actual = compute_outcome(hvd.SyncBatchNorm(4, momentum=momentum), x[local], local.start)
        for key, value in compute_outcome(nn.BatchNorm2d(4, momentum=momentum), x, 0).items():
            if key.endswith(".grad"):  # each rank has its share
                actual[key] = hvd.allreduce(actual[key], op=hvd.Sum)
            elif value.dim() and len(value) == 9:
                value = value[local]
            torch.testing.assert_close(
                actual[key], value, rtol=1e-10, atol=1e-10, msg=f"{momentum}: {key}"
            )
    with pytest.raises(ValueError, match="got 1 dimensions"):
        hvd.SyncBatchNorm(4)(torch.ones(4))
