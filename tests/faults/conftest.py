"""How do tests of faults run the real recipes? As the tests of the recipes do."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.faults.nodes import Node, machines, require_namespaces
from tests.recipes.conftest import draw_stripes, forks, run_several, scenes, stripes

__all__ = ["forks", "run_several", "scenes", "stripes"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """27 + 9 images of three striped stuffs: enough for a run of a few steps."""
    folder = tmp_path_factory.mktemp("data")
    draw_stripes(folder / "train", (12, 9, 6))
    draw_stripes(folder / "val", (3, 3, 3), seed=1)
    return folder


@pytest.fixture
def nodes(tmp_path_factory) -> Iterator[Callable[..., list[Node]]]:
    """`nodes(2)` gives two machines; `nodes(2, own={1: {path: other}})` two of which the second has `other` at `path`."""
    require_namespaces(tmp_path_factory.mktemp("trial"))
    with contextlib.ExitStack() as stack:

        def make(count: int, own: Mapping[int, Mapping[Path, Path]] | None = None, **options) -> list[Node]:
            return stack.enter_context(machines(count, tmp_path_factory.mktemp("machines"), own, **options))

        yield make
