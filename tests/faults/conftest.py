"""The data of the tests of faults."""

from pathlib import Path

import pytest

from tests.harness.drawings import draw_stripes


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """27 + 9 images of three striped stuffs: enough for a run of a few steps."""
    folder = tmp_path_factory.mktemp("data")
    draw_stripes(folder / "train", (12, 9, 6))
    draw_stripes(folder / "val", (3, 3, 3), seed=1)
    return folder
