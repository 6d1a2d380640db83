"""SyncBatchNorm equals BatchNorm on the whole batch, forward, backward and in its running statistics, on uneven shares."""

import pytest
import torch
from torch import nn

import compat.horovod as hvd

SHARES = (1, 5, 3)  # samples per rank of the whole batch of 9
OPTIONS = {
    "plain": {},
    "average": {"momentum": None},
    "bare": {"affine": False},
    "batch only": {"track_running_stats": False},
}


def samples(dimensions: int) -> torch.Tensor:
    """[9, 4, ...] with a mean far from zero, float64."""
    shape = (9, 4, 5, 3)[:dimensions]
    return 3 + torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(dimensions))


def outcome(norm: nn.Module, x: torch.Tensor, first: int) -> dict[str, torch.Tensor]:
    """What two training steps and an evaluation leave. The loss weights each sample differently."""
    norm = norm.double()
    if norm.affine:
        nn.init.normal_(norm.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(0))
    seen = {}
    for step in range(2):
        part = (x * (step + 1)).detach().requires_grad_()
        y = norm(part)
        weights = torch.arange(first, first + len(x), dtype=x.dtype).view(-1, *[1] * (x.dim() - 1))
        (y.square() * weights + y.sin()).sum().backward()
        seen |= {f"y{step}": y.detach(), f"x_gradient{step}": part.grad}
    for name, parameter in norm.named_parameters():
        seen[f"{name}.grad"] = parameter.grad
    if norm.track_running_stats:
        seen |= {name: buffer.clone() for name, buffer in norm.named_buffers()}
        norm.eval()
        seen["evaluated"] = norm(x).detach()
    return seen


def equals_batch_norm_on_the_whole_batch() -> None:
    rank = hvd.rank()
    own = slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1]))
    for name, options in OPTIONS.items():
        for dimensions in (2, 4):
            found = outcome(hvd.SyncBatchNorm(4, **options), samples(dimensions)[own], own.start)
            plain = nn.BatchNorm1d if dimensions == 2 else nn.BatchNorm2d
            for key, value in outcome(plain(4, **options), samples(dimensions), 0).items():
                if key.endswith(".grad"):  # each rank has its share
                    found[key] = hvd.allreduce(found[key], op=hvd.Sum)
                elif value.dim() and len(value) == 9:
                    value = value[own]
                torch.testing.assert_close(
                    found[key], value, rtol=1e-10, atol=1e-10, msg=f"{name} {dimensions}D: {key}"
                )
    with pytest.raises(ValueError, match="got 1 dimensions"):
        hvd.SyncBatchNorm(4)(torch.ones(4))


CASES = (equals_batch_norm_on_the_whole_batch,)
