"""Batch norm computes on CUDA what it computes on the CPU, with few kernels and little memory."""

import ctypes
import functools
import itertools
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from common.training import batch_norm

CHANNELS = 6
SHAPES = {"maps": (3, 5), "rows": (), "tokens": (7,)}
TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}  # a rounding step of each type


def layer_of(mode: str, group_size: int, dtype: torch.dtype, shape: tuple) -> nn.Module:
    kind = nn.BatchNorm2d if len(shape) == 2 else nn.BatchNorm1d
    layer = kind(CHANNELS, dtype=torch.promote_types(dtype, torch.float32))
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1, 0.3, generator)
    batch_norm.convert(layer, mode, group_size=group_size)
    return layer


def results(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(gradient)
    assert y.dtype == x.dtype and y.stride() == x.stride() == x.grad.stride(), (y.stride(), x.stride(), x.grad.stride())
    batch_norm.update_running_statistics(layer)
    named = {"y": y, "x": x.grad, "mean": layer.running_mean, "variance": layer.running_var}
    return named | {name: parameter.grad for name, parameter in layer.named_parameters()}


def compare(mode: str, dtype: str, shape: str, channels_last: bool) -> float:
    """The largest difference between GPU and CPU, relative to the largest value."""
    kind, count = getattr(torch, dtype), (6, 4)[dist.get_rank()]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = (torch.randn(count, CHANNELS, *SHAPES[shape], dtype=torch.float64, generator=generator) + 5).to(kind)
    gradient = torch.randn(x.shape, dtype=torch.float64, generator=generator).to(kind)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    of = {
        device: results(layer_of(mode, 2, kind, SHAPES[shape]).to(device), x.to(device), gradient.to(device))
        for device in ("cuda", "cpu")
    }
    assert of["cuda"].keys() == of["cpu"].keys()
    return max(
        float((of["cuda"][name].cpu().double() - value.double()).abs().max() / value.double().abs().max())
        for name, value in of["cpu"].items()
    )


def cost(mode: str, groups: int, channels_last: bool) -> dict:
    """Kernel launches of forward and backward, and peak memory beyond input and gradient, in units of the input's size."""
    count, kind = 32, torch.bfloat16
    layer = layer_of(mode, count // groups, kind, (64, 64)).cuda()
    x = torch.randn(count, CHANNELS, 64, 64).to(kind).cuda()
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    gradient, x = torch.ones_like(x), x.requires_grad_()
    before = torch.cuda.memory_allocated()
    from tests.pretended_gpu import kernels

    launches = ctypes.c_ulong.in_dll(kernels.runtime, "pretended_launches")
    launched = launches.value
    torch.cuda.reset_peak_memory_stats()
    layer(x).backward(gradient)
    peak = (torch.cuda.max_memory_allocated() - before) / x.nbytes
    return {"launches": launches.value - launched, "peak": round(peak, 2)}


def compare_all(file: Path) -> None:
    """On each of two ranks: every mode with the CPU, and what it costs."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    layouts = (("maps", ""), ("maps", " channels_last"), ("rows", ""), ("tokens", ""))
    cases = itertools.product(("group", "node", "global"), TOLERANCES, layouts)
    errors = {
        f"{mode} {dtype} {shape}{last}": compare(mode, dtype, shape, bool(last)) for mode, dtype, (shape, last) in cases
    }
    modes = (("group", 2), ("group", 8), ("node", 1), ("global", 1))
    cases = itertools.product(modes, ("", " channels_last"))
    costs = {f"{mode} {groups}{last}": cost(mode, groups, bool(last)) for (mode, groups), last in cases}
    if dist.get_rank() == 0:
        file.write_text(json.dumps({"errors": errors, "costs": costs}))
    dist.destroy_process_group()


def test_all_modes_equal_the_cpu_and_neither_kernels_nor_memory_grow(gpus, tmp_path) -> None:
    """Outputs, gradients and statistics on two GPUs with unequal micro-batches, for all types and memory formats.

    The number of kernels does not grow with the number of groups, and shared statistics make no float32 copies.
    """
    done = gpus.run_main(2, functools.partial(compare_all, tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["errors"]) == 3 * 4 * 4
    for case, error in found["errors"].items():
        assert error < TOLERANCES[case.split()[1]], f"{case}: {error}"
    launches, peaks = ({case: cost[key] for case, cost in found["costs"].items()} for key in ("launches", "peak"))
    for last in ("", " channels_last"):
        # One group after the other would take four per group.
        assert launches[f"group 2{last}"] == launches[f"group 8{last}"] < 20
        assert launches[f"global 1{last}"] == launches[f"node 1{last}"] < 16  # 40 with plain operators
        assert peaks[f"global 1{last}"] <= 2.1  # output and gradient; 11.3 with plain operators
        assert peaks[f"group 8{last}"] <= 4.1
