"""Ranks that disagree get HorovodInternalError on all of them, never a hang, and the world stays usable.

Also: names in flight, and ranks that have joined.
"""

from collections.abc import Callable

import pytest
import torch

import compat.horovod as hvd

ONES = torch.ones(2, 3)
# Whether this is the last rank, which differs -> the call; and what all ranks are told.
DISAGREEMENTS: dict[str, tuple[Callable[[bool], object], str]] = {
    "shape": (
        lambda last: hvd.allreduce(torch.ones(2 + last), name="x"),
        r"shapes: \[\[2\]\] on rank 0, \[\[3\]\]",
    ),
    "type": (
        lambda last: hvd.allreduce(ONES.double() if last else ONES, name="x"),
        r"types: \['float32'\] on rank 0",
    ),
    "reduction": (
        lambda last: hvd.allreduce(ONES, op=hvd.Max if last else hvd.Min, name="x"),
        "mismatched reductions",
    ),
    "prescale": (
        lambda last: hvd.allreduce(ONES, prescale_factor=1.0 + last, name="x"),
        "factors: 1.0 on rank 0",
    ),
    "postscale": (
        lambda last: hvd.allreduce(ONES, postscale_factor=1.0 + last, name="x"),
        "postscale factors",
    ),
    "operation": (
        lambda last: (hvd.allgather if last else hvd.allreduce)(ONES, name="x"),
        "allreduce on rank 0",
    ),
    "root": (
        lambda last: hvd.broadcast(ONES, int(last), name="x"),
        "mismatched root ranks: 0 on rank 0",
    ),
    "bad root": (
        lambda last: hvd.broadcast(ONES, 3, name="x"),
        "root rank 3 is not in the process set",
    ),
    "gather": (lambda last: hvd.allgather(torch.ones(2, 2 + last), name="x"), "mismatched shapes"),
    "gather of scalars": (
        lambda last: hvd.synchronize(hvd.allgather_async(torch.ones(()))),
        "no dimensions",
    ),
    "scatter of scalars": (
        lambda last: hvd.reducescatter(torch.ones(()), name="y"),
        "no dimensions",
    ),
    "group": (
        lambda last: hvd.grouped_allreduce([ONES] * (2 + last), name="y"),
        "mismatched data types",
    ),
    "ranks of a set": (
        lambda last: hvd.add_process_set([0] if last else [1]),
        "mismatched process sets",
    ),
    "too many ranks of a set": (lambda last: hvd.add_process_set([0, 3]), "there are 3 ranks"),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_a_disagreement_is_told_to_all_ranks(what: str) -> None:
    """In the same words; and the next all-reduce works."""
    call, message = DISAGREEMENTS[what]
    with pytest.raises(hvd.HorovodInternalError, match=message) as raised:
        call(hvd.rank() == 2)
    texts = hvd.allgather(
        torch.tensor(list(str(raised.value).encode().ljust(600)), dtype=torch.uint8).view(1, -1)
    )
    assert torch.equal(texts, texts[:1].expand_as(texts))
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3] * 2


def test_names_in_flight() -> None:
    rank = hvd.rank()
    tensor = torch.ones(2)
    if rank == 0:  # the others have not asked for it yet
        handle = hvd.allreduce_async(tensor, name="busy")
        for call in (
            hvd.allreduce_async,
            hvd.allgather_async,
            lambda t, name: hvd.broadcast_async(t, 0, name),
        ):
            with pytest.raises(ValueError, match="'busy' is in flight"):
                call(tensor, name="busy")
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(tensor, name="busy")
    assert hvd.synchronize(handle).tolist() == [1, 1]
    assert hvd.allreduce(tensor, name="busy").tolist() == [1, 1]  # free again


def test_ranks_with_more_or_less_data_join() -> None:
    """Ranks with more or less data: rank r has r batches. Those that have joined supply zeros."""
    rank = hvd.rank()
    size = hvd.size()
    for round_number in range(2):
        for batch in range(rank):
            active = size - 1 - batch  # ranks batch + 1 and above
            total = sum(range(batch + 1, size))
            assert hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum).tolist() == [total] * 3
            assert hvd.allreduce(torch.full((), float(rank))).item() == pytest.approx(total / size)
            several = hvd.grouped_allreduce(
                [torch.ones(2), torch.ones(1, dtype=torch.int64)], op=hvd.Sum, name="group"
            )
            assert [tensor.tolist() for tensor in several] == [[active] * 2, [active]]
            handles = [
                hvd.allreduce_async(torch.ones(4), op=hvd.Sum, name=f"{n}") for n in range(20)
            ]
            assert all(hvd.synchronize(handle).tolist() == [active] * 4 for handle in handles)
        if rank == size - 1:  # all others are there, or will be
            with pytest.raises(hvd.HorovodInternalError, match="have joined"):
                hvd.allreduce(torch.ones(2), op=hvd.Min, name="least")
            with pytest.raises(hvd.HorovodInternalError, match="have joined"):
                hvd.allgather(torch.ones(2), name=f"rows {round_number}")
        assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size] * 2
