"""A run that is killed at random moments, again and again, ends as the undisturbed run. `make chaos` kills more often."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.faults import campaign as faults
from tests.faults.campaign import Campaign


@pytest.mark.parametrize("processes, kills", [(1, 12), (2, 6), pytest.param(4, 2, marks=pytest.mark.long)])
def test_runs_that_are_killed_at_random_are_bit_equal_to_the_undisturbed(forks, tmp_path, processes, kills):
    assert Campaign(forks, tmp_path / "campaign", (processes,)).run(kills).kills == kills


def test_runs_that_are_killed_and_moved_are_the_undisturbed_in_float64(forks, tmp_path):
    assert Campaign(forks, tmp_path / "campaign", (1, 2, 3, 4)).run(4).kills == 4


def test_runs_that_are_launched_and_killed_are_bit_equal_to_the_undisturbed(forks, launch, tmp_path):
    assert Campaign(forks, tmp_path / "campaign", (2,), launcher=launch).run(2).kills == 2


def test_detection_runs_that_are_killed_at_random_are_bit_equal_to_the_undisturbed(forks, tmp_path):
    assert Campaign(forks, tmp_path / "campaign", (1,), recipe="det").run(3).kills == 3


@pytest.mark.long
def test_runs_of_two_machines_that_are_lost_are_bit_equal_to_the_undisturbed(nodes, forks, tmp_path):
    """Undisturbed it is that of two processes on one machine. With this seed each machine is lost once, as they train."""
    assert Campaign(forks, tmp_path / "campaign", (2,), seed=23, nodes=nodes(2)).run(2).kills == 2


def test_a_run_that_differs_or_leaves_something_would_be_seen(forks, tmp_path, monkeypatch):
    """A file, a process, shared memory; another seed, a step missing or there twice: what can't fail shows nothing."""
    campaign = Campaign(forks, tmp_path / "campaign", (1,))
    campaign.compare(campaign.whole)
    for stray in ("tmp/stray", "cache/stray"):
        (campaign.scratch / stray).touch()
        with pytest.raises(AssertionError, match="left behind"):
            campaign.assert_nothing_is_left()
        (campaign.scratch / stray).unlink()
    monkeypatch.setattr(faults, "GONE_WITH_S", 0.0)
    with (tmp_path / "campaign" / "out").open("w") as out, subprocess.Popen(["sleep", "600"], stdout=out) as stray:
        with pytest.raises(AssertionError, match="left behind"):
            campaign.assert_nothing_is_left()
        stray.kill()
    name = f"/dev/shm/{campaign.scratch.name}-{os.getpid()}"
    Path(name).touch()
    with pytest.raises(AssertionError, match="left behind"):
        campaign.assert_nothing_is_left()
    os.unlink(name)
    campaign._finish("other", 1, "--seed", 1)
    with pytest.raises(AssertionError):
        campaign.compare(campaign._outcome("other"))
    rows = campaign.whole.folder / "metrics.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    for torn in (lines[:-1], [*lines, lines[-1]]):
        rows.write_text("".join(torn))
        with pytest.raises(AssertionError, match="missing or there twice"):
            campaign.compare(campaign.whole)
