"""The start table's rows about exactness agree with measurements of every optimizer."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from common.classification.batches import Batch
from common.errors import Refused
from common.training import drop_path, exactness
from common.training.optimizer import _UNSUPPORTED, build_optimizer, clip_gradients
from common.training.step import TrainingStep
from tests.training.small import CLASSES, Config, vit

BATCH, STEPS = 12, 4
WHOLE, CUT = ((12,),), ((3, 2), (4,), (2, 1))  # the micro-batches of each rank


def trained(config: Config, layout: tuple[tuple[int, ...], ...]) -> dict[str, torch.Tensor]:
    """Weights after some steps: micro-batches add up within a rank, then ranks are averaged."""
    model, generator = vit(1), torch.Generator().manual_seed(0)
    optimizer = build_optimizer(config, model)
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
        targets = torch.rand(BATCH, CLASSES, generator=generator, dtype=torch.float64)
        sizes, of_ranks = [size for rank in layout for size in rank], []
        samples = zip(images.split(sizes), targets.split(sizes), strict=True)
        for rank in layout:
            model.zero_grad()
            for _ in rank:
                some, wanted = next(samples)
                losses = -(model(some).log_softmax(1) * wanted).sum(1)
                (losses.sum() * len(layout) / BATCH).backward()
            of_ranks.append([parameter.grad for parameter in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *of_ranks, strict=True):
            parameter.grad = sum(gradients) / len(layout)
        clip_gradients(list(model.parameters()), config.clip, config.clip_mode)
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize(
    "clip, mode", [(0.0, "norm"), pytest.param(0.01, "agc", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", timm.optim.list_optimizers(exclude_filters=_UNSUPPORTED))
def test_an_optimizer_is_exact_or_known_not_to_be(name: str, clip: float, mode: str) -> None:
    """On a vision transformer in float64, whose keys' biases have a gradient of nothing but
    rounding noise.
    """
    config = Config(opt=name, lr=3e-3, clip=clip, clip_mode=mode)
    try:
        whole, cut = (trained(config, layout) for layout in (WHOLE, CUT))
    except Refused:
        assert name.startswith(("bnb", "fused")), "only bitsandbytes and apex may be missing"
        pytest.skip("needs a package that is not installed")
    start = vit(1).state_dict()
    apart = sum((whole[key] - cut[key]).square().sum() for key in whole).sqrt()
    moved = sum((whole[key] - start[key]).square().sum() for key in whole).sqrt()
    assert moved > 0
    if exactness.is_scale_free(name):
        assert clip or apart >= 1e-10 * moved, "said to be inexact"
    else:
        assert apart <= 1e-8 * moved


def test_only_what_is_not_exact_has_a_row_in_the_start_table() -> None:
    assert exactness.describe_exactness(Config(opt="adamw"), uses_generator=False) == {}
    assert (
        "layouts of such a model agree only roughly"
        in exactness.describe_exactness(Config(opt="Lion"), False)["optimizer"]
    )
    assert (
        "one process sends none"
        in exactness.describe_exactness(Config(comm_hook="fp16"), False)["gradients"]
    )
    assert (
        "layouts agree only statistically"
        in exactness.describe_exactness(Config(), uses_generator=True)["dropout"]
    )


class Dropping(nn.Module):
    """Drops by a module, which can be drawn from positions, or by a function, which can't."""

    def __init__(self, layer: nn.Module, rate: float = 0.0):
        super().__init__()
        self.head = nn.Sequential(layer, nn.Flatten(), nn.Linear(48, 1))
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.head(x), self.rate, self.training).flatten()


@pytest.mark.parametrize(
    "model, is_exact",
    [
        (Dropping(nn.Dropout(0.5)), True),
        (Dropping(nn.Dropout2d(0.5)), False),
        (Dropping(nn.Identity(), rate=0.5), False),
    ],
)
def test_masks_of_a_generator_are_noticed(model: nn.Module, is_exact: bool) -> None:
    count = drop_path.convert_drop_layers(model)

    def make_noise(batch_size: int) -> Batch:
        positions = np.arange(batch_size)
        layers = drop_path.draw_uniforms(positions, batch_size, 0, count)
        images = torch.rand(batch_size, 3, 4, 4)
        labels = torch.zeros(batch_size, dtype=torch.int64)
        return Batch(images, labels, torch.from_numpy(positions), drop_path=layers)

    step = TrainingStep(
        SimpleNamespace(device=torch.device("cpu")),
        model,
        SimpleNamespace(make_noise=make_noise),
        lambda network, batch: network(batch.images),
        freezing=None,
    )
    step.run_trial(model, SimpleNamespace(micro_batch_sizes=(4,), micro_steps=1))
    assert ("dropout" in exactness.describe_exactness(Config(), step.uses_generator)) != is_exact
