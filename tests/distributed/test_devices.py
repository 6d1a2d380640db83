"""Kinds of devices: other makers' devices take the ways that they have, and the record of a run
names the device it used.
"""

import platform

import pytest
import torch

from common.distributed import devices
from common.distributed.environment import describe_environment


@pytest.mark.parametrize("has_device", [True, False])
def test_a_machine_with_another_makers_accelerator(
    monkeypatch: pytest.MonkeyPatch, has_device: bool
) -> None:
    device = torch.device("xpu") if has_device else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"An XPU, {device}")
    if has_device:
        assert (devices.get_device_type(), devices.has_streams()) == ("xpu", True)
    else:
        assert (devices.get_device_type(), devices.has_streams()) == ("cpu", False)
        assert devices.record_event() is None
    assert devices.get_device_name(torch.device("xpu:1")) == "An XPU, xpu:1"
    assert devices.get_device_name(torch.device("mps")) == "mps"
    kinds = ("cpu", "cuda:1", "xpu", "mps")
    assert [devices.has_streams(kind) for kind in kinds] == [False, True, True, False]
    has_double = [devices.get_sum_dtype(kind) == torch.float64 for kind in kinds]
    assert has_double == [True, True, True, False]


def test_the_record_names_the_device_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"A GPU, {device}")
    (on_cpu,), (on_gpu,) = (
        describe_environment("fp32", torch.device(device))["ranks"] for device in ("cpu", "cuda:1")
    )
    assert on_gpu == f"A GPU, cuda:1 on {platform.node()}"
    assert on_cpu == f"{platform.processor() or platform.machine()} on {platform.node()}"
    assert describe_environment("fp32", torch.device("cpu"))["cuda"] is None
