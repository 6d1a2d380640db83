"""What the tests of several modules share: one process's run of the training that two machines repeat."""

from pathlib import Path

import pytest

from tests.cluster.two_machines import WORDS
from tests.harness.runs import train_once
from tests.harness.ssh import Hosts


@pytest.fixture(scope="session")
def alone(forks, tmp_path_factory) -> Path:
    """The run folder of one process."""
    with train_once(tmp_path_factory, "alone") as (run, is_to_be_made):
        if is_to_be_made:
            done = forks(WORDS + ["--output_dir", run.parent, "--name", run.name])
            assert done.code == 0, done.stderr
    return run


@pytest.fixture
def hosts(nodes, tmp_path_factory) -> Hosts:
    """Two machines that reach each other by ssh."""
    return Hosts(nodes(2), tmp_path_factory.mktemp("ssh"))
