"""What a logged step says of its update: norms of what trains, and the learning rates of a model's parts."""

import pytest
import timm
import torch
from torch import nn

from common.training.optimizer import set_learning_rate
from common.training.update_size import UpdateSize


def step(size: UpdateSize, optimizers: list, rate: float) -> tuple:
    """The rates and the norms of a step with a gradient of 1 for every weight that has one."""
    for optimizer in optimizers:
        set_learning_rate(optimizer, rate)
    size.start()
    size.start()  # as in a recipe that clips twice
    for optimizer in optimizers:
        optimizer.step()
    update = size.finish()
    return update.rates, update.norms.tolist()


def test_norms_are_of_the_weights_that_a_step_trains() -> None:
    model = nn.ParameterList(torch.tensor([value]) for value in (3.0, 4.0, 5.0))
    first, second, third = model
    optimizers = [torch.optim.SGD([first, third], lr=1.0), torch.optim.SGD([second], lr=1.0)]
    first.grad, second.grad = torch.ones(1), torch.ones(1)  # the third is frozen in this step
    size = UpdateSize(model, optimizers)
    rates, norms = step(size, optimizers, 0.5)
    assert rates == {} and norms == pytest.approx([5.0, 0.5 * 2**0.5])
    assert first.item() == 2.5 and not size._copies, "the copy is freed"
    assert size.finish().norms is None, "nothing was begun"


def test_the_highest_rate_of_each_part_is_named() -> None:
    model = timm.create_model("test_vit", num_classes=3)
    head = [*model.get_classifier().parameters()]
    rest = [weight for weight in model.parameters() if all(weight is not other for other in head)]

    def rates(*groups: tuple[list, float]) -> dict:
        optimizer = torch.optim.SGD(
            [{"params": of, "lr_scale": scale} for of, scale in groups], lr=1.0
        )
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        return step(UpdateSize(model, [optimizer]), [optimizer], 0.5)[0]

    assert rates((rest, 1.0), (head, 1.0)) == {}, "one rate is train/lr"
    assert rates((rest, 0.1), (head, 1.0)) == {"lr_backbone": 0.05, "lr_head": 0.5}
    layers = [([weight], 0.5**place) for place, weight in enumerate(rest)]
    assert rates(*layers, (head, 2.0)) == {"lr_backbone": 0.5, "lr_head": 1.0}
