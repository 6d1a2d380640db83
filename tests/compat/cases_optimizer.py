"""DistributedOptimizer makes the steps that one process makes on all ranks' data, for each option,
and refuses what it must.

The reference is one process that adds up what the ranks' batches give. Errors are raised on all
ranks, and nothing hangs.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import compat.horovod as hvd

STEPS = 5
Loss = Callable[[nn.Module, int, int], torch.Tensor | None]


class Net(nn.Module):
    """A table of rows, a convolution in channels_last, three branches, a layer that nothing uses,
    and a frozen one.
    """

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 6, sparse=sparse)
        self.conv = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)
        self.double()


def compute_loss(
    model: nn.Module, step: int, rank: int, branches: Sequence[int] = (0, 1, 2), rows: bool = True
) -> torch.Tensor:
    """The loss of a rank's batch of four samples in a step; without `rows` it does not use the table."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=generator)
    x = model.frozen(model.conv(images).tanh().mean((2, 3)))
    if rows:
        x = x + model.table((torch.arange(4) * (rank + 1) + step) % 10)
    for branch in branches:
        x = x + model.branches[branch](x)
    return F.cross_entropy(model.head(x), torch.arange(4) % 4)


def compute_uneven_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor | None:
    """Each rank takes another branch; branch 2 only rank 1 takes, and in step 3 nobody. Rank 0 has
    no batch in step 2.
    """
    if step == 2 and rank == 0:
        return None
    branches = {0: (0,), 1: (1, 2)}.get(rank, (0, 1))
    if rank == 1 and step == 3:
        branches = (1,)
    return compute_loss(model, step, rank, branches, rows=rank != step % 3)


def build_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def build_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def fill(model: nn.Module) -> None:
    """As Horovod does, make gradients that are missing zeros."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def train_reference(
    ranks: Sequence[int],
    loss: Loss = compute_loss,
    make: Any = build_adamw,
    clip: float = 0.0,
    **options: Any,
) -> Any:
    """One process, which averages the losses of these ranks."""
    model = Net(**options)
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            local_loss = loss(model, step, rank)
            if local_loss is not None:
                (local_loss / len(ranks)).backward()
        if len(ranks) > 1:
            fill(model)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def train(
    loss: Loss = compute_loss,
    make: Any = build_adamw,
    *,
    sparse: bool = False,
    named: bool = True,
    passes: int = 1,
    factor: float = 1.0,
    clip: float = 0.0,
    **options: Any,
) -> dict[str, torch.Tensor]:
    model = Net(sparse)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters() if named else None,
        backward_passes_per_step=passes,
        **options,
    )
    assert type(optimizer).__name__ == type(make(model.parameters())).__name__
    assert list(optimizer._parameter_names) == list(model.parameters())
    if named:
        assert list(optimizer._parameter_names.values()) == [
            name for name, _ in model.named_parameters()
        ]
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(passes):
            local_loss = loss(model, step, hvd.rank())
            if local_loss is not None:
                (local_loss * factor / passes).backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize() if clip else contextlib.nullcontext():
            optimizer.step()
    return model.state_dict()


def assert_equal(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-10
) -> None:
    for key, value in actual.items():
        assert torch.equal(hvd.broadcast(value, 0), value), f"{key} differs between ranks"
        torch.testing.assert_close(value, expected[key], rtol=0, atol=tolerance, msg=key)


# Of the reference, and of the three ranks; then of the three ranks alone.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "without names": ({}, {"named": False}),
    "two passes": ({}, {"passes": 2}),
    "sum": ({}, {"op": hvd.Sum, "factor": 1 / 3}),
    "predivide": ({}, {"gradient_predivide_factor": 2.0}),
    "clipped": ({"clip": 0.01}, {}),
    "fp16": ({}, {"compression": hvd.Compression.fp16}),
    "uneven": ({"loss": compute_uneven_loss}, {}),
    "sparse": ({"make": build_sgd, "sparse": True}, {}),
    "sparse on some ranks": (
        {
            "loss": lambda model, step, rank: compute_loss(model, step, rank, rows=rank > 0),
            "make": build_sgd,
            "sparse": True,
        },
        {"sparse_as_dense": True},
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_steps_are_those_of_one_process(option: str) -> None:
    """In float64 within 1e-10. In fp16 a gradient keeps 11 bits, and AdamW's steps of 0.01 then
    agree to about 1 %.
    """
    shared, of_ranks = OPTIONS[option]
    actual = train(**shared, **of_ranks)
    assert_equal(actual, train_reference(range(3), **shared), 1e-3 if option == "fp16" else 1e-10)
    if option in ("fp16", "clipped"):
        plain = train_reference(range(3))["head.weight"]
        assert not torch.equal(actual["head.weight"], plain), "nothing was compressed or clipped"


def test_closures_and_reloads() -> None:
    """Steps with a closure, gradients that are kept, and a reload of the state after each step."""
    model = Net()
    optimizer = hvd.DistributedOptimizer(build_adamw(model.parameters()), model.named_parameters())
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            model.zero_grad(set_to_none=False)
            loss = compute_loss(model, step, hvd.rank())
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_equal(model.state_dict(), train_reference(range(3)))


def test_a_scaler_and_schedules() -> None:
    """A gradient scaler that meets an overflow on one rank, and a scheduler made before the
    optimizer was wrapped.
    """
    model = Net()
    plain = build_adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(plain, 100)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in [0] + list(range(STEPS)):
        optimizer.zero_grad()
        overflow = scaler.get_scale() == 1024.0 and hvd.rank() == hvd.size() - 1
        loss = compute_loss(model, step, hvd.rank()) * (float("inf") if overflow else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert scaler.get_scale() == 512.0
    assert schedule.get_last_lr() == scheduler.get_last_lr() == [0.01]
    assert_equal(model.state_dict(), train_reference(range(3)))


def test_models_and_parameters_that_change() -> None:
    """Two models with backwards of their own, in another order on odd steps; branches are thawed,
    or added, on the way.
    """

    def run(ranks: Sequence[int], wraps: bool) -> list[torch.Tensor]:
        models = [Net(), Net()]
        models[1].branches[1].requires_grad_(False)
        named = [
            (f"{number}.{name}", p)
            for number, model in enumerate(models)
            for name, p in model.named_parameters()
        ]
        named = [(name, parameter) for name, parameter in named if "1.branches.2" not in name]
        optimizer: Any = build_adamw([parameter for _, parameter in named])
        if wraps:
            optimizer = hvd.DistributedOptimizer(optimizer, named)
        for step in range(6):
            models[1].branches[1].requires_grad_(step >= 2)
            if step == 4:
                optimizer.add_param_group({"params": models[1].branches[2].parameters(), "lr": 0.1})
            optimizer.zero_grad()
            for number in (0, 1) if step % 2 else (1, 0):
                for rank in ranks:
                    branches = (0, 1, 2) if step >= 4 else (0, 1)
                    (
                        compute_loss(models[number], step + number, rank, branches) / len(ranks)
                    ).backward()
            if not wraps:
                fill(models[0])
                fill(models[1])
            optimizer.step()
        return [parameter.detach() for model in models for parameter in model.parameters()]

    expected = run(range(hvd.size()), wraps=False)
    for actual_tensor, expected_tensor in zip(run([hvd.rank()], wraps=True), expected, strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor, rtol=0, atol=1e-10)


def test_sparse_tables() -> None:
    """SparseAdam, which takes sparse gradients only, sums up rows of all ranks; then a rank uses
    none, and one differs.
    """
    rows_by_rank = [[1, 2, 2], [1, 7], [9, 3]]

    def run(batches: list[list[int]], **options: Any) -> tuple[nn.Embedding, Any]:
        torch.manual_seed(0)
        table = nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
        optimizer: Any = torch.optim.SparseAdam([table.weight], lr=0.1)
        if options:
            optimizer = hvd.DistributedOptimizer(optimizer, **options)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(3):
            optimizer.zero_grad()
            for batch in batches:
                if step != 1 or batch != rows_by_rank[0]:
                    (table(torch.tensor(batch)).pow(2).sum() / (1 if options else 3)).backward()
            optimizer.step()
        return table, optimizer

    assert hvd.size() == 3
    expected, _ = run(rows_by_rank)
    for as_dense in (False, True):
        table, optimizer = run([rows_by_rank[hvd.rank()]], sparse_as_dense=as_dense)
        torch.testing.assert_close(table.weight, expected.weight, rtol=0, atol=1e-12)
        assert table.weight.grad.is_sparse
    table, optimizer = run([rows_by_rank[hvd.rank()]], sparse_as_dense=False)
    optimizer.zero_grad()
    table.sparse = hvd.rank() > 0
    with pytest.raises(hvd.HorovodInternalError, match="mismatched shapes"):
        optimizer.step(lambda: table(torch.tensor([1])).sum().backward())


def test_part_of_the_ranks() -> None:
    """Gradients of a process set are reduced in it; other ranks keep their own."""
    members = [0, 2]
    process_set = hvd.add_process_set(members)
    own = members if hvd.rank() in members else [hvd.rank()]
    expected = train_reference(own, compute_uneven_loss)
    for name, value in train(compute_uneven_loss, process_set=process_set).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)
    hvd.remove_process_set(process_set)


def build(
    width: int = 2, bias: bool = True, **options: Any
) -> tuple[Callable[[], None], nn.Module, Any]:
    """A backward of a small model, the model and its optimizer."""
    model = nn.Linear(width, 1, bias=bias)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
    )
    return (
        lambda: model(torch.ones(1, width)).sum().mul(hvd.rank() + 1).backward(),
        model,
        optimizer,
    )


def test_misuse() -> None:
    backward, model, optimizer = build()
    backward()
    with pytest.raises(AssertionError, match=r"before optimizer\.step"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="increase backward_passes_per_step"):
        backward()
    with pytest.raises(RuntimeError, match="was changed before all gradients were reduced"):
        optimizer.step()  # what came later would be lost
    backward, model, optimizer = build()
    backward()
    optimizer.synchronize()
    with pytest.warns(
        UserWarning, match=r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\)"
    ):
        optimizer.step()
    optimizer.zero_grad()
    backward, model, optimizer = build(backward_passes_per_step=2)  # a step before all passes
    backward()
    optimizer.step()
    assert (model.weight.grad == sum(range(1, hvd.size() + 1)) / hvd.size()).all()


def test_disagreements() -> None:
    rank = hvd.rank()
    cases: dict[str, dict[str, Any]] = {
        r"bias: \[1\] torch.float32 cpu and None": {"bias": rank == 0},
        r"weight: \[1, 2\].* and \[1, 3\]": {"width": 2 + min(rank, 1)},
        "compression: NoneCompressor and FP16Compressor": {
            "compression": hvd.Compression.fp16 if rank else hvd.Compression.none
        },
        "op: 0 and 1": {"op": hvd.Sum if rank else hvd.Average},
        "backward_passes_per_step: 1 and 2": {"backward_passes_per_step": 1 + min(rank, 1)},
    }
    for text, options in cases.items():
        with pytest.raises(
            hvd.HorovodInternalError, match=f"parameters differ: {text}.* on ranks 0 and 1"
        ):
            build(**options)
    # Ranks freeze different ones, of the same shapes.
    layers = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layers.parameters(), lr=0.1), layers.named_parameters()
    )
    layers[min(rank, 1)].requires_grad_(False)
    with pytest.raises(hvd.HorovodInternalError, match="mismatched parameters"):
        optimizer.step(
            lambda: (layers[0](torch.ones(1, 2)) + layers[1](torch.ones(1, 2))).sum().backward()
        )
    backward, _, optimizer = build()
    backward()
    optimizer.step()  # the world still works


def test_refusals() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    with pytest.raises(
        NotImplementedError, match=r"Average, with the learning rate for it, or hvd\.Sum"
    ):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    for text, options in {
        "unique. Found duplicates: weight": {"named_parameters": named + [named[0]]},
        "1 parameters of the optimizer were not named": {"named_parameters": named[:1]},
        r"pairs \(name, parameter\)": {"named_parameters": list(model.parameters())},
        "needs op Average": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        "must be > 0": {"backward_passes_per_step": 0},
    }.items():
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(optimizer, **options)
