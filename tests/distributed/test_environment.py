"""The record of a run names the device that it used."""

import platform

import pytest
import torch

from common.distributed.environment import environment


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_is_not_recorded_as_one_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"A GPU, {device}")
    (on_cpu,), (on_gpu,) = (environment("fp32", torch.device(device))["ranks"] for device in ("cpu", "cuda:1"))
    assert on_gpu == f"A GPU, cuda:1 on {platform.node()}"
    assert on_cpu == f"{platform.processor() or platform.machine()} on {platform.node()}"
    assert environment("fp32", torch.device("cpu"))["cuda"] is None
