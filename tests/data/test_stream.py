"""Every sample is drawn exactly once per epoch, in one order, however the stream is split and
wherever it is entered.
"""

import itertools
import time
import tracemalloc
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data import stream as module
from common.data.batch_plan import BatchPlan
from common.data.stream import Blocks, Stream, permute
from common.errors import Refused

SEEDS = st.integers(0, 2**63)


@pytest.mark.smoke
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(0, 40), st.integers(2, 12)),
    st.integers(1, 150),
    SEEDS,
)
@settings(max_examples=40)
def test_every_epoch_draws_every_sample_once_however_it_is_split(cut, size: int, seed: int) -> None:
    unit, world_size, more, limit = cut
    plan = BatchPlan((world_size + more) * unit, world_size, limit * unit, unit)
    stream = Stream(size, plan.global_batch_size, seed)
    start = seed % 10**6
    # Some batches straddle epochs, some hold several.
    steps = -(-3 * size // plan.global_batch_size) + 1
    spans = [
        plan.get_span(rank, turn)
        for rank in range(plan.world_size)
        for turn in range(plan.micro_steps)
    ]
    positions = [
        stream.get_positions(step, span) for step in range(start, start + steps) for span in spans
    ]
    indices = np.concatenate([stream.get_indices(of_batch) for of_batch in positions])
    first = start * plan.global_batch_size
    backwards = np.arange(first, first + len(indices))[::-1]
    assert (indices[::-1] == stream.get_indices(backwards)).all(), (
        "a position has its sample in whatever company"
    )
    to_epoch = -first % size
    epochs = [indices[low : low + size] for low in range(to_epoch, len(indices) - size + 1, size)]
    assert len(epochs) >= 2
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)


def test_each_seed_and_each_epoch_has_an_order_of_its_own() -> None:
    size = 600
    blocks = Blocks(edges=np.arange(0, size + 1, 10), pool=8)
    for options in ({}, {"blocks": blocks}):
        orders = []
        for seed, epoch in ((0, 0), (0, 1), (1, 0)):
            stream = Stream(size, 24, seed, **options)
            indices = stream.get_indices(np.arange(epoch * size, (epoch + 1) * size))
            # Where a sample stands in its block: another order of the blocks does not change this.
            orders.append(indices % 10)
        for left, right in itertools.combinations(orders, 2):
            assert (left == right).mean() < 0.2


def test_the_permutation_is_a_bijection() -> None:
    for size in (*range(1, 100), 2**16 - 1, 2**16, 2**16 + 1, 99_991):
        assert (np.bincount(permute(np.arange(size), size, 2**63, 7), minlength=size) == 1).all()
    for size in (10**9, 10**12, 2**62):  # it collides nowhere in a sample
        places = np.unique(np.random.default_rng(0).integers(0, size, 100_000))
        indices = permute(places, size, 0, 0)
        assert (
            len(np.unique(indices)) == len(places) and 0 <= indices.min() and indices.max() < size
        )


def _compute_chi_square(counts: np.ndarray, freedom: int) -> float:
    """How many standard deviations a chi-square statistic lies above its mean; counts expected to
    be equal.
    """
    expected = counts.sum() / counts.size
    return (((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("size", [30_000, 65_536])
def test_the_permutation_shows_no_order(size: int) -> None:
    indices = permute(np.arange(size), size, 5, 0)
    places = np.arange(size)
    # Where a sample comes to stand is unrelated to where it was.
    table, *_ = np.histogram2d(places, indices, bins=20)
    assert abs(_compute_chi_square(table, 19 * 19)) < 4
    # Neither do neighbours stay neighbours, nor at a fixed distance.
    for lag in (1, 2, 173, 174, int(size**0.5), int(size**0.5) + 1):
        steps = (indices[lag:] - indices[:-lag]) % size
        assert abs(_compute_chi_square(np.histogram(steps, bins=50)[0], 49)) < 4.5
    # The next epoch is unrelated to this one.
    table, *_ = np.histogram2d(indices, permute(places, size, 5, 1), bins=20)
    assert abs(_compute_chi_square(table, 19 * 19)) < 4


@pytest.mark.smoke
def test_the_first_batch_of_a_billion_samples_is_there_at_once() -> None:
    def first_batch() -> float:
        module._derive_round_keys.cache_clear()
        began = time.perf_counter()
        stream = Stream(10**9, 4096 * 64, seed=0)
        plan = BatchPlan(4096 * 64, 4096, 32)
        stream.get_indices(stream.get_positions(123_456_789, plan.get_span(4095, 0)))
        return time.perf_counter() - began

    # The shortest of some: that of a quiet machine.
    assert min(first_batch() for _ in range(20)) < 0.01
    tracemalloc.start()
    first_batch()
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=150).filter(lambda w: sum(w) > 1e-3),
    SEEDS,
    st.integers(0, 99),
)
def test_weighted_sampling_draws_each_sample_its_share_of_times(
    weights: list[float], seed: int, epoch: int
) -> None:
    size = len(weights)
    weights = np.array(weights)
    indices = Stream(size, 7, seed, weights=weights).get_indices(
        np.arange(epoch * size, (epoch + 1) * size)
    )
    counts = np.bincount(indices, minlength=size)
    expected = size * weights / weights.sum()
    assert (np.floor(expected - 1e-9) <= counts).all() and (
        counts <= np.ceil(expected + 1e-9)
    ).all()


def test_weighted_sampling_is_unbiased_and_in_no_order() -> None:
    weights = np.linspace(0.1, 3, 60)
    indices = Stream(60, 8, 4, weights=weights).get_indices(np.arange(60 * 600)).reshape(600, 60)
    mean = np.stack([np.bincount(epoch, minlength=60) for epoch in indices]).mean(0)
    assert np.abs(mean - 60 * weights / weights.sum()).max() < 4.5 * 0.5 / 600**0.5
    table, *_ = np.histogram2d(
        np.tile(np.arange(60), 600), indices.ravel(), bins=(6, [0, 20, 30, 40, 50, 60])
    )
    assert (
        (table - table.sum(0) / 6) ** 2 / (table.sum(0) / 6)
    ).sum() < 60  # chi-square, 20 degrees of freedom: p = 1e-5


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 5), SEEDS, st.integers(0, 1000))
def test_repeats_stand_in_every_batch_apart_from_each_other(
    size: int, distinct: int, repeats: int, seed: int, step: int
):
    stream = Stream(size, distinct * repeats, seed, repeats)
    copies = stream.get_indices(stream.get_positions(step, (0, distinct * repeats))).reshape(
        repeats, distinct
    )
    assert (copies == copies[0]).all()  # copies stand `distinct` positions apart, in whole rounds
    assert (
        copies[0]
        == Stream(size, distinct, seed).get_indices(
            np.arange(step * distinct, (step + 1) * distinct)
        )
    ).all()


@given(st.integers(1, 50), st.integers(1, 50), st.decimals(0, 1000, places=3))
def test_an_epoch_ends_in_the_step_that_takes_its_last_sample(
    size: int, batch: int, epochs
) -> None:
    stream = Stream(size, batch, 0)
    # Steps done by then.
    last_samples = {position // batch + 1 for position in range(size - 1, 200 * batch, size)}
    assert {step for step in range(1, 201) if stream.ends_epoch(step)} == last_samples
    assert stream.count_epochs(size) == batch and stream.count_steps(float(epochs)) == ceil(
        Fraction(epochs) * size / batch
    )


def test_an_empty_set_and_a_batch_of_other_size_are_refused() -> None:
    with pytest.raises(Refused, match="the training set has 0 samples"):
        Stream(0, 4, 0)
    for batch, next_one in ((10, 12), (2, 3)):
        with pytest.raises(
            Refused,
            match=f"--global_batch_size {batch} does not divide by --repeats 3: take {next_one}",
        ):
            Stream(9, batch, 0, 3)


def test_an_epoch_of_few_steps_counts_as_more() -> None:
    plain = Stream(20, 8, seed=3)
    longer = Stream(20, 8, seed=3, min_epoch_steps=10)
    assert (
        [longer.count_steps(epochs) for epochs in (0.5, 1, 3)]
        == [5, 10, 30]
        != [plain.count_steps(e) for e in (0.5, 1, 3)]
    )
    assert [step for step in range(1, 31) if longer.ends_epoch(step)] == [10, 20, 30]
    assert (
        longer.extends_epochs
        and not plain.extends_epochs
        and longer.count_epochs(10) == plain.count_epochs(10) == 4
    )
    assert (longer.get_indices(np.arange(100)) == plain.get_indices(np.arange(100))).all()
    much = Stream(1000, 8, seed=3, min_epoch_steps=10)
    assert not much.extends_epochs and much.count_steps(1.5) == 188
    assert [step for step in range(1, 300) if much.ends_epoch(step)] == [125, 250]
