"""Image cache: every process gets back exactly the pixels that were put in."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from common.data import cache as cache_module
from common.data.cache import open_cache, shrunk
from common.data.decoding import Picture
from common.errors import Refused
from tests.harness.processes import Processes


def photograph(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels(picture: Picture) -> np.ndarray:
    return picture.whole().numpy()


class Reads:
    """Pictures by index; counts how often they are read."""

    def __init__(self):
        self.count = 0

    def __call__(self, index: int) -> Picture:
        self.count += 1
        return Picture(photograph(index, 20 + index, 50 - index))


def all_of(cache, read: Reads, count: int) -> list[np.ndarray]:
    return [pixels(cache.picture(index, lambda index=index: read(index))) for index in range(count)]


@pytest.mark.smoke
@pytest.mark.parametrize("in_folder", [False, True], ids=["memory", "folder"])
def test_an_image_is_read_once_and_is_the_same_from_the_first_time(in_folder: bool, tmp_path: Path) -> None:
    cache, read = open_cache(9, 24, str(tmp_path) if in_folder else ""), Reads()
    first = all_of(cache, read, 9)
    assert read.count == 9
    for _ in range(2):
        again = all_of(cache, read, 9)
        assert read.count == 9 and all(map(np.array_equal, first, again))
    assert [each.shape for each in first] == [(3, *shrunk(50 - index, 20 + index, 24)) for index in range(9)]
    assert not list(tmp_path.iterdir())  # the file has no name: nothing is left behind, whatever happens


def test_a_small_image_stays_as_it_is_and_no_shape_exceeds_its_slot() -> None:
    cache = open_cache(3, 24, "")
    small = photograph(0, 23, 25)
    assert np.array_equal(pixels(cache.picture(0, lambda: Picture(small))), np.asarray(small).transpose(2, 0, 1))
    for height, width in ((24, 24), (1, 576), (1, 577), (5_000, 2), (1, 89_000_000), (375, 500), (4_000, 3_000)):
        h, w = shrunk(height, width, 24)
        assert h >= 1 and w >= 1 and h * w <= 576
        assert (h, w) == (height, width) or h * w > 480 or min(height, width) < 24
    stripe = cache.picture(1, lambda: Picture(photograph(1, 4_000, 2)))
    assert np.array_equal(pixels(stripe), pixels(cache.picture(1, lambda: pytest.fail("it was there"))))


def test_damaged_and_half_written_slots_are_made_anew() -> None:
    cache, read = open_cache(4, 24, ""), Reads()
    first = all_of(cache, read, 4)
    file = cache._file.fileno()
    place = cache._place(1) + 30
    (byte,) = os.pread(file, 1, place)
    os.pwrite(file, bytes([byte ^ 1]), place)  # a bit of a pixel
    os.pwrite(file, os.pread(file, 8, 0), 2 * 16)  # the size of another image
    os.pwrite(file, os.pread(file, 16, 0), 3 * 16)  # the record of another image,
    os.pwrite(file, os.pread(file, cache._slot, cache._place(0)), cache._place(3))  # and its pixels
    again = all_of(cache, read, 4)
    assert read.count == 7 and all(map(np.array_equal, first, again))
    assert all_of(cache, read, 4) and read.count == 7  # mended


def test_where_nothing_can_be_written_images_are_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    cache, read = open_cache(3, 24, ""), Reads()
    expected = all_of(open_cache(3, 24, ""), Reads(), 3)
    monkeypatch.setattr(cache_module.os, "pwrite", full)
    for _ in range(2):
        assert all(map(np.array_equal, all_of(cache, read, 3), expected))
    assert read.count == 6


def test_a_set_that_does_not_fit_and_a_bad_folder_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    needs = "--cache 500: 10,000,000,000 images take up to .* GiB, and"
    for count, side, folder, told in (
        (10**10, 500, "", f"{needs} memory has .* left; take"),
        (10**10, 500, tmp_path, f"{needs} {tmp_path} has .* left; take a smaller --cache$"),
        (10, 0, tmp_path, "--cache_folder .*: nothing is kept there without --cache"),
        (10, 500, tmp_path / "nowhere", "--cache_folder .*/nowhere: No such file or directory; name a folder"),
        (10, 500, tmp_path / "file", "--cache_folder .*/file: Not a directory"),
    ):
        with pytest.raises(Refused, match=told):
            open_cache(count, side, str(folder))
    assert open_cache(10, 0, "") is None


class Cached(Dataset):
    def __init__(self, cache):
        self.cache = cache

    def __len__(self) -> int:
        return self.cache.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(pixels(self.cache.picture(index, lambda: Reads()(index))))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_workers_share_it_however_they_are_started(context: str) -> None:
    cache = open_cache(8, 24, "")
    loader = DataLoader(Cached(cache), None, num_workers=2, multiprocessing_context=context)
    first, never = list(loader), Reads()
    assert all(map(np.array_equal, first, all_of(cache, never, 8))) and never.count == 0
    assert pickle.loads(pickle.dumps(cache)).path == cache.path


def fill_and_read(count: int) -> tuple[int, str]:
    from common.distributed.collectives import barrier, rank

    cache, read = open_cache(count, 24, ""), Reads()
    if rank() == 0:
        all_of(cache, read, count)
    barrier()
    there = all_of(cache, read, count)
    barrier()
    return read.count, str(sum(int(each.sum()) for each in there))


def test_the_processes_of_a_machine_share_it(processes: Processes) -> None:
    (first, pixels_of_first), (second, pixels_of_second) = processes.run(fill_and_read, 7, ranks=2)
    assert (first, second) == (7, 0) and pixels_of_first == pixels_of_second


KILLED = """
import os, signal, sys
from common.data.cache import open_cache
from tests.data.test_cache import Reads, all_of
cache = open_cache(1000, 512, sys.argv[1])
os.posix_fallocate(cache._file.fileno(), 0, 1000 * 512 * 512)
print(cache.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_leaves_nothing_behind(tmp_path: Path) -> None:
    before = os.statvfs(tmp_path).f_bavail
    root = Path(__file__).parent.parent.parent
    script = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=root, capture_output=True, text=True)
    assert script.returncode == -9 and script.stdout.startswith("/proc/"), script.stderr
    assert not list(tmp_path.iterdir()) and before - os.statvfs(tmp_path).f_bavail < 50_000  # blocks of 250 MB
