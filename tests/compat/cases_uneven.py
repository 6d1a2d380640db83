"""DistributedOptimizer where ranks differ: gradients that are missing, sparse, of a part of the ranks, or reduced as changes.

The reference is one process that adds up what the ranks' batches give. Errors are raised on all ranks, and nothing hangs.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import compat.horovod as hvd

STEPS = 5
Loss = Callable[[nn.Module, int, int], torch.Tensor | None]


class Net(nn.Module):
    """A table of rows with sparse gradients or dense ones, and two branches."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 6, sparse=sparse)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.double()


def loss_of(model: nn.Module, step: int, rank: int, branches: tuple[int, ...], rows: bool = True) -> torch.Tensor:
    """The loss of a rank's batch in a step."""
    numbers = torch.arange(4) * (rank + 1) + step
    x = model.table(numbers % 10).mean(1) if numbers.dim() > 1 else model.table(numbers % 10)
    x = x if rows else numbers.double().cos()[:, None].expand(4, 6)
    for branch in branches:
        x = x + model.branches[branch](x)
    return F.cross_entropy(model.head(x), numbers % 3)


def uneven(model: nn.Module, step: int, rank: int) -> torch.Tensor | None:
    """Each rank takes another branch; branch 2 only rank 1 takes, and in step 3 nobody. Rank 0 has no batch in step 2."""
    if step == 2 and rank == 0:
        return None
    branches = {0: (0,), 1: (1, 2) if step != 3 else (1,)}.get(rank, (0, 1))
    return loss_of(model, step, rank, branches, rows=rank != step % 3)


def reference(
    ranks: list[int], loss: Loss, make: Callable[[Any], torch.optim.Optimizer], sparse: bool = False
) -> dict[str, torch.Tensor]:
    """One process, which averages the losses of these ranks."""
    model = Net(sparse)
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            if (own := loss(model, step, rank)) is not None:
                (own / len(ranks)).backward()
        optimizer.step()
    return model.state_dict()


def trained(
    loss: Loss, make: Callable[[Any], torch.optim.Optimizer], sparse: bool = False, **options: Any
) -> dict[str, torch.Tensor]:
    model = Net(sparse)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        if (own := loss(model, step, hvd.rank())) is not None:
            own.backward()
        optimizer.step()
    return model.state_dict()


def adamw(parameters: Iterator[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters: Iterator[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], what: str) -> None:
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=1e-10, msg=lambda text: f"{what}: {name}: {text}")  # noqa: B023


def everywhere(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return loss_of(model, step, rank, (0, 1, 2))


def without_table_on_rank_0(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return loss_of(model, step, rank, (0, 1, 2), rows=rank > 0)


def missing_and_sparse_gradients() -> None:
    ranks = [*range(hvd.size())]
    same(trained(uneven, adamw), reference(ranks, uneven, adamw), "uneven")
    same(trained(uneven, adamw, groups=2), reference(ranks, uneven, adamw), "uneven, groups")
    for loss in (everywhere, without_table_on_rank_0):
        expected = reference(ranks, loss, sgd, sparse=True)
        same(trained(loss, sgd, sparse=True), expected, "sparse")
        same(trained(loss, sgd, sparse=True, sparse_as_dense=True), expected, "sparse as dense")
    same(reference(ranks, everywhere, sgd, sparse=True), reference(ranks, everywhere, sgd), "the reference")


def two_models_in_one_optimizer() -> None:
    """Each has a loss and a backward of its own, in another order on odd steps; the optimizer steps once."""

    def run(ranks: list[int], wraps: bool) -> list[torch.Tensor]:
        models = [Net(), Net()]
        optimizer: Any = torch.optim.AdamW([{"params": model.parameters()} for model in models], lr=0.01)
        if wraps:
            named = [
                (f"{number}.{name}", p) for number, model in enumerate(models) for name, p in model.named_parameters()
            ]
            optimizer = hvd.DistributedOptimizer(optimizer, named)
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in (0, 1) if step % 2 else (1, 0):
                for rank in ranks:
                    (loss_of(models[number], step + number, rank, (0, 1, 2)) / len(ranks)).backward()
            optimizer.step()
        return [parameter.detach() for model in models for parameter in model.parameters()]

    expected = run([*range(hvd.size())], wraps=False)
    for one, other in zip(run([hvd.rank()], wraps=True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def parameters_that_change() -> None:
    """A branch is frozen at first, then thawed; another is added to the optimizer later."""

    def run(ranks: list[int], wraps: bool) -> list[torch.Tensor]:
        model = Net()
        model.branches[1].requires_grad_(False)
        early = [p for name, p in model.named_parameters() if "branches.2" not in name]
        optimizer: Any = torch.optim.AdamW(early, lr=0.01)
        if wraps:
            optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(6):
            model.branches[1].requires_grad_(step >= 2)
            if step == 4:
                optimizer.add_param_group({"params": model.branches[2].parameters(), "lr": 0.1})
            optimizer.zero_grad()
            for rank in ranks:
                (loss_of(model, step, rank, (0, 1, 2) if step >= 4 else (0, 1)) / len(ranks)).backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    expected = run([*range(hvd.size())], wraps=False)
    for one, other in zip(run([hvd.rank()], wraps=True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def part_of_the_ranks() -> None:
    """Gradients of a process set are reduced in it; other ranks keep their own."""
    members = [0, hvd.size() - 1] if hvd.size() > 2 else [0]
    process_set = hvd.add_process_set(members)
    own = members if hvd.rank() in members else [hvd.rank()]
    same(trained(uneven, adamw, process_set=process_set), reference(own, uneven, adamw), "process set")
    hvd.remove_process_set(process_set)


def other_operations() -> None:
    """Min, max and product go by name; Adasum of two ranks' changes."""
    size = hvd.size()
    for op, expected in ((hvd.Max, size), (hvd.Min, 1), (hvd.Product, 2 if size == 2 else 6)):
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=op)
        (parameter.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        assert (parameter == -expected).all()
    if size == 2:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), op=hvd.Adasum)
        changes = (torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0]))
        (parameter * changes[hvd.rank()]).sum().backward()
        optimizer.step()
        first, second = changes
        product = first @ second
        mixed = first * (1 - product / (2 * first @ first)) + second * (1 - product / (2 * second @ second))
        torch.testing.assert_close(parameter.detach(), -0.5 * mixed)
        with pytest.raises(AssertionError, match="not there with Adasum"), optimizer.skip_synchronize():
            pass


def joined() -> None:
    """Rank r has r + 1 batches, then it joins and supplies zeros to the average."""
    model, expected = Net(), Net()
    optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), model.named_parameters())
    plain = adamw(expected.parameters())
    for step in range(hvd.size()):
        plain.zero_grad()
        for rank in range(step, hvd.size()):
            (everywhere(expected, step, rank) / hvd.size()).backward()
        plain.step()
    for step in range(hvd.rank() + 1):
        optimizer.zero_grad()
        everywhere(model, step, hvd.rank()).backward()
        optimizer.step()
    assert hvd.join() == hvd.size() - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    same(model.state_dict(), expected.state_dict(), "joined")


def misuse() -> None:
    def made(**options: Any) -> tuple[nn.Module, Any]:
        model = nn.Linear(2, 1)
        return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    model, optimizer = made()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match=r"before optimizer\.step"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="increase backward_passes_per_step"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    assert [*optimizer._parameter_names.values()] == ["allreduce.noname.0.0", "allreduce.noname.0.1"]

    model, optimizer = made(backward_passes_per_step=2)  # a step before all passes
    (model(torch.ones(1, 2)).sum() * (hvd.rank() + 1)).backward()
    optimizer.step()
    assert (model.weight.grad == sum(range(1, hvd.size() + 1)) / hvd.size()).all()
    optimizer.zero_grad()
    model, optimizer = made()
    unused = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [unused]})
    model(torch.ones(1, 2)).sum().backward()
    model.weight.grad.mul_(2)  # would be lost
    with pytest.raises(RuntimeError, match="was changed before all gradients were reduced"):
        optimizer.step()


def disagreements() -> None:
    rank = hvd.rank()

    def step(model: nn.Module, **options: Any) -> None:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
        )
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    cases = {
        r"parameter bias: \['1', 'torch.float32', 'cpu'\] .* None": lambda: step(nn.Linear(2, 1, bias=rank == 0)),
        r"parameter weight: \['1', '2'": lambda: step(nn.Linear(2, 1 + min(rank, 1))),
        "compression: NoneCompressor .* FP16Compressor": lambda: step(
            nn.Linear(2, 1), compression=hvd.Compression.fp16 if rank else hvd.Compression.none
        ),
        r"options \(op": lambda: step(nn.Linear(2, 1), op=hvd.Sum if rank else hvd.Average),
        "groups: 1 .* 2": lambda: step(nn.Linear(2, 1), groups=1 + min(rank, 1)),
    }
    for text, case in cases.items():
        with pytest.raises(hvd.HorovodInternalError, match=f"mismatched {text}"):
            case()
    step(nn.Linear(2, 1))  # the world still works


def refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = [*model.named_parameters()]
    for text, options in {
        "unique. Found duplicates: weight": {"named_parameters": [*named, named[0]]},
        "1 parameters of the optimizer were not named": {"named_parameters": named[:1]},
        r"pairs \(name, parameter\)": {"named_parameters": [*model.parameters()]},
        "needs op Average": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        "must be > 0": {"backward_passes_per_step": 0},
        "positive integer or a list": {"groups": 0},
        "must consist of torch.Tensor": {"groups": [["weight"]]},
        "only appear once": {"groups": [[model.weight], [model.weight]]},
    }.items():
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(optimizer, **options)


CASES = (
    missing_and_sparse_gradients,
    two_models_in_one_optimizer,
    parameters_that_change,
    part_of_the_ranks,
    other_operations,
    joined,
    misuse,
    disagreements,
    refused,
)
