"""A run that is killed at random moments, again and again, ends as the undisturbed run. `make chaos` kills more often."""

import pytest

from tests.faults.campaign import Campaign


@pytest.mark.parametrize("processes, kills", [(1, 7), (2, 4), pytest.param(4, 2, marks=pytest.mark.long)])
def test_runs_that_are_killed_at_random_are_bit_equal_to_the_undisturbed(forks, tmp_path, processes, kills):
    assert Campaign(forks, tmp_path / "campaign", (processes,)).run(kills).kills == kills


def test_runs_that_are_killed_and_moved_are_the_undisturbed_in_float64(forks, tmp_path):
    assert Campaign(forks, tmp_path / "campaign", (1, 2, 3, 4)).run(3).kills == 3


def test_detection_runs_that_are_killed_at_random_are_bit_equal_to_the_undisturbed(forks, tmp_path):
    assert Campaign(forks, tmp_path / "campaign", (1,), recipe="det").run(2).kills == 2


@pytest.mark.long
def test_runs_of_two_machines_that_are_lost_are_bit_equal_to_the_undisturbed(nodes, forks, tmp_path):
    """Undisturbed it is that of two processes on one machine. With this seed each machine is lost once, as they train."""
    assert Campaign(forks, tmp_path / "campaign", (2,), seed=23, nodes=nodes(2)).run(2).kills == 2
