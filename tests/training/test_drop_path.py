"""What a sample skips depends on the seed, its position and the layer, and on nothing else."""

import numpy as np
import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn

from common.training.drop_path import convert_drop_layers, draw_uniforms, set_uniforms


def test_rate_and_expectation_are_those_of_timm() -> None:
    model = nn.Sequential(DropPath(0.25), nn.Identity(), DropPath(0.25))
    assert convert_drop_layers(model) == 2
    positions = np.arange(100_000)
    uniforms = draw_uniforms(positions, batch_size=1, seed=0, num_layers=2)
    other_uniforms = draw_uniforms(positions, batch_size=1, seed=1, num_layers=1)
    correlations = torch.corrcoef(torch.cat([uniforms, other_uniforms])).triu(1)
    assert correlations.abs().max() < 0.013
    set_uniforms(model, uniforms)
    y = model(torch.ones(100_000, 2, 1))
    assert torch.equal(y[:, 0], y[:, 1])
    assert torch.allclose(y.unique(), torch.tensor([0.0, 1 / 0.75**2]))
    assert abs(float((y > 0).float().mean()) - 0.75**2) < 0.007  # 4 standard deviations
    assert torch.equal(model.eval()(y), y)


def test_each_layer_uses_its_own_draws() -> None:
    model = nn.Sequential(DropPath(0.5), DropPath(0.5))
    assert convert_drop_layers(model) == 2
    set_uniforms(model, torch.tensor([[0.1, 0.1, 0.9, 0.9], [0.1, 0.9, 0.1, 0.9]]))
    assert model(torch.ones(4, 1)).flatten().tolist() == [4, 0, 0, 0]
    assert model[0](torch.ones(8, 1)).flatten().tolist() == [2, 2, 2, 2, 0, 0, 0, 0]


def test_dropout_has_its_rate_and_independent_elements() -> None:
    """Neighbouring elements, samples, layers and steps have no correlation, and the mean stays."""
    model = nn.Sequential(nn.Dropout(0.25), nn.Dropout(0.25))
    assert convert_drop_layers(model) == 2
    x = torch.ones(1000, 200)
    set_uniforms(model, draw_uniforms(np.arange(1000), batch_size=10, seed=0, num_layers=2))
    first = model[0](x)
    second = model[1](x)
    set_uniforms(model, draw_uniforms(np.arange(1000, 2000), batch_size=10, seed=0, num_layers=2))
    next_step = model[0](x)
    assert torch.allclose(first.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert abs(float(first.mean()) - 1) < 0.006  # 4 standard deviations
    masks = torch.stack([first.roll(1, 0), first.roll(1, 1), first, second, next_step]).flatten(1)
    assert torch.corrcoef(masks).triu(1).abs().max() < 0.01
    assert torch.equal(model.eval()(x), x)
    model.train()
    for (
        layer
    ) in model:  # such as tables of relative positions: one mask per step, but not of all layers
        layer.has_batch = False
    first_table, second_table = (layer(x).flatten() for layer in model)
    assert torch.corrcoef(torch.stack([first_table, second_table]))[0, 1].abs() < 0.01
    drop_all = nn.Sequential(nn.Dropout(1.0))
    convert_drop_layers(drop_all)
    set_uniforms(drop_all, draw_uniforms(np.arange(4), batch_size=4, seed=0, num_layers=1))
    assert not drop_all(torch.ones(4, 3)).any()


# With dropout before the head by a module and by a function, and on tables of relative positions,
# whose size divides by those of the micro-batches.
@pytest.mark.parametrize(
    "name",
    ["test_vit", "test_resnet", "test_efficientnet", "test_vit_relpos", "swinv2_cr_tiny_224"],
)
def test_outputs_are_those_of_any_micro_batches(name: str) -> None:
    size = 160
    options = {}
    if name.startswith("swin"):
        size = 56
        options = {
            "window_size": 7,
            "img_size": size,
            "depths": (1, 1),
            "embed_dim": 12,
            "num_heads": (2, 2),
        }
    model = timm.create_model(name, num_classes=5, drop_rate=0.3, **options).double().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    num_layers = convert_drop_layers(model)
    assert num_layers > (1 if "relpos" in name or "swin" in name else 0)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(7, 3, size, size, dtype=torch.float64, generator=generator)
    positions = torch.arange(7, 14)
    outputs = {}
    state = torch.get_rng_state()
    for sizes in ((7,), (1, 3, 3)):
        chunks = []
        for image_chunk, position_chunk in zip(
            images.split(sizes), positions.split(sizes), strict=True
        ):
            uniforms = draw_uniforms(position_chunk.numpy(), 7, seed=0, num_layers=num_layers)
            set_uniforms(model, uniforms)
            chunks.append(model(image_chunk))
        outputs[sizes] = torch.cat(chunks)
    torch.testing.assert_close(outputs[7,], outputs[1, 3, 3], rtol=0, atol=1e-10)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn from a generator"
    set_uniforms(model, draw_uniforms(np.arange(14, 21), 7, seed=0, num_layers=num_layers))
    assert not torch.allclose(model(images), outputs[7,]), "another step"
