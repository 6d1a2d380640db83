"""DistributedOptimizer makes the steps that one process makes on the whole batch, for each option, and refuses what it must."""

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import compat.horovod as hvd

SAMPLES, STEPS = 12, 5


class Net(nn.Module):
    """A convolution in channels_last, a branch that can be left out, one that nothing uses, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.branch = nn.Linear(5, 5)
        self.unused = nn.Linear(5, 5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        x = self.frozen(self.conv(x).tanh().mean((2, 3)))
        return self.head(x + self.branch(x) if branch else x)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [12, 3, 6, 6] and labels [12] of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 3, 6, 6, dtype=torch.float64, generator=generator), torch.arange(SAMPLES) % 4


def part(step: int, first: int = 0, of: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the step's samples."""
    images, labels = data(step)
    return images[hvd.rank() :: hvd.size()][first::of], labels[hvd.rank() :: hvd.size()][first::of]


def weights(*models: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": value for number, model in enumerate(models) for name, value in model.state_dict().items()
    }


def plain() -> dict[str, torch.Tensor]:
    """Five AdamW steps of one process on the whole batch."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        images, labels = data(step)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return weights(model)


# --- cases that equal `plain`; each runs on every rank


def trained(passes: int = 1, factor: float = 1.0, **options: Any) -> dict[str, torch.Tensor]:
    model = net()
    named = options.pop("named", True)
    groups = options.pop("lists", None)
    if groups:
        parameters = dict(model.named_parameters())
        options["groups"] = [[parameters[name] for name in group] for group in groups]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters() if named else None, backward_passes_per_step=passes, **options
    )
    assert isinstance(optimizer, torch.optim.AdamW) and type(optimizer).__name__ == "AdamW"
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            images, labels = part(step, number, passes)
            (F.cross_entropy(model(images), labels) * factor / passes).backward()
        optimizer.step()
    return weights(model)


def clipped(how: str) -> dict[str, torch.Tensor]:
    """Gradients are clipped that are those of the whole batch. Without parameters that lack one, the backward reduces."""
    model = net()
    model.unused.requires_grad_(how == "synchronize")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if how != "plain":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(STEPS):
        images, labels = data(step) if how == "plain" else part(step)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if how == "synchronize":
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize() if how != "plain" else contextlib.nullcontext():
            optimizer.step()
    return weights(model)


def with_closure() -> dict[str, torch.Tensor]:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters())
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            images, labels = part(step)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
    return weights(model)


def keeping_gradients() -> dict[str, torch.Tensor]:
    """zero_grad that keeps the tensors, and a reload of the state in the middle."""
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters())
    for step in range(STEPS):
        images, labels = part(step)
        for parameter in model.unused.parameters():
            parameter.grad = None
        model.zero_grad(set_to_none=False)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
    return weights(model)


def with_scaler_and_schedule() -> dict[str, torch.Tensor]:
    """A gradient scaler that meets an overflow on one rank, and a scheduler made before the optimizer was wrapped."""
    model = net()
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 100)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    later = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in (0, 0, 1, 2, 3, 4):
        optimizer.zero_grad()
        images, labels = part(step)
        overflow = scaler.get_scale() == 1024.0 and hvd.rank() == hvd.size() - 1
        loss = F.cross_entropy(model(images), labels) * (float("inf") if overflow else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        later.step()
    assert scaler.get_scale() == 512.0
    assert schedule.get_last_lr() == later.get_last_lr() == [0.01]
    return weights(model)


def equals_one_process() -> None:
    """In float64 within 1e-10. In fp16 a gradient keeps 11 bits, and AdamW's steps of 0.01 then agree to about 1 %."""
    cases: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "default": trained,
        "without names": lambda: trained(named=False),
        "two passes": lambda: trained(passes=2),
        "sum": lambda: trained(op=hvd.Sum, factor=1 / hvd.size()),
        "predivide": lambda: trained(gradient_predivide_factor=2.0),
        "three groups": lambda: trained(groups=3),
        "lists": lambda: trained(lists=[["head.weight", "conv.bias"], ["conv.weight", "frozen.bias"]]),
        "own compression": lambda: trained(compression=Halved),
        "process set": lambda: trained(process_set=hvd.global_process_set),
        "closure": with_closure,
        "keeping gradients": keeping_gradients,
        "scaler": with_scaler_and_schedule,
    }
    seen = {name: case() for name, case in cases.items()}
    for how in ("synchronize", "automatic"):
        seen[f"clipped, {how}"] = clipped(how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen["num_groups"] = trained(num_groups=2)
    assert any("num_groups" in str(warning.message) for warning in caught)
    seen["fp16"] = trained(compression=hvd.Compression.fp16)
    expected, clip = plain(), clipped("plain")
    for name, model in seen.items():
        for key, value in model.items():
            assert torch.equal(hvd.broadcast(value, 0), value), f"{name}: {key} differs between ranks"
            if name == "own compression" and "unused" in key:
                continue  # reduced by name, where a gradient that no rank has becomes zeros: weight decay moves it
            against = clip if name.startswith("clipped") else expected
            tolerance = 1e-3 if name == "fp16" else 1e-10
            torch.testing.assert_close(value, against[key], rtol=0, atol=tolerance, msg=f"{name}: {key}")
    if hvd.size() > 1:
        assert not torch.equal(seen["fp16"]["0.head.weight"], expected["0.head.weight"])  # it was compressed
    assert not torch.allclose(clip["0.head.weight"], expected["0.head.weight"])


class Halved:
    """A compression of the user's own, which loses nothing."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
        return tensor / 2, 2.0

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: float) -> torch.Tensor:
        return tensor * ctx


CASES = (equals_one_process,)
