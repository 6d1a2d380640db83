"""Batch plan: any global batch is cut into equally many non-empty, contiguous micro-batches, or
refused with a way out.
"""

import itertools
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.data.batch_plan import BatchPlan
from common.errors import Refused

ARGUMENTS = st.tuples(
    st.integers(1, 300), st.integers(1, 12), st.integers(1, 40), st.integers(1, 9)
)


@pytest.mark.smoke
@given(ARGUMENTS)
@settings(max_examples=200)
def test_a_plan_keeps_all_its_promises(arguments: tuple[int, int, int, int]) -> None:
    try:
        plan = BatchPlan(*arguments)
    except Refused:
        assume(False)
    size, world_size, limit, unit = arguments
    spans = [
        [plan.get_span(rank, turn) for turn in range(plan.micro_steps)]
        for rank in range(world_size)
    ]
    assert len({len(of_rank) for of_rank in spans}) == 1  # collectives stay in phase
    flat = [span for of_rank in spans for span in of_rank]
    assert flat[0][0] == 0 and flat[-1][1] == size
    # Contiguous, in order.
    assert all(before[1] == after[0] for before, after in itertools.pairwise(flat))
    sizes = [high - low for low, high in flat]
    assert 0 < min(sizes) and max(sizes) <= limit
    # Whole pairs, whole norm groups.
    assert all(low % unit == 0 and high % unit == 0 for low, high in flat)
    assert max(sizes) - min(sizes) in (0, unit)
    assert tuple(sorted(set(sizes), reverse=True)) == plan.micro_batch_sizes
    # No plan with fewer micro-steps stays within the limit.
    assert (plan.micro_steps - 1) * world_size * (limit // unit) * unit < size
    process = ("process", "processes")[world_size > 1]
    step = ("micro-step", "micro-steps")[plan.micro_steps > 1]
    assert str(plan).startswith(f"{size} = {world_size} {process} x {plan.micro_steps} {step} x ")


ADVICE = re.compile(r"take (?:at least |(a multiple of ))?(?:--(\w+) )?(\d+)")
PLACES = {"global_batch_size": 0, "max_micro_batch_size": 2}


@given(ARGUMENTS)
@settings(max_examples=400)
def test_the_way_out_that_a_refusal_names_is_a_way_out(
    arguments: tuple[int, int, int, int],
) -> None:
    try:
        return BatchPlan(*arguments) and None
    except Refused as refusal:
        text = str(refusal)
    assert "\n" not in text
    flag, value = re.match(r"--(\w+) (\d+)", text).groups()
    assert int(value) == arguments[PLACES[flag]]  # the value that was given
    multiple, other_flag, way = ADVICE.search(text).groups()
    changed = list(arguments)
    # With a share for all.
    changed[PLACES[other_flag or flag]] = int(way) * (arguments[1] + 1 if multiple else 1)
    try:
        BatchPlan(*changed)
    except Refused as next_refusal:
        # There was a second thing wrong, and it is about the other flag.
        assert flag == "max_micro_batch_size" and str(next_refusal).startswith(
            "--global_batch_size"
        )


def test_a_refusal_names_the_limit_for_a_share_at_once() -> None:
    with pytest.raises(
        Refused, match="raise --max_micro_batch_size to 6, or take --batch_norm group"
    ):
        BatchPlan(10, 2, 4, 2, "--batch_norm global")
    assert BatchPlan(10, 2, 6, 2, "--batch_norm global").micro_steps == 1
    plan = BatchPlan(1024, 3, 1024)  # the example of the documentation
    assert [plan.get_span(rank, 0) for rank in range(3)] == [(0, 342), (342, 683), (683, 1024)]
    assert (plan.loss_scale, plan.micro_batch_sizes) == (3 / 1024, (342, 341))
