"""Broadcasts give all ranks the root's parameters, optimizer state and objects; nothing that
arrives runs code.
"""

import argparse
import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compat.horovod as hvd


def build_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(3), nn.Flatten()
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 2, 4, 4) + torch.arange(4)).square().sum().backward()
        optimizer.step()


def is_same(first: Any, second: Any) -> bool:
    """True if two nested values are equal, with their types."""
    if isinstance(first, torch.Tensor):
        assert isinstance(second, torch.Tensor)
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return False
        return all(is_same(first[key], second[key]) for key in first)
    if type(first) is not type(second):
        return False
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(is_same, first, second))
    return first == second


def test_parameters() -> None:
    """As a state dict, as pairs of which one is None, and as a list."""
    root = hvd.size() - 1
    forms = (
        lambda model: model.state_dict(),
        lambda model: list(model.named_parameters()) + [("nothing", None)],
        lambda model: list(model.parameters()),
    )
    for number, form in enumerate(forms):
        model = build_model(hvd.rank())
        model[1].running_mean += hvd.rank()
        hvd.broadcast_parameters(form(model), root_rank=root)
        assert all(map(is_same, model.parameters(), build_model(root).parameters()))
        assert (model[1].running_mean == (hvd.rank() if number else root)).all()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "groups": lambda p: torch.optim.Adam(
        [{"params": [first], "lr": number / 10} for number, first in enumerate(p)]
    ),
}


def test_optimizer_states() -> None:
    """The state is on the root, on all, on none, or on the others; with and without DistributedOptimizer."""
    is_root = hvd.rank() == 0
    for make in OPTIMIZERS.values():
        for number, (on_root, on_others) in enumerate(
            [(True, False), (True, True), (False, False), (False, True)]
        ):
            model = build_model(0)
            optimizer = make(model.parameters())
            if on_root if is_root else on_others:
                train(model, optimizer)
                optimizer.param_groups[0]["lr"] = 0.5 + hvd.rank()
            optimizer.param_groups[0]["note"] = {"nested": [None, hvd.rank(), (1, "a")]}
            if not is_root:
                optimizer.param_groups[0]["stale"] = 1
            used = (
                hvd.DistributedOptimizer(optimizer, model.named_parameters())
                if number % 2
                else optimizer
            )
            before = copy.deepcopy(used.state_dict())
            groups = used.param_groups
            hvd.broadcast_optimizer_state(used, root_rank=0)
            after = used.state_dict()
            assert used.param_groups is groups and bool(after["state"]) == on_root
            assert on_root or all(parameter.grad is not None for parameter in model.parameters())
            for state_of_rank in hvd.allgather_object(after):
                assert is_same(state_of_rank, after), number
            assert after["param_groups"][0]["note"] == {"nested": [None, 0, (1, "a")]}
            assert is_same(before["state"], after["state"]) or not is_root


class Stranger:
    """A class of the script's own."""


def test_objects() -> None:
    rank = hvd.rank()
    size = hvd.size()
    item = {
        "a": [1, 2.5, None],
        "t": torch.arange(3),
        "n": np.float64(0.5),
        3: {4},
        "x": argparse.Namespace(lr=1),
    }
    assert is_same(
        hvd.broadcast_object(item if rank == 1 else None, root_rank=1, name="item"), item
    )
    everyone = [{"rank": other_rank, "text": "x" * other_rank} for other_rank in range(size)]
    assert hvd.allgather_object(everyone[rank]) == everyone
    if rank == 0:
        for call in (hvd.broadcast_object, hvd.allgather_object):
            with pytest.raises(TypeError, match=r"the object holds .*Stranger.*add_safe_globals"):
                call(Stranger())
    torch.serialization.add_safe_globals([Stranger])
    assert isinstance(hvd.broadcast_object(Stranger() if rank == 0 else None), Stranger)


def test_disagreements() -> None:
    index = min(hvd.rank(), 1)
    model = build_model(0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())]
    cases = {
        "types of tensors differ: only 0: .* and None on ranks 0 and 1": lambda: (
            hvd.broadcast_parameters(
                {"same": torch.ones(2), f"only {index}": torch.ones(1)}, root_rank=0
            )
        ),
        r"a: \[2\] torch.float32 and \[3\] torch.float32 on ranks 0 and 1": lambda: (
            hvd.broadcast_parameters({"a": torch.ones(2 + index)}, root_rank=0)
        ),
        "SGD and Adam on ranks 0 and 1": lambda: hvd.broadcast_optimizer_state(
            optimizers[index], root_rank=0
        ),
    }
    for text, call in cases.items():
        with pytest.raises(hvd.HorovodInternalError, match=text):
            call()
    with pytest.raises(ValueError, match="takes a dict or a list of tensors"):
        hvd.broadcast_parameters(torch.ones(1), root_rank=0)
    with pytest.raises(ValueError, match="extra is no tensor but str"):
        hvd.broadcast_parameters({"extra": "text"}, root_rank=0)
    with pytest.raises(ValueError, match="root rank 9 is not in"):
        hvd.broadcast_object(1, root_rank=9)
