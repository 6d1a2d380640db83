"""Ranks that disagree get HorovodInternalError on all of them, never a hang, and the world stays usable.

Also: names in flight, and ranks that have joined.
"""

from collections.abc import Callable

import pytest
import torch

import compat.horovod as hvd


def fails_on_all(call: Callable[[], object], text: str) -> None:
    """The call fails on every rank with the same text, and the next all-reduce works."""
    with pytest.raises(hvd.HorovodInternalError, match=text) as raised:
        call()
    texts = hvd.allgather(torch.tensor([*str(raised.value).encode().ljust(600)], dtype=torch.uint8).view(1, -1))
    assert torch.equal(texts, texts[:1].expand_as(texts))
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def disagreements() -> None:
    rank, size = hvd.rank(), hvd.size()
    one, other = torch.ones(2, 3), rank == size - 1  # the last rank differs
    cases: list[tuple[str, Callable[[], object], str]] = [
        ("shape", lambda: hvd.allreduce(torch.ones(3 if other else 2), name="x"), r"shapes: \[\[2\]\] on rank 0, \[\[3\]\]"),
        ("type", lambda: hvd.allreduce(one.double() if other else one, name="x"), r"types: \['float32'\] on rank 0"),
        ("reduction", lambda: hvd.allreduce(one, op=hvd.Max if other else hvd.Min, name="x"), "mismatched reductions"),
        ("prescale", lambda: hvd.allreduce(one, prescale_factor=1.0 + other, name="x"), "prescale factors: 1.0 on rank 0"),
        ("postscale", lambda: hvd.allreduce(one, postscale_factor=1.0 + other, name="x"), "postscale factors"),
        ("operation", lambda: (hvd.allgather if other else hvd.allreduce)(one, name="x"), "operations: allreduce on rank 0"),
        ("root", lambda: hvd.broadcast(one, int(other), name="x"), "mismatched root ranks: 0 on rank 0"),
        ("bad root", lambda: hvd.broadcast(one, size, name="x"), f"root rank {size} is not in the process set"),
        ("gather", lambda: hvd.allgather(torch.ones(2, 2 + other), name="x"), "mismatched shapes"),
        ("gather of scalars", lambda: hvd.synchronize(hvd.allgather_async(torch.ones(()))), "no dimensions"),
        ("scatter of scalars", lambda: hvd.reducescatter(torch.ones(()), name="y"), "no dimensions"),
        ("group", lambda: hvd.grouped_allreduce([one] * (2 + other), name="y"), "mismatched data types"),
        ("ranks of a set", lambda: hvd.add_process_set([0] if other else [1]), "mismatched process sets"),
        ("too many ranks of a set", lambda: hvd.add_process_set([0, size]), f"there are {size} ranks"),
    ]  # fmt: skip
    for name, call, text in cases:
        try:
            fails_on_all(call, text)
        except BaseException as error:
            raise AssertionError(name) from error


def names_in_flight() -> None:
    rank, one = hvd.rank(), torch.ones(2)
    if rank == 0:  # the others have not asked for it yet
        handle = hvd.allreduce_async(one, name="busy")
        for call in (hvd.allreduce_async, hvd.allgather_async, lambda t, name: hvd.broadcast_async(t, 0, name)):
            with pytest.raises(ValueError, match="'busy' is in flight"):
                call(one, name="busy")
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(one, name="busy")
    assert hvd.synchronize(handle).tolist() == [1, 1]
    assert hvd.allreduce(one, name="busy").tolist() == [1, 1]  # free again


def joining() -> None:
    """Ranks with more or less data: rank r has r batches. Those that have joined supply zeros."""
    rank, size = hvd.rank(), hvd.size()
    for round_number in range(2):
        for batch in range(rank):
            active = size - 1 - batch  # ranks batch + 1 and above
            total = sum(range(batch + 1, size))
            assert hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum).tolist() == [total] * 3
            assert hvd.allreduce(torch.full((), float(rank))).item() == pytest.approx(total / size)
            several = hvd.grouped_allreduce([torch.ones(2), torch.ones(1, dtype=torch.int64)], op=hvd.Sum, name="group")
            assert [tensor.tolist() for tensor in several] == [[active] * 2, [active]]
            handles = [hvd.allreduce_async(torch.ones(4), op=hvd.Sum, name=f"{n}") for n in range(20)]
            assert all(hvd.synchronize(handle).tolist() == [active] * 4 for handle in handles)
        if rank == size - 1:  # all others are there, or will be
            with pytest.raises(hvd.HorovodInternalError, match="have joined"):
                hvd.allreduce(torch.ones(2), op=hvd.Min, name="least")
            with pytest.raises(hvd.HorovodInternalError, match="have joined"):
                hvd.allgather(torch.ones(2), name=f"rows {round_number}")
        assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size] * 2


CASES = (disagreements, names_in_flight, joining)
