"""How do tests of faults run the real recipes? As the tests of the recipes do."""

from tests.recipes.conftest import forks, run_several

__all__ = ["forks", "run_several"]
