"""The warm-up leaves a model as it was, and later steps sum in the order of an uninterrupted run."""

import copy
import errno
import os

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.distributed.collectives import rank
from common.errors import Refused
from common.training import batch_norm
from common.training.warm_up import is_out_of_memory, warm_up
from tests.harness.processes import Processes


def build_network(norm: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    for width in (512, 300, 301, 299):  # more than one bucket of gradients
        layers += [nn.LazyLinear(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.LazyLinear(5))
    if norm != "as it came":  # keeps its running statistics by itself, in every forward
        batch_norm.convert_batch_norm(model, norm, group_size=2)
    model.eval()(torch.zeros(2, 3, 8, 8))
    return model.train()


def draw_images(step: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(100 * step + rank()))


def train(steps: range, state: dict | None, is_warmed_up: bool) -> dict:
    """As every run does it: wrap, warm up, load, make steps."""
    model = build_network("group")
    wrapped = DistributedDataParallel(model)
    if is_warmed_up:
        warm_up(wrapped, model, lambda: wrapped(torch.zeros(4, 3, 8, 8)).sum().backward())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in steps:
        wrapped(draw_images(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        batch_norm.update_running_statistics(model)
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def resume_at_every_step(is_warmed_up: bool) -> list[bool]:
    """Whether the weights of a run that resumes after step 1, 2 and 3 are those without a resume."""
    expected = train(range(4), None, is_warmed_up)["model"]
    is_equal = []
    for stop in (1, 2, 3):
        state = train(range(stop), None, is_warmed_up)
        actual = train(range(stop, 4), state, is_warmed_up)["model"]
        is_equal.append(all(torch.equal(actual[name], expected[name]) for name in expected))
    return is_equal


def test_a_resumed_step_sums_as_the_uninterrupted_one(processes: Processes) -> None:
    """Teeth: on three ranks it does not without the warm-up, because DDP regroups its buckets."""
    assert processes.run(resume_at_every_step, True, ranks=3) == [[True] * 3] * 3
    for is_equal in processes.run(resume_at_every_step, False, ranks=3):
        assert False in is_equal


def find_changes(norm: str) -> list[str]:
    """What a warm-up changes in a model: values, gradients and statistics."""
    model = build_network(norm)
    wrapped = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    before = copy.deepcopy(model.state_dict())
    warm_up(wrapped, model, lambda: wrapped(torch.ones(4, 3, 8, 8)).sum().backward())
    changes = []
    for name, value in model.state_dict().items():
        if not torch.equal(value, before[name]):
            changes.append(name)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            changes.append(f"{name}.grad")
    batch_norm.update_running_statistics(model)  # no statistics of the warm-up wait for this
    for name, value in model.state_dict().items():
        if "running" in name and not torch.equal(value, before[name]):
            changes.append(f"{name} later")
    return changes


@pytest.mark.parametrize("norm", ["as it came", "group", "global"])
def test_the_model_is_as_it_was(processes: Processes, norm: str) -> None:
    assert find_changes(norm) == []
    assert processes.run(find_changes, norm, ranks=2) == [[], []]


CUDA = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect."
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, "
    "NCCL version 2.30.7\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "error, is_memory",
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
            ),
            True,
        ),
        (torch.AcceleratorError(f"CUDA error: out of memory\n{CUDA}"), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("GET was unable to find an engine to execute this computation"), True),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ..."),
            True,
        ),
        (torch.distributed.DistBackendError(NCCL), True),
        (
            torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered\n{CUDA}"),
            False,
        ),
        (
            RuntimeError(
                "out of resource: shared memory, Required: 262144, Hardware limit: 166912"
            ),
            False,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x10 and 12x3)"), False),
    ],
)
def test_a_lack_of_memory_is_known_by_every_text_that_tells_it(
    error: Exception, is_memory: bool
) -> None:
    assert is_out_of_memory(error) == is_memory


def test_what_can_not_be_compiled_is_named_as_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """Without a compiler: this is no matter of the image's size."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/nowhere/g++"))
    model = nn.Sequential(nn.Linear(3, 3), nn.GELU())
    model.compile()
    with pytest.raises(
        Refused,
        match=r"^--compile failed: No working C.. compiler found .*; leave out --compile, or",
    ):
        warm_up(model, model, lambda: model(torch.ones(2, 3)).sum().backward())
