"""What the tests of several modules share: one process's run of the training that two machines repeat."""

from pathlib import Path

import pytest

from tests.cluster.two_machines import WORDS


@pytest.fixture(scope="session")
def alone(forks, tmp_path_factory) -> Path:
    """The run folder of one process."""
    folder = tmp_path_factory.mktemp("alone")
    done = forks(*WORDS, "--output_dir", folder, "--name", "alone")
    assert done.code == 0, done.stderr
    return folder / "alone"
