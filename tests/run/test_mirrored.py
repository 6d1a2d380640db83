"""A classifier that also sees mirror images gives the mean of both probabilities."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.run import eval_only


def linear(scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 6, 5)).double()
    nn.init.normal_(model[1].weight, std=scale)
    return model


@pytest.mark.parametrize("loss, probabilities", [("ce", lambda x: x.softmax(1)), ("bce", torch.sigmoid)])
@pytest.mark.parametrize("scale", [1.0, 300.0])  # probabilities that round to 0 and 1, too
def test_probabilities_are_the_mean_of_both(loss: str, probabilities, scale: float) -> None:
    model, images = linear(scale), torch.randn(8, 3, 4, 6, dtype=torch.float64)
    viewed = eval_only.viewed(SimpleNamespace(eval_flip=True, loss=loss), model)
    wanted = (probabilities(model(images)) + probabilities(model(images.flip(3)))) / 2
    logits = viewed(images)
    assert logits.isfinite().all() and torch.allclose(probabilities(logits), wanted, atol=1e-14)
    assert not torch.allclose(wanted, probabilities(model(images)), atol=1e-3)
    assert eval_only.viewed(SimpleNamespace(eval_flip=False), model) is model


def test_half_precision_is_averaged_in_single() -> None:
    model, images = linear().bfloat16(), torch.randn(2, 3, 4, 6).bfloat16()
    assert eval_only.viewed(SimpleNamespace(eval_flip=True, loss="ce"), model)(images).dtype == torch.float32
