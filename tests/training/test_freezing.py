"""Frozen stages keep every bit until they begin to train, and are refused if unknown."""

from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

from common.config.parsing import parse
from common.data.stream import Stream
from common.errors import Refused
from common.training import batch_norm
from common.training.freezing import Freezing, freeze_stages
from common.training.optimizer import (
    Schedule,
    build_ema,
    build_optimizer,
    clip_gradients,
    describe_optimization,
    set_learning_rate,
)
from common.training.step import TrainingStep
from tests.training.small import Config

STREAM = Stream(40, 8, 0)  # five steps an epoch


def build_model(config: Config, norm: str = "local") -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(config.model, num_classes=3).train()
    batch_norm.convert_batch_norm(model, norm)
    freeze_stages(config, model)
    return model


def find_moved_parts(model: nn.Module, config: Config, num_steps: int) -> list[set[str]]:
    """Which parts of the model each step moves, weights and statistics.

    The moving average keeps what never moves.
    """
    optimizer = build_optimizer(config, model)
    ema = build_ema(config, model)
    freezing = Freezing(config, model, STREAM)
    moved_by_step = []
    for step in range(num_steps):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        freezing.start_step(step)
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(images), torch.arange(8) % 3).backward()
        freezing.drop_gradients()
        clip_gradients(model.parameters(), 1.0, "norm")
        set_learning_rate(optimizer, config.lr)
        optimizer.step()
        optimizer.zero_grad()
        batch_norm.update_running_statistics(model)
        ema.update(model, step + 1)
        moved = set()
        for name, tensor in model.state_dict().items():
            if not torch.equal(tensor, before[name]):
                moved.add(name.split(".")[0])
        moved_by_step.append(moved)
    for name, tensor in ema.module.state_dict().items():
        if not any(name.split(".")[0] in moved for moved in moved_by_step):
            assert torch.equal(tensor, model.state_dict()[name]), name
    return moved_by_step


@pytest.mark.parametrize("opt", ["adamw", "momentum", "lion", "muon", "adafactor"])
def test_a_stage_begins_to_train_in_its_step_and_not_before(opt: str) -> None:
    config = Config(opt=opt, lr=1e-3, freeze_stages="all", unfreeze_epochs="0.4,0.8", ema_decay=0.9)
    head = {"fc"}
    upper = {"fc", "layer4", "layer3"}
    model = upper | {"layer2", "layer1", "bn1", "conv1"}
    moved = find_moved_parts(build_model(config), config, num_steps=6)
    assert moved == [head, head, upper, upper, model, model]


def test_what_stays_frozen_keeps_weights_and_statistics() -> None:
    config = Config(freeze_stages="2", ema_decay=0.9)
    model = build_model(config)
    assert find_moved_parts(model, config, num_steps=2) == [{"layer3", "layer4", "fc"}] * 2
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.startswith(("layer3", "layer4", "fc"))
    frozen = Freezing(config, model, STREAM).describe()["frozen"]
    assert (
        frozen == "stem to stage 2 of 4, 17% of the parameters, 8 batch norms with their statistics"
    )
    assert "; 8 of 15 layers are frozen" in batch_norm.describe_batch_norm(model)


@pytest.mark.parametrize(
    "stages, epochs, message",
    [
        ("5", "", "--freeze_stages 5: test_resnet has 4 stages here; take at most 4, or all"),
        ("0", "1", "--unfreeze_epochs: nothing is frozen; add --freeze_stages"),
        ("2", "1,2,3", "--unfreeze_epochs 1,2,3: 3 epochs for 2 frozen stages; give at most 2"),
    ],
)
def test_what_can_not_be_frozen_is_refused_with_what_can(
    stages: str, epochs: str, message: str
) -> None:
    config = Config(freeze_stages=stages, unfreeze_epochs=epochs)
    with pytest.raises(Refused, match=message):
        Freezing(config, build_model(config), STREAM)


def test_a_module_without_stages_is_refused() -> None:
    class Small(nn.Sequential):
        def get_classifier(self) -> nn.Module:
            return self[-1]

    model = Small(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(
        Refused,
        match=r"--freeze_stages 1: Small does not say which parameters form a stage; .* take",
    ):
        freeze_stages(Config(freeze_stages="1"), model)
    freeze_stages(Config(freeze_stages="all"), model)
    is_trained = [parameter.requires_grad for parameter in model.parameters()]
    assert is_trained == [False, False, True, True]
    with pytest.raises(Refused, match="--freeze_stages all leaves Small no parameter to train"):
        freeze_stages(Config(freeze_stages="all"), Small(nn.Conv2d(3, 4, 3), nn.Flatten()))


@pytest.mark.parametrize(
    "flag, wrong", [("freeze_stages", "two 1.5"), ("unfreeze_epochs", "2,1 x 1, -1")]
)
def test_a_value_that_is_no_number_of_stages_is_refused(flag: str, wrong: str) -> None:
    for value in wrong.split():
        with pytest.raises(Refused, match=f"--{flag} .*must be"):
            parse(Config, [f"--{flag}={value}"])


def get_rates(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """The rates by the id of the parameter, where the optimizer's is 0.01."""
    set_learning_rate(optimizer, 0.01)
    rates = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            rates[id(weight)] = group["lr"]
    return rates


def test_each_part_has_its_rate_and_the_start_table_says_so() -> None:
    config = Config(lr=0.01, backbone_lr_factor=0.1, head_lr_factor=3.0, layer_decay=0.5)
    model = build_model(config)
    optimizer = build_optimizer(config, model)
    rates = get_rates(optimizer)
    plain = build_optimizer(Config(lr=0.01, layer_decay=0.5), model)
    plain_rates = get_rates(plain)
    for name, parameter in model.named_parameters():
        factor = 3.0 if name.startswith("fc.") else 0.1
        assert rates[id(parameter)] == pytest.approx(factor * plain_rates[id(parameter)]), name
    schedule = Schedule(config, STREAM, 100)
    assert describe_optimization(config, model, schedule, [optimizer], 100) == (
        "0.01, cosine, adamw; backbone 0.001, head 0.03; times 0.5 per layer from the head down"
    )
    text = describe_optimization(Config(lr=0.01), model, schedule, [plain], 100)
    assert text == "0.01, cosine, adamw"
    with pytest.raises(Refused, match=r"--neck_lr_factor 2\.0: ResNet has no neck"):
        build_optimizer(Config(neck_lr_factor=2.0), model)


def test_a_step_clips_without_the_gradients_of_frozen_stages() -> None:
    config = Config(freeze_stages="2", unfreeze_epochs="1")
    model = build_model(config)
    freezing = Freezing(config, model, STREAM)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), scaler=None, unscale_gradients=lambda optimizers: None
    )
    step = TrainingStep(accelerator, model, samples=None, compute_losses=None, freezing=freezing)
    step._optimizers = []
    step._parameters = list(model.parameters())
    freezing.start_step(0)
    model(torch.randn(4, 3, 32, 32)).sum().backward()
    norm = step.clip_gradients(1.0, "norm")
    trained = []
    for name, parameter in model.named_parameters():
        is_trained = name.startswith(("layer3", "layer4", "fc"))
        assert (parameter.grad is not None) == is_trained, name
        if is_trained:
            trained.append(parameter.grad)
    assert norm > 1
    assert nn.utils.get_total_norm(trained) == pytest.approx(1, rel=1e-4)
