"""The branches that a sample skips depend on the seed, its position and the layer, and on nothing else."""

import copy

import numpy as np
import timm
import torch
from timm.layers import DropPath
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.training.drop_path import convert, draws, set_draws


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop_path = DropPath(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop_path(self.linear(x))


def small_model(rate: float = 0.4) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(0.0), Block(rate), Block(rate)).double()
    assert convert(model) == (2 if rate else 0)
    return model


def forward(model: nn.Module, positions: np.ndarray) -> torch.Tensor:
    x = torch.from_numpy(positions).double()[:, None] + torch.arange(4)
    set_draws(model, draws(positions, seed=3, layers=2))
    return model(x)


def test_a_sample_is_treated_alike_in_every_split() -> None:
    model, positions = small_model(), np.arange(1000, 1024)
    whole = forward(model, positions)
    for size in (1, 5, 8):
        parts = [forward(model, positions[first : first + size]) for first in range(0, 24, size)]
        assert torch.allclose(torch.cat(parts), whole, rtol=1e-12)
    backwards = forward(model, positions[::-1].copy())
    assert torch.allclose(backwards.flip(0), whole, rtol=1e-12)


def test_draws_are_uniform_and_differ_by_seed_position_and_layer() -> None:
    numbers = draws(np.arange(2**40, 2**40 + 100_000), seed=0, layers=3)
    assert (numbers.shape, numbers.dtype) == ((3, 100_000), torch.float32)
    assert ((numbers >= 0) & (numbers <= 1)).all()
    assert torch.allclose(numbers.lt(0.3).float().mean(1), torch.tensor(0.3), atol=0.006)  # 4 standard deviations
    share = numbers[1, numbers[0] < 0.3].lt(0.3).float().mean()
    assert torch.allclose(share, torch.tensor(0.3), atol=0.011)  # layers are independent
    other = draws(np.arange(2**40, 2**40 + 100_000), seed=1, layers=1)
    assert abs(float(torch.corrcoef(torch.stack([numbers[0], other[0]]))[0, 1])) < 0.013


def test_rate_and_expectation_are_those_of_timm() -> None:
    model = nn.Sequential(DropPath(0.25))
    assert convert(model) == 1
    set_draws(model, draws(np.arange(100_000), seed=0, layers=1))
    y = model(torch.ones(100_000, 2, 1))
    assert torch.equal(y[:, 0], y[:, 1])
    assert torch.allclose(y.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert abs(float((y == 0).float().mean()) - 0.25) < 0.006  # 4 standard deviations
    assert torch.equal(model.eval()(y), y)


def test_each_layer_uses_its_own_draws_and_rows_of_one_sample_stay_together() -> None:
    model = nn.Sequential(DropPath(0.5), DropPath(0.5))
    assert convert(model) == 2
    set_draws(model, torch.tensor([[0.1, 0.1, 0.9, 0.9], [0.1, 0.9, 0.1, 0.9]]))
    assert model(torch.ones(4, 1)).flatten().tolist() == [4, 0, 0, 0]
    assert model[0](torch.ones(8, 1)).flatten().tolist() == [2, 2, 2, 2, 0, 0, 0, 0]


def test_timm_models_are_converted_and_keep_their_keys() -> None:
    plain = timm.create_model("test_vit", drop_path_rate=0.1)
    model = copy.deepcopy(plain)
    layers = convert(model)
    assert layers == sum(isinstance(module, DropPath) and module.drop_prob > 0 for module in plain.modules()) > 0
    assert not any(isinstance(module, DropPath) and module.drop_prob > 0 for module in model.modules())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert convert(timm.create_model("test_vit", drop_path_rate=0.0)) == 0


def test_a_compiled_and_checkpointed_model_agrees_and_is_compiled_once() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = small_model()
    compiled = copy.deepcopy(model)
    compiled.forward = lambda x: checkpoint(nn.Sequential.forward, compiled, x, use_reentrant=False)
    compiled.compile(backend="aot_eager", fullgraph=True)
    for step in range(5):
        losses = []
        for each in (model, compiled):
            each.zero_grad()
            losses.append(forward(each, np.arange(4 * step, 4 * step + 4)).square().sum())
            losses[-1].backward()
        assert torch.allclose(*losses, rtol=1e-12)
        for parameter, other in zip(model.parameters(), compiled.parameters(), strict=True):
            assert torch.allclose(parameter.grad, other.grad, rtol=1e-10)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
