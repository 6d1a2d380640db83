"""Kinds of devices: those of other makers take the ways that they have."""

import pytest
import torch

from common.distributed import devices


def test_which_kinds_have_streams_and_float64() -> None:
    kinds = ("cpu", "cuda:1", "xpu", "mps")
    assert [devices.has_streams(torch.device(kind)) for kind in kinds] == [False, True, True, False]
    assert [devices.exact(kind) == torch.float64 for kind in kinds] == [True, True, True, False]


@pytest.mark.parametrize("shown", [True, False])
def test_a_machine_with_another_makers_accelerator(monkeypatch: pytest.MonkeyPatch, shown: bool) -> None:
    accelerator = torch.device("xpu")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: accelerator if shown else None
    )
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"An XPU, {device}")
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device: (1, 2))
    assert (devices.kind(), devices.has_streams()) == (("xpu", True) if shown else ("cpu", False))
    assert devices.name(torch.device("xpu:1")) == "An XPU, xpu:1"
    assert devices.name(torch.device("mps")) == "mps"
    if shown:
        assert devices.memory() == (1, 2)
    else:
        assert devices.mark() is None
