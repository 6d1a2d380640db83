"""torch.compile, as a run uses it."""

import torch
from torch import nn

# Each block that is compiled apart has a limit of its own; torch's is 8, for a model with more
# blocks of one class.
RECOMPILE_LIMIT = 256


def compile_model(model: nn.Module) -> None:
    """Compile `model` in place, so that its weights keep their names.

    A graph is made for each size of micro-batches, of which there are at most two.
    """
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    model.compile(dynamic=False)
