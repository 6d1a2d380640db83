"""Every collective of the Horovod API gives what plain torch computes from all ranks' tensors,
whatever the number of ranks.

Covered: all reductions, types and devices of a CPU machine, ragged and empty tensors, no
dimensions, views that are not contiguous, groups, handles, in-place forms, names in another order
on every rank, and gradients.
"""

import functools
import random
import time

import pytest
import torch

import compat.horovod as hvd

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = ((), (5,), (0,), (2, 0, 3), (2, 3, 4))


def draw(
    rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """The tensor of a rank: small whole numbers, so that sums are exact in every type."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def draw_on_all_ranks(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """The tensors of all ranks, stacked."""
    return torch.stack([draw(rank, shape, dtype, seed) for rank in range(hvd.size())])


def assert_same(actual: torch.Tensor, expected: torch.Tensor, **tolerances: float) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, **({"rtol": 0, "atol": 0} | tolerances))


def test_reductions() -> None:
    rank = hvd.rank()
    size = hvd.size()
    for dtype in FLOATS + INTEGERS:
        rtol = 1e-2 if dtype in FLOATS[:2] else 1e-6
        for shape in SHAPES:
            local = draw(rank, shape, dtype)
            everyone = draw_on_all_ranks(shape, torch.float64)
            total = everyone.sum(0)
            before = local.clone()
            average = total / size
            assert_same(hvd.allreduce(local, op=hvd.Sum), total.to(dtype))
            if dtype in INTEGERS:
                average = average.trunc()
            assert_same(hvd.allreduce(local), average.to(dtype), rtol=rtol)
            assert_same(hvd.allreduce(local, op=hvd.Min), everyone.amin(0).to(dtype))
            assert_same(hvd.allreduce(local, op=hvd.Max), everyone.amax(0).to(dtype))
            assert_same(hvd.allreduce(local, op=hvd.Product), everyone.prod(0).to(dtype))
            assert_same(local, before)  # not modified
            assert hvd.allreduce_(local, op=hvd.Sum) is local
            assert_same(local, total.to(dtype))
    local = draw(rank, (3, 4))
    total = draw_on_all_ranks((3, 4)).sum(0)
    assert_same(
        hvd.allreduce(local, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), total * 1.5
    )
    assert_same(
        hvd.allreduce(local, prescale_factor=0.5, postscale_factor=3.0),
        total * 1.5 / size,
        rtol=1e-6,
    )
    # Integers are rounded towards zero, each rank's and the sum.
    whole = draw(rank, (4,), torch.int32)
    halves = draw_on_all_ranks((4,), torch.int32).double().mul(0.5).trunc().sum(0)
    assert_same(
        hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5, postscale_factor=-0.5),
        halves.mul(-0.5).trunc().int(),
    )
    for average, expected in ((False, total), (True, total / size)):
        with pytest.warns(DeprecationWarning, match="average is deprecated"):
            assert_same(hvd.allreduce(local, average=average), expected, rtol=1e-6)
    reduced = hvd.allreduce(local + 1e-4, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert_same(reduced, total, rtol=1e-3, atol=1e-3)
    assert_same(
        hvd.allreduce(local.int(), op=hvd.Sum, compression=hvd.Compression.fp16), total.int()
    )
    big = draw(rank, (300_000,))
    assert_same(hvd.allreduce(big, op=hvd.Sum), draw_on_all_ranks((300_000,)).sum(0))


def test_layouts() -> None:
    rank = hvd.rank()
    size = hvd.size()
    base = draw(rank, (4, 6))
    everyone = draw_on_all_ranks((4, 6))
    for view in (lambda t: t.mT, lambda t: t[..., ::2], lambda t: t[..., :1].expand(*t.shape)):
        assert_same(hvd.allreduce(view(base), op=hvd.Sum), view(everyone).sum(0))
        assert_same(
            hvd.allgather(view(base)),
            torch.cat([view(draw(other_rank, (4, 6))) for other_rank in range(size)]),
        )
        assert_same(hvd.broadcast(view(base), 1), view(draw(1, (4, 6))))
    target = base.clone()
    assert hvd.allreduce_(target.mT, op=hvd.Sum).mT.data_ptr() == target.data_ptr()
    assert_same(target, everyone.sum(0))
    hvd.broadcast_(target[:, ::2], root_rank=size - 1)
    assert_same(target[:, 1::2], everyone.sum(0)[:, 1::2])
    weight = torch.nn.Parameter(draw(rank, (3,)))
    hvd.broadcast_(weight, 0)  # in place, of a leaf that requires a gradient
    assert_same(weight.data, draw(0, (3,)))
    assert weight.grad_fn is None


def test_groups() -> None:
    rank = hvd.rank()
    size = hvd.size()
    kinds = [
        ((3,), torch.float32),
        ((), torch.int64),
        ((2, 2), torch.float64),
        ((0,), torch.float32),
    ]
    tensors = [draw(rank, shape, dtype, seed) for seed, (shape, dtype) in enumerate(kinds)]
    sums = [
        draw_on_all_ranks(shape, dtype, seed).sum(0).to(dtype)
        for seed, (shape, dtype) in enumerate(kinds)
    ]
    in_place = [tensor.clone() for tensor in tensors]
    handle = hvd.grouped_allreduce_async_([tensor.clone() for tensor in tensors], op=hvd.Sum)
    results = [
        hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group"),
        hvd.grouped_allreduce_(in_place, op=hvd.Sum),
    ]
    for actual, expected in zip(results[1], in_place, strict=True):
        assert actual is expected
    for result in results + [hvd.synchronize(handle)]:
        for actual, expected in zip(result, sums, strict=True):
            assert_same(actual, expected)
    for actual, i in zip(hvd.grouped_allgather([tensors[0], tensors[2]]), (0, 2), strict=True):
        assert_same(actual, draw_on_all_ranks(*kinds[i], i).flatten(0, 1))
    rows = hvd.grouped_reducescatter(
        [draw(rank, (size * 2, 2)), draw(rank, (size + 1,))], op=hvd.Sum
    )
    assert_same(rows[0], draw_on_all_ranks((size * 2, 2)).sum(0)[2 * rank : 2 * rank + 2])
    assert_same(rows[1], draw_on_all_ranks((size + 1,)).sum(0)[[0, 1] if rank == 0 else [rank + 1]])


def test_movements() -> None:
    rank = hvd.rank()
    size = hvd.size()
    for dtype in FLOATS + INTEGERS + (torch.bool, torch.complex64):
        for rows in (
            [2] * size,
            list(range(size)),
            [0] * size,
            [3 * (r == 1) for r in range(size)],
        ):
            expected = torch.cat([draw(r, (rows[r], 3), dtype) for r in range(size)])
            assert_same(hvd.allgather(draw(rank, (rows[rank], 3), dtype)), expected)
        for shape in SHAPES:
            assert_same(
                hvd.broadcast(draw(rank, shape, dtype), size - 1), draw(size - 1, shape, dtype)
            )
            target = draw(rank, shape, dtype)
            assert hvd.broadcast_(target, 0) is target
            assert_same(target, draw(0, shape, dtype))
        expected = draw_on_all_ranks((2 * size, 2), dtype)[:, 2 * rank : 2 * rank + 2].flatten(0, 1)
        assert_same(hvd.alltoall(draw(rank, (2 * size, 2), dtype)), expected)
    assert_same(hvd.allgather(torch.empty(rank + 1, 0)), torch.empty(size * (size + 1) // 2, 0))
    # Rank r sends i + r rows to rank i; given as a tensor and as a list.
    splits = [[i + r for i in range(size)] for r in range(size)]
    sent = [draw(r, (sum(splits[r]), 2)) for r in range(size)]
    expected = torch.cat([sent[r].split(splits[r])[rank] for r in range(size)])
    for tensor in (
        torch.tensor(splits[rank], dtype=torch.int32),
        torch.tensor(splits[rank]),
        splits[rank],
    ):
        received, counts = hvd.alltoall(sent[rank], tensor)
        assert_same(received, expected)
        assert counts.tolist() == [rank + r for r in range(size)]
        assert counts.dtype == (tensor.dtype if isinstance(tensor, torch.Tensor) else torch.int32)
    nothing, counts = hvd.alltoall(sent[rank][:0], [0] * size)
    assert nothing.shape == (0, 2) and counts.tolist() == [0] * size
    to_first, counts = hvd.synchronize(
        hvd.alltoall_async(draw(rank, (2, 2)), [2] + [0] * (size - 1))
    )
    assert len(to_first) == (2 * size if rank == 0 else 0)
    for rows in (size, 2 * size + 1, size - 1, 0):
        total = (
            draw_on_all_ranks((rows, 2))
            .sum(0)
            .split([rows // size + (r < rows % size) for r in range(size)])[rank]
        )
        assert_same(hvd.reducescatter(draw(rank, (rows, 2)), op=hvd.Sum), total)
        assert_same(
            hvd.reducescatter(draw(rank, (rows, 2)), prescale_factor=2.0),
            total * 2 / size,
            rtol=1e-6,
        )
    compressed = hvd.reducescatter(
        draw(rank, (size, 2)), op=hvd.Sum, compression=hvd.Compression.fp16
    )
    assert_same(compressed, draw_on_all_ranks((size, 2)).sum(0)[rank : rank + 1])


def test_handles_in_any_order() -> None:
    """Every rank asks in an order of its own; results come to the right handles."""
    rank = hvd.rank()
    size = hvd.size()
    calls = {
        f"tensor {n}": (
            lambda name, n=n: hvd.allreduce_async(
                draw(rank, (n % 7,), seed=n), name=name, op=hvd.Sum
            ),
            draw_on_all_ranks((n % 7,), seed=n).sum(0),
        )
        for n in range(40)
    }
    row = draw_on_all_ranks((size,)).sum(0)[rank : rank + 1]
    calls |= {
        "gather": (
            lambda name: hvd.allgather_async(draw(rank, (2,)), name=name),
            draw_on_all_ranks((2,)).flatten(),
        ),
        "broadcast": (
            lambda name: hvd.broadcast_async(draw(rank, (2,)), 0, name=name),
            draw(0, (2,)),
        ),
        "in place": (
            lambda name: hvd.broadcast_async_(draw(rank, (2,)), 0, name=name),
            draw(0, (2,)),
        ),
        "scatter": (
            lambda name: hvd.reducescatter_async(draw(rank, (size,)), name=name, op=hvd.Sum),
            row,
        ),
    }
    order = list(calls)
    random.Random(rank).shuffle(order)
    handles = {name: calls[name][0](name) for name in order}
    random.Random(rank + 9).shuffle(order)
    for i, name in enumerate(order):
        while i % 3 == 0 and not hvd.poll(handles[name]):
            time.sleep(0)
        assert_same(hvd.synchronize(handles[name]), calls[name][1])


def test_gradients() -> None:
    """Gradients by the documented rules, from outputs' gradients that differ between ranks."""
    rank = hvd.rank()
    size = hvd.size()

    def compute_gradient(function, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        leaf = tensor.double().requires_grad_()
        output = function(leaf)
        if isinstance(output, list | tuple):
            output = output[0]
        loss = (output * torch.arange(1.0, 1 + output.numel()).view(output.shape)).sum()
        (loss * factor).backward()
        return leaf.grad

    def build_weights(*shape: int) -> torch.Tensor:
        return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)

    local = draw(rank, (3, 2))
    factors = [r + 1.0 for r in range(size)]
    total = sum(factors)
    factor = factors[rank]
    assert_same(
        compute_gradient(lambda t: hvd.allreduce(t, op=hvd.Sum), local, factor),
        build_weights(3, 2) * total,
    )
    assert_same(compute_gradient(hvd.allreduce, local, factor), build_weights(3, 2) * total / size)
    scaled = compute_gradient(
        lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25),
        local,
        factor,
    )
    assert_same(scaled, build_weights(3, 2) * total * 0.5)
    assert_same(
        compute_gradient(lambda t: hvd.grouped_allreduce([t, t * 2], op=hvd.Sum), local, factor),
        build_weights(3, 2) * total,
    )
    rows = [r + 1 for r in range(size)]
    whole = build_weights(sum(rows), 2) * total / size
    start = sum(rows[:rank])
    for gather in (hvd.allgather, lambda t: hvd.grouped_allgather([t, t])):
        assert_same(
            compute_gradient(gather, draw(rank, (rows[rank], 2)), factor),
            whole[start : start + rows[rank]],
        )
    expected = torch.zeros(3, 2, dtype=torch.float64)
    if rank == 1:
        expected = build_weights(3, 2) * total / size
    assert_same(compute_gradient(lambda t: hvd.broadcast(t, 1), local, factor), expected)
    even = draw(rank, (2 * size, 2))
    back = [build_weights(2 * size, 2)[2 * rank : 2 * rank + 2] * factors[r] for r in range(size)]
    for splits in (None, [2] * size):
        exchange = functools.partial(hvd.alltoall, splits=splits)
        assert_same(compute_gradient(exchange, even, factor), torch.cat(back))
    uneven = draw(rank, (size + 1, 2))
    lengths = [2] + [1] * (size - 1)
    gathered = torch.cat([build_weights(lengths[r], 2) * factors[r] for r in range(size)])
    assert_same(compute_gradient(hvd.reducescatter, uneven, factor), gathered)
    assert_same(
        compute_gradient(lambda t: hvd.grouped_reducescatter([t, t], op=hvd.Sum), uneven, factor),
        gathered * size,
    )
    with pytest.raises(NotImplementedError, match="Average and hvd"):
        compute_gradient(lambda t: hvd.allreduce(t, op=hvd.Max), local, factor)


def test_sparse_tensors() -> None:
    """Like an allreduce of the dense tensors, also where a rank has no values, repeats indices, or
    is left out.
    """
    pairs = hvd.add_process_set([0, 2])
    for op in (hvd.Average, hvd.Sum):
        for process_set in (hvd.global_process_set, pairs):
            if not process_set.included():
                continue
            dense = draw(hvd.rank(), (4, 3)).double()
            dense[: hvd.rank() + 2] = 0
            tensor = dense.to_sparse(1)
            tensor = torch.sparse_coo_tensor(  # not coalesced: each row stands there twice
                torch.cat([tensor.indices()] * 2, 1), torch.cat([tensor.values()] * 2), tensor.shape
            )
            handle = hvd.sparse_allreduce_async(tensor, f"sparse.{op}", op, process_set)
            result = handle()
            assert result.is_sparse
            expected = hvd.allreduce(dense * 2, op=op, process_set=process_set)
            torch.testing.assert_close(result.to_dense(), expected, rtol=0, atol=1e-12)
    hvd.remove_process_set(pairs)


def test_refusals() -> None:
    """What is wrong on this rank alone is refused there, before anything is sent; a restart would
    mend none of it.
    """
    ones = torch.ones(2)
    rows = torch.ones(2, 3)
    size = hvd.size()
    zeros = [0] * (size - 1)
    cases = (
        ("can't be reduced", lambda: hvd.allreduce(ones.to(torch.complex64))),
        ("sparse_allreduce_async", lambda: hvd.allreduce_async(torch.eye(2).to_sparse())),
        ("op or average", lambda: hvd.allreduce(ones, average=True, op=hvd.Sum)),
        ("op=17", lambda: hvd.allreduce(ones, op=17)),
        ("at least one tensor", lambda: hvd.grouped_allreduce([])),
        ("whole numbers of rows that sum up to 2", lambda: hvd.alltoall(rows, [5] + zeros)),
        ("whole numbers", lambda: hvd.alltoall(rows, [2] * (size + 1))),
        ("whole numbers", lambda: hvd.alltoall(rows, torch.tensor([2.0] + zeros))),
        ("can't be split equally", lambda: hvd.alltoall(torch.ones(size + 1))),
    )
    for text, call in cases:
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(NotImplementedError, match="Average or hvd"):
        hvd.reducescatter(ones, op=hvd.Max)
    with pytest.raises(NotImplementedError, match="Average or hvd"):
        hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "max", hvd.Max)
    with pytest.raises(NotImplementedError, match=r"Adasum is not there: take op=hvd\.Average"):
        hvd.allreduce(ones, op=hvd.Adasum)
