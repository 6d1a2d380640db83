"""Batch norm computes on CUDA what it computes on the CPU, with few kernels and little memory.

Two ranks, each with a GPU and with unequal micro-batches, compute all cases in one launch.
"""

import ctypes
import functools
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.training import batch_norm

CHANNELS = 6
SHAPES = {"maps": (3, 5), "channels_last": (3, 5), "rows": (), "tokens": (7,)}
# A rounding step of each type.
TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}
CASES = list(itertools.product(("group", "node", "global"), TOLERANCES, SHAPES))
MODES = {"group 2": 2, "group 8": 8, "node": 1, "global": 1}  # number of groups in a batch


def build_layer(mode: str, group_size: int, dtype: torch.dtype, shape: tuple) -> nn.Module:
    kind = nn.BatchNorm2d if len(shape) == 2 else nn.BatchNorm1d
    layer = kind(CHANNELS, dtype=torch.promote_types(dtype, torch.float32))
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1, 0.3, generator)
    batch_norm.convert_batch_norm(layer, mode, group_size=group_size)
    return layer


def compute_results(
    layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor
) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(gradient)
    assert y.dtype == x.dtype and y.stride() == x.stride() == x.grad.stride(), (
        y.stride(),
        x.stride(),
        x.grad.stride(),
    )
    batch_norm.update_running_statistics(layer)
    named = {"y": y, "x": x.grad, "mean": layer.running_mean, "variance": layer.running_var}
    return named | {name: parameter.grad for name, parameter in layer.named_parameters()}


def compare(mode: str, dtype: str, shape: str) -> float:
    """The largest difference between GPU and CPU, relative to the largest value."""
    kind = getattr(torch, dtype)
    count = (6, 4)[dist.get_rank()]
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = (count, CHANNELS) + SHAPES[shape]
    x = (torch.randn(size, dtype=torch.float64, generator=generator) + 5).to(kind)
    gradient = torch.randn(x.shape, dtype=torch.float64, generator=generator).to(kind)
    if shape == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    by_device = {}
    for device in ("cuda", "cpu"):
        layer = build_layer(mode, 2, kind, SHAPES[shape]).to(device)
        by_device[device] = compute_results(layer, x.to(device), gradient.to(device))
    assert by_device["cuda"].keys() == by_device["cpu"].keys()
    errors = []
    for name, tensor in by_device["cpu"].items():
        expected = tensor.double()
        difference = by_device["cuda"][name].cpu().double() - expected
        errors.append(float(difference.abs().max() / expected.abs().max()))
    return max(errors)


def measure_cost(mode: str, groups: int, memory_format: torch.memory_format) -> dict:
    """Kernel launches of forward and backward, and peak memory beyond input and gradient, in units
    of the input's size.
    """
    count = 32
    kind = torch.bfloat16
    layer = build_layer(mode, count // groups, kind, (64, 64)).cuda()
    x = torch.randn(count, CHANNELS, 64, 64).to(kind).cuda().to(memory_format=memory_format)
    gradient = torch.ones_like(x)
    x = x.requires_grad_()
    before = torch.cuda.memory_allocated()
    from tests.pretended_gpu import kernels

    launches = ctypes.c_ulong.in_dll(kernels.runtime, "pretended_launches")
    launched = launches.value
    torch.cuda.reset_peak_memory_stats()
    layer(x).backward(gradient)
    peak = (torch.cuda.max_memory_allocated() - before) / x.nbytes
    return {"launches": launches.value - launched, "peak": round(peak, 2)}


def compute_all(file: Path) -> None:
    """What a rank does: every mode beside the CPU, and what it costs."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    errors = {" ".join(case): compare(*case) for case in CASES}
    costs = {}
    for layout in ("contiguous_format", "channels_last"):
        for mode, groups in MODES.items():
            costs[f"{mode} {layout}"] = measure_cost(
                mode.split()[0], groups, getattr(torch, layout)
            )
    if dist.get_rank() == 0:
        file.write_text(json.dumps({"errors": errors, "costs": costs}))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def computed(gpus, tmp_path_factory) -> dict[str, dict]:
    if gpus.real:
        pytest.skip("there is a real GPU")
    file = tmp_path_factory.mktemp("computed") / "computed.json"
    done = gpus.run_main(2, functools.partial(compute_all, file))
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("mode, dtype, shape", CASES)
def test_outputs_gradients_and_statistics_equal_the_cpu(
    computed, mode: str, dtype: str, shape: str
) -> None:
    assert computed["errors"][f"{mode} {dtype} {shape}"] < TOLERANCES[dtype]


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_neither_kernels_nor_memory_grow_with_the_groups(computed, layout: str) -> None:
    """One group after the other would take four kernels per group; shared statistics make no
    float32 copies.
    """
    few, many, node, world = (computed["costs"][f"{mode} {layout}"] for mode in MODES)
    assert few["launches"] == many["launches"] < 20
    assert world["launches"] == node["launches"] < 16  # 40 with plain operators
    assert world["peak"] <= 2.1  # output and gradient; 11.3 with plain operators
    assert many["peak"] <= 4.1
