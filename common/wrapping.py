"""How does a wrapped model get into the state in which an uninterrupted run would be?"""

from collections.abc import Callable

import torch

from common import batch_norm


def warm_up(wrapped: torch.nn.Module, model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> None:
    """Let DDP settle before the first step: run `forward`, any scalar through `wrapped`, and its backward; change nothing.

    DDP regroups its gradient buckets after the first backward pass, and from three ranks on another grouping sums in
    another order: without this, the step after a resume would differ in its last bits from the same step of an
    uninterrupted run. A no-op for a model that is not wrapped. Every rank calls it.
    """
    if wrapped is model:
        return
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        forward().backward()
    wrapped.zero_grad()
    model.load_state_dict(before)
    batch_norm.discard_statistics(model)
