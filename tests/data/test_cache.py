"""Image cache: every process gets back exactly the pixels that were put in."""

import os
import pickle
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image

from common.data import cache as cache_module
from common.data.cache import downscale_size, open_cache
from common.data.decoding import Picture
from common.distributed.collectives import barrier, rank
from common.errors import Refused
from tests.harness.processes import Processes


def draw_photograph(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


class Reads:
    """Pictures by index; counts how often they are read."""

    def __init__(self):
        self.count = 0

    def __call__(self, index: int) -> Picture:
        self.count += 1
        return Picture(draw_photograph(index, 20 + index, 50 - index))


def read_all(cache, read: Reads, count: int) -> list[np.ndarray]:
    return [
        cache.get(index, lambda index=index: read(index)).decode().numpy() for index in range(count)
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("in_folder", [False, True], ids=["memory", "folder"])
def test_an_image_is_read_once_and_stays_the_same(in_folder: bool, tmp_path: Path) -> None:
    cache = open_cache(9, 24, str(tmp_path) if in_folder else "")
    read = Reads()
    first = read_all(cache, read, 9)
    second = read_all(cache, read, 9)
    assert read.count == 9 and all(map(np.array_equal, first, second))
    assert [each.shape for each in first] == [
        (3, *downscale_size(50 - index, 20 + index, 24)) for index in range(9)
    ]
    # The file has no name: nothing is left behind, whatever happens.
    assert not list(tmp_path.iterdir())


def test_a_small_image_stays_as_it_is_and_fits_its_slot() -> None:
    cache = open_cache(4, 24, "")
    # These fill their slots.
    images = [draw_photograph(0, 23, 25), *(draw_photograph(seed, 24, 24) for seed in (1, 2, 3))]
    for _ in range(2):
        for index, image in enumerate(images):
            cached = cache.get(index, lambda image=image: Picture(image)).decode()
            assert np.array_equal(cached, np.asarray(image).transpose(2, 0, 1))
    for height, width in ((24, 24), (1, 577), (5_000, 2), (1, 89_000_000), (375, 500)):
        h, w = downscale_size(height, width, 24)
        assert h >= 1 and w >= 1 and h * w <= 576
        assert (h, w) == (height, width) or h * w > 480 or min(height, width) < 24


def test_a_slot_that_was_not_finished_is_written_again(monkeypatch) -> None:
    """By a process that was killed as it wrote, or where the disk was full for a moment."""
    cache = open_cache(4, 24, "")
    read = Reads()
    write = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(
            cache_module.os,
            "pwrite",
            lambda file, data, offset: write(file, bytes(data)[:-1], offset),
        )
        first = read_all(cache, read, 4)
        patch.setattr(
            cache_module.os, "pwrite", MagicMock(side_effect=OSError(28, "No space left on device"))
        )
        assert all(map(np.array_equal, first, read_all(cache, read, 4))) and read.count == 8
    for count in (12, 12):
        assert all(map(np.array_equal, first, read_all(cache, read, 4))) and read.count == count


def test_a_set_that_does_not_fit_and_a_bad_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    needs = "--cache 500: 10,000,000,000 images take up to .* GiB, and"
    for count, side, folder, message in (
        (10**10, 500, "", f"{needs} memory has .* left; take"),
        (10**10, 500, tmp_path, f"{needs} {tmp_path} has .* left; take a smaller --cache$"),
        (10, 0, tmp_path, "--cache_folder .*: nothing is kept there without --cache"),
        (
            10,
            500,
            tmp_path / "nowhere",
            "--cache_folder .*/nowhere: No such file or directory; name a folder",
        ),
        (10, 500, tmp_path / "file", "--cache_folder .*/file: Not a directory"),
    ):
        with pytest.raises(Refused, match=message):
            open_cache(count, side, str(folder))
    assert open_cache(10, 0, "") is None


def fill_and_read(count: int) -> tuple[int, str]:
    cache = open_cache(count, 24, "")
    read = Reads()
    if rank() == 0:
        read_all(cache, read, count)
    barrier()
    seen = [read_all(each, read, count) for each in (cache, pickle.loads(pickle.dumps(cache)))]
    barrier()
    return read.count, [[each.tobytes() for each in images] for images in seen]


def test_the_processes_of_a_machine_share_it(processes: Processes) -> None:
    """And their data workers, also if these are not forked: then it is pickled."""
    (first, seen_by_first), (second, seen_by_second) = processes.run(fill_and_read, 7, ranks=2)
    assert (first, second) == (7, 0) and seen_by_first == seen_by_second
