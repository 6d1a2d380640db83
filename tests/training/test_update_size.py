"""What a logged step says of its update: norms of what trains, and the rates of a model's parts."""

import pytest
import timm
import torch
from torch import nn

from common.training.optimizer import set_learning_rate
from common.training.update_size import UpdateSize


def make_step(update_size: UpdateSize, optimizers: list, rate: float) -> tuple[dict, list]:
    """The rates and the norms of a step with a gradient of 1 for every weight that has one."""
    for optimizer in optimizers:
        set_learning_rate(optimizer, rate)
    update_size.start()
    update_size.start()  # as in a recipe that clips twice
    for optimizer in optimizers:
        optimizer.step()
    update = update_size.finish()
    return update.rates, update.norms.tolist()


def test_norms_are_of_the_weights_that_a_step_trains() -> None:
    model = nn.ParameterList(torch.tensor([value]) for value in (3.0, 4.0, 5.0))
    first, second, third = model
    optimizers = [torch.optim.SGD([first, third], lr=1.0), torch.optim.SGD([second], lr=1.0)]
    first.grad = torch.ones(1)
    second.grad = torch.ones(1)  # the third is frozen in this step
    update_size = UpdateSize(model, optimizers)
    rates, norms = make_step(update_size, optimizers, 0.5)
    assert rates == {}
    assert norms == pytest.approx([5.0, 0.5 * 2**0.5])
    assert first.item() == 2.5
    assert not update_size._copies, "the copy is freed"
    assert update_size.finish().norms is None, "nothing was started"


def test_the_highest_rate_of_each_part_is_named() -> None:
    model = timm.create_model("test_vit", num_classes=3)
    head = list(model.get_classifier().parameters())
    head_ids = set(map(id, head))
    backbone = [weight for weight in model.parameters() if id(weight) not in head_ids]

    def get_rates(scaled_groups: list[tuple[list, float]]) -> dict:
        groups = [{"params": weights, "lr_scale": scale} for weights, scale in scaled_groups]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        rates, _ = make_step(UpdateSize(model, [optimizer]), [optimizer], 0.5)
        return rates

    assert get_rates([(backbone, 1.0), (head, 1.0)]) == {}, "one rate is train/lr"
    rates = get_rates([(backbone, 0.1), (head, 1.0)])
    assert rates == {"lr_backbone": 0.05, "lr_head": 0.5}
    layers = [([weight], 0.5**i) for i, weight in enumerate(backbone)]
    assert get_rates([*layers, (head, 2.0)]) == {"lr_backbone": 0.5, "lr_head": 1.0}
