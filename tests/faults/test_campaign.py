"""A run that is killed at random moments, again and again, ends as the undisturbed run. `make chaos` kills more often."""

import pytest

from tests.faults.campaign import Campaign


@pytest.mark.parametrize(
    "processes, kills, options",
    [
        (1, 7, {}),
        (2, 4, {}),
        (2, 2, {"shards": True}),
        (1, 2, {"recipe": "det"}),
        pytest.param(4, 2, {}, marks=pytest.mark.long),
    ],
)
def test_runs_that_are_killed_at_random_are_bit_equal_to_the_undisturbed(forks, tmp_path, processes, kills, options):
    assert Campaign(forks, tmp_path / "campaign", (processes,), **options).run(kills).kills == kills


LONG = [pytest.param(40, {"shards": True, "seed": seed}, marks=pytest.mark.long) for seed in (0, 1)]


@pytest.mark.parametrize("kills, options", [(3, {}), (4, {"shards": True}), *LONG])
def test_runs_that_are_killed_and_moved_are_the_undisturbed_in_float64(forks, tmp_path, kills, options):
    """Between one process and several; with shards also between shards and data parallelism."""
    layouts = (1, 2, 3) if options else (1, 2, 3, 4)
    assert Campaign(forks, tmp_path / "campaign", layouts, **options).run(kills).kills == kills
