"""What do the tests of `common` share?"""

from collections.abc import Iterator

import pytest

from tests.common.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """`processes.run(case, *arguments, ranks=2)` runs a function on 1 to 3 gloo processes, started once."""
    started = Processes(3)
    yield started
    started.close()
