"""The start table's rows about exactness agree with measurements of every optimizer."""

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from common.classification.batches import Batch
from common.errors import Refused
from common.run import Observer
from common.training import drop_path, exactness
from common.training.optimizer import _UNSUPPORTED, build_optimizer, clip_gradients
from common.training.step import TrainingStep
from tests.training.small import CLASSES, Config, build_vit

BATCH = 12
STEPS = 4
# The micro-batches of each rank.
ONE_RANK = ((12,),)
THREE_RANKS = ((3, 2), (4,), (2, 1))


def train(config: Config, layout: tuple[tuple[int, ...], ...]) -> dict[str, torch.Tensor]:
    """Weights after some steps: micro-batches add up within a rank, then ranks are averaged."""
    model = build_vit(1)
    generator = torch.Generator().manual_seed(0)
    optimizer = build_optimizer(config, model)
    sizes = [size for rank_sizes in layout for size in rank_sizes]
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
        targets = torch.rand(BATCH, CLASSES, generator=generator, dtype=torch.float64)
        micro_batches = zip(images.split(sizes), targets.split(sizes), strict=True)
        gradients_by_rank = []
        for rank_sizes in layout:
            model.zero_grad()
            for _ in rank_sizes:
                micro_images, micro_targets = next(micro_batches)
                losses = -(model(micro_images).log_softmax(1) * micro_targets).sum(1)
                (losses.sum() * len(layout) / BATCH).backward()
            gradients_by_rank.append([parameter.grad for parameter in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *gradients_by_rank, strict=True):
            parameter.grad = sum(gradients) / len(layout)
        clip_gradients(list(model.parameters()), config.clip, config.clip_mode)
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


def measure_distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum((left[name] - right[name]).square().sum() for name in left).sqrt()


@pytest.mark.parametrize(
    "clip, mode", [(0.0, "norm"), pytest.param(0.01, "agc", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", timm.optim.list_optimizers(exclude_filters=_UNSUPPORTED))
def test_an_optimizer_is_exact_or_known_not_to_be(name: str, clip: float, mode: str) -> None:
    """On a vision transformer in float64: its keys' biases have a gradient of rounding noise."""
    config = Config(opt=name, lr=3e-3, clip=clip, clip_mode=mode)
    try:
        expected = train(config, ONE_RANK)
        actual = train(config, THREE_RANKS)
    except Refused:
        assert name.startswith(("bnb", "fused")), "only bitsandbytes and apex may be missing"
        pytest.skip("needs a package that is not installed")
    distance = measure_distance(expected, build_vit(1).state_dict())
    difference = measure_distance(expected, actual)
    assert distance > 0
    if exactness.is_scale_free(name):
        assert clip or difference >= 1e-10 * distance, "described as inexact"
    else:
        assert difference <= 1e-8 * distance


def test_only_what_is_not_exact_has_a_row_in_the_start_table() -> None:
    assert exactness.describe_exactness(Config(opt="adamw"), uses_generator=False) == {}
    rows = exactness.describe_exactness(Config(opt="Lion"), uses_generator=False)
    assert "layouts agree only roughly" in rows["optimizer"]
    rows = exactness.describe_exactness(Config(comm_hook="fp16"), uses_generator=False)
    assert "one process sends none" in rows["gradients"]
    rows = exactness.describe_exactness(Config(), uses_generator=True)
    assert "layouts agree only statistically" in rows["dropout"]


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
    num_layers = drop_path.convert_drop_layers(model)

    def make_noise(batch_size: int) -> Batch:
        positions = np.arange(batch_size)
        uniforms = drop_path.draw_uniforms(positions, batch_size, 0, num_layers)
        images = torch.rand(batch_size, 3, 4, 4)
        labels = torch.zeros(batch_size, dtype=torch.int64)
        return Batch(images, labels, torch.from_numpy(positions), drop_path=uniforms)

    step = TrainingStep(
        SimpleNamespace(device=torch.device("cpu")),
        model,
        SimpleNamespace(make_noise=make_noise),
        lambda network, batch: network(batch.images),
        freezing=None,
    )
    step.run_trial(model, SimpleNamespace(micro_batch_sizes=(4,), micro_steps=1))
    rows = exactness.describe_exactness(Config(), step.uses_generator)
    assert ("dropout" in rows) != is_exact


@dataclass
class SeedRecorder(Observer):
    """Writes the seed of each micro-batch to a file of this rank."""

    file: Path

    def on_micro_batch(self, step: int, batch) -> None:
        with self.file.open("a") as file:
            file.write(f"{torch.initial_seed()}\n")


def test_each_micro_batch_of_each_rank_has_a_seed_of_its_own(forks, stripes, tmp_path) -> None:
    """Else the masks of a function's dropout would repeat within a step."""
    files = [tmp_path / f"{rank}.txt" for rank in range(2)]
    recorders = {rank: SeedRecorder(file) for rank, file in enumerate(files)}
    flags = (
        "--global_batch_size 8 --max_micro_batch_size 2 --batch_norm local --max_steps 3".split()
    )
    flags += ["--data", stripes, "--output_dir", tmp_path / "runs"]
    ranks = forks.start_ranks(2, flags, observers=recorders)
    for ended in [rank.end() for rank in ranks]:
        assert ended.code == 0, ended
    seeds = []
    for file in files:
        seeds += file.read_text().split()
    assert len(seeds) == 2 * 2 * 3
    assert len(set(seeds)) == len(seeds)
