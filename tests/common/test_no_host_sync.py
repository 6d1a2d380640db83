"""What varies a batch asks the device for no number, and sends it none in a way for which the host has to wait.

Tensors are fake ones that say that they are on a GPU: operators run on shapes alone, so that no GPU is needed. What a whole
step does on a real one is in tests/recipes/test_host_sync.py.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from common import mixing
from common.device_augmentation import erase, vary_colours


class Waits(TorchDispatchMode):
    """Notes the copies between host and device that are not told to go on by themselves."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = arguments[1] if function is torch.ops.aten.copy_.default else arguments[0]
            left = isinstance(source, torch.Tensor) and source.device.type != result.device.type
            if left and not {True} & {*arguments[2:], (keywords or {}).get("non_blocking")}:
                self.seen.append(f"{source.device} -> {result.device}")
        return result


def waits(function: Callable) -> list[str]:
    """Of what `function` does with fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True), Waits() as watch:
        try:
            function()
        except DataDependentOutputException as error:
            return [*watch.seen, str(error)]
    return watch.seen


def on_gpu(*shape: int, **options) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", **options)


@pytest.mark.parametrize(
    "function",
    [
        lambda: on_gpu(2).sum().item(),
        lambda: on_gpu(2).tolist(),
        lambda: torch.tensor((0.3, 0.6), device="cuda"),
        lambda: torch.ones(2).to("cuda"),
        lambda: on_gpu(2).to("cpu"),
        lambda: on_gpu(2).copy_(torch.ones(2)),
        lambda: bool(on_gpu(2).isfinite().all()),
    ],
)
def test_what_makes_the_host_wait_is_seen(function: Callable) -> None:
    assert waits(function)


def test_what_does_not_is_not_seen() -> None:
    assert not waits(lambda: on_gpu(2).to("cpu", non_blocking=True))
    assert not waits(lambda: torch.ones(2).to("cuda", non_blocking=True))


def test_varying_a_batch_on_the_device_waits_for_nothing() -> None:
    def vary() -> None:
        images = vary_colours(on_gpu(8, 3, 32, 32), on_gpu(8, 3))
        images = erase(images, on_gpu(8, 6), on_gpu(3, 32, 32))
        targets = F.one_hot(on_gpu(8, dtype=torch.int64), 10).to(torch.float32)
        mixing.blend(images, targets, on_gpu(4, 6))

    assert waits(vary) == []
