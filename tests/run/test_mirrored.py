"""A classifier that also sees mirror images gives the mean of both probabilities."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.run import eval_only


class Linear(nn.Sequential):
    def __init__(self, scale: float = 1.0):
        super().__init__(nn.Flatten(), nn.Linear(3 * 4 * 6, 5))
        torch.manual_seed(0)
        nn.init.normal_(self[1].weight, std=scale)


@pytest.mark.parametrize("loss, probabilities", [("ce", lambda x: x.softmax(1)), ("bce", torch.sigmoid)])
@pytest.mark.parametrize("scale", [1.0, 300.0])  # probabilities that round to 0 and 1, too
def test_probabilities_are_the_mean_of_both(loss: str, probabilities, scale: float, capsys) -> None:
    model, images = Linear(scale).double(), torch.randn(8, 3, 4, 6, dtype=torch.float64)
    viewed = eval_only.viewed(SimpleNamespace(eval_flip=True, loss=loss), model)
    wanted = (probabilities(model(images)) + probabilities(model(images.flip(3)))) / 2
    logits = viewed(images)
    assert logits.isfinite().all() and torch.allclose(probabilities(logits), wanted, atol=1e-14)
    assert torch.equal(viewed(images.flip(3)), logits)
    assert not torch.allclose(probabilities(logits), probabilities(model(images)), atol=1e-3)
    assert capsys.readouterr().out == (
        "each image is also shown mirrored; results are of the mean of both "
        + ("softmaxes\n" if loss == "ce" else "sigmoids\n")
    )


def test_a_symmetric_model_keeps_its_probabilities_and_without_the_flag_it_is_the_model() -> None:
    model, images = Linear().double(), torch.randn(8, 3, 4, 6, dtype=torch.float64)
    with torch.no_grad():
        weight = model[1].weight.view(5, 3, 4, 6)
        weight += weight.flip(3)
    viewed = eval_only.viewed(SimpleNamespace(eval_flip=True, loss="ce"), model)
    assert torch.allclose(viewed(images).softmax(1), model(images).softmax(1), atol=1e-14)
    assert eval_only.viewed(SimpleNamespace(eval_flip=False), model) is model


def test_half_precision_is_averaged_in_single() -> None:
    model, images = Linear().bfloat16(), torch.randn(2, 3, 4, 6).bfloat16()
    assert eval_only.viewed(SimpleNamespace(eval_flip=True, loss="ce"), model)(images).dtype == torch.float32
