"""The branches that a sample skips depend on the seed, its position and the layer, and on nothing else."""

import numpy as np
import torch
from timm.layers import DropPath
from torch import nn

from common.training.drop_path import convert, draws, layers, set_draws


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop_path = DropPath(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop_path(self.linear(x))


def forward(model: nn.Module, positions: np.ndarray) -> torch.Tensor:
    x = torch.from_numpy(positions).double()[:, None] + torch.arange(4)
    set_draws(model, draws(positions, seed=3, layers=2))
    return model(x)


def test_a_sample_is_treated_alike_in_every_split() -> None:
    model, positions = nn.Sequential(Block(0.0), Block(0.4), Block(0.4)).double(), np.arange(1000, 1024)
    assert convert(model) == layers(model) == 2
    whole = forward(model, positions)
    for size in (1, 5, 8):
        parts = [forward(model, positions[first : first + size]) for first in range(0, 24, size)]
        assert torch.allclose(torch.cat(parts), whole, rtol=1e-12)
    backwards = forward(model, positions[::-1].copy())
    assert torch.allclose(backwards.flip(0), whole, rtol=1e-12)


def test_rate_and_expectation_are_those_of_timm_in_independent_layers() -> None:
    model = nn.Sequential(DropPath(0.25), nn.Identity(), DropPath(0.25))
    assert convert(model) == 2
    numbers = draws(np.arange(100_000), seed=0, layers=2)
    assert abs(torch.corrcoef(torch.cat([numbers, draws(np.arange(100_000), 1, 1)])).triu(1)).max() < 0.013
    set_draws(model, numbers)
    y = model(torch.ones(100_000, 2, 1))
    assert torch.equal(y[:, 0], y[:, 1])
    assert torch.allclose(y.unique(), torch.tensor([0.0, 1 / 0.75**2]))
    assert abs(float((y > 0).float().mean()) - 0.75**2) < 0.007  # 4 standard deviations
    assert torch.equal(model.eval()(y), y)


def test_each_layer_uses_its_own_draws_and_rows_of_one_sample_stay_together() -> None:
    model = nn.Sequential(DropPath(0.5), DropPath(0.5))
    assert convert(model) == 2
    set_draws(model, torch.tensor([[0.1, 0.1, 0.9, 0.9], [0.1, 0.9, 0.1, 0.9]]))
    assert model(torch.ones(4, 1)).flatten().tolist() == [4, 0, 0, 0]
    assert model[0](torch.ones(8, 1)).flatten().tolist() == [2, 2, 2, 2, 0, 0, 0, 0]
