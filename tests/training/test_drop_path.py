"""The branches that a sample skips depend on the seed, its position and the layer, and on nothing else."""

import numpy as np
import torch
from timm.layers import DropPath
from torch import nn

from common.training.drop_path import convert, draws, set_draws


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
