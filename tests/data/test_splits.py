"""A share is held out of groups: single images as without groups. That classes keep their share:
test_sources.py.
"""

import numpy as np
import pyarrow as pa
import pytest

from common.data.duplicates import find_copies
from common.data.source import Files
from common.data.splits import held_out
from common.errors import Refused
from common.randomness import mix
from tests.harness.drawings import picture


def test_groups_of_one_row_are_held_out_as_rows_are() -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        strata = generator.integers(0, 4, 97)
        share = generator.choice([0.1, 0.25, 0.5, 0.9])
        numbers = mix(np.arange(97), seed)
        rows = held_out(numbers, strata, share)
        groups = held_out(numbers, strata, share, np.arange(97)[::-1])
        assert [part.tolist() for part in groups] == [part.tolist() for part in rows]


def test_one_group_of_everything_is_refused() -> None:
    with pytest.raises(Refused, match="holds out none; raise it"):
        held_out(mix(np.arange(9), 0), None, 0.2, np.zeros(9, np.int64))


def test_files_of_equal_size_are_compared_unless_they_are_many(tmp_path, monkeypatch) -> None:
    for number in (1, 2, 1):
        picture(tmp_path / f"{len(list(tmp_path.iterdir()))}.png", number)
    paths = pa.array([b"0.png", b"1.png", b"2.png", b"0.png", b"gone.png"], pa.large_binary())
    sizes = np.array([70, 70, 70, 70, -1])
    files = Files(str(tmp_path), paths, sizes, labels=np.zeros(5, np.int64), classes=())
    assert find_copies(files).tolist() == [0, 1, 0, 0, 4]
    assert find_copies(files, files).tolist() == [0, 1, 0, 0, 4, 0, 1, 0, 0, 9]
    monkeypatch.setattr("common.data.duplicates._MAX_IMAGES", 2)
    assert find_copies(files).tolist() == [0, 1, 2, 0, 4]
