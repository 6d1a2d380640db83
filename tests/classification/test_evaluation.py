"""Evaluation: what it is given by a recipe of one's own is checked."""

from types import SimpleNamespace

import pytest
import torch

from common.classification import Evaluation
from common.errors import Refused


@pytest.mark.parametrize(
    "outputs,named",
    [((torch.zeros(4, 3), torch.zeros(4, 2)), "tuple"), (torch.zeros(4, 3, 1), r"\[4, 3, 1\]")],
)
def test_outputs_that_are_no_logits_are_refused_in_one_line(outputs, named: str) -> None:
    data = SimpleNamespace(classes=("a", "b", "c"), multi_label=False, model_classes=None)
    batch = SimpleNamespace(labels=torch.zeros(4, dtype=torch.int64), readable=None)
    with pytest.raises(
        Refused,
        match=f"^evaluate: the model gave {named} instead of logits .*the recipe's predict$",
    ):
        Evaluation(data, "cpu").update(batch, outputs)
