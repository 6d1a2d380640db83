"""A share is held out of groups: single images as without groups; and of images with objects of
several classes.

That classes keep their share in groups: test_sources.py.
"""

import numpy as np
import pyarrow as pa
import pytest

from common.data.duplicates import find_copies
from common.data.source import Files
from common.data.splits import hold_out
from common.errors import Refused
from common.randomness import mix
from tests.harness.drawings import draw_picture


def test_groups_of_one_row_are_held_out_as_rows_are() -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        strata = generator.integers(0, 4, 97)
        share = generator.choice([0.1, 0.25, 0.5, 0.9])
        numbers = mix(np.arange(97), seed)
        rows = hold_out(numbers, strata, share)
        groups = hold_out(numbers, strata, share, np.arange(97)[::-1])
        assert [part.tolist() for part in groups] == [part.tolist() for part in rows]


def test_one_group_of_everything_is_refused() -> None:
    with pytest.raises(Refused, match="holds out none; raise it"):
        hold_out(mix(np.arange(9), 0), np.zeros(9, np.int64), 0.2, np.zeros(9, np.int64))


def draw_objects(seed: int, num_rows: int = 300) -> np.ndarray:
    """int64[M, 2] row and class of objects of 12 classes, the last of which are rare; some rows have none."""
    generator = np.random.default_rng(seed)
    rows = np.repeat(np.arange(num_rows), generator.integers(0, 5, num_rows))
    frequency = 0.6 ** np.arange(12)
    return np.stack([rows, generator.choice(12, len(rows), p=frequency / frequency.sum())], axis=1)


def count_objects(objects: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """int64[12], of the objects in these rows."""
    return np.bincount(objects[np.isin(objects[:, 0], rows), 1], minlength=12)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
def test_each_class_of_objects_keeps_its_share_and_rows_do(share: float) -> None:
    for seed in range(20):
        objects = draw_objects(seed)
        numbers = mix(np.arange(300), seed)
        _, out = hold_out(numbers, objects, share)
        assert len(out) == 300 * share
        totals = count_objects(objects, np.arange(300))
        is_rare = (totals > 0) & (totals < 30)
        assert is_rare.any()
        assert np.abs(count_objects(objects, out) - share * totals)[is_rare].max() <= 2
        _, grouped = hold_out(numbers, objects, share, np.arange(300)[::-1] // 3)
        assert np.isin(grouped // 3 * 3, grouped).all() and abs(len(grouped) - 300 * share) <= 3
        # Of another order of the rows, and after one row more, it is the same but for a few.
        _, turned = hold_out(numbers[::-1], objects * [-1, 1] + [299, 0], share)
        assert sorted(299 - turned) == out.tolist()
        _, longer = hold_out(
            mix(np.arange(301), seed), np.append(objects, [[300, 0]], axis=0), share
        )
        assert len(np.setxor1d(longer, out)) <= 30


def test_a_class_in_one_row_is_trained_on() -> None:
    objects = np.array([*([row, 0] for row in range(8)), [8, 1], [9, 2]])
    for seed in range(9):
        for share in (0.4, 0.8):
            train, _ = hold_out(mix(np.arange(10), seed), objects, share)
            assert {8, 9} <= set(train.tolist()) and len(train) == 10 - 10 * share


def test_files_of_equal_size_are_compared_unless_they_are_many(tmp_path, monkeypatch) -> None:
    for number in (1, 2, 1):
        draw_picture(tmp_path / f"{len(list(tmp_path.iterdir()))}.png", number)
    paths = pa.array([b"0.png", b"1.png", b"2.png", b"0.png", b"gone.png"], pa.large_binary())
    sizes = np.array([70, 70, 70, 70, -1])
    files = Files(str(tmp_path), paths, sizes, labels=np.zeros(5, np.int64), classes=())
    assert find_copies(files).tolist() == [0, 1, 0, 0, 4]
    assert find_copies(files, files).tolist() == [0, 1, 0, 0, 4, 0, 1, 0, 0, 9]
    monkeypatch.setattr("common.data.duplicates._MAX_IMAGES", 2)
    assert find_copies(files).tolist() == [0, 1, 2, 0, 4]
