"""What do the tests of `common` share?"""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.common.processes import Processes

# The same examples in every run, and no time limit on a busy machine.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """`processes.run(case, *arguments, ranks=2)` runs a function on 1 to 3 gloo processes, started once."""
    started = Processes(3)
    yield started
    started.close()
