"""Batches leave a worker unchanged, and none of their memory has a name by which it could stay behind."""

import os
import sys
from dataclasses import dataclass
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from common.data.loader import DeviceBatch, _loader
from common.errors import Refused
from tests.harness.processes import data_workers


@dataclass
class Batch(DeviceBatch):
    images: torch.Tensor
    targets: list
    nothing: torch.Tensor
    text: tuple = ()


def batch(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images = torch.rand(4, 3, 50, 70 + number, generator=generator).contiguous(memory_format=torch.channels_last)
    targets = [
        {"boxes": torch.rand(3, 4), "masks": torch.rand(2, 300, 300).transpose(1, 2) > 0.5, "position": number},
        {"boxes": torch.zeros(0, 4), "masks": torch.zeros(0, 300, 300, dtype=torch.bool), "position": -number},
    ]
    return Batch(images, targets, torch.zeros(0, 3, dtype=torch.int64), (str(number),))


class Batches(Dataset):
    def __getitems__(self, places: list[int]) -> Batch:
        torch.manual_seed(places[0])
        return batch(places[0])


def tensors(batch: Batch) -> list[torch.Tensor]:
    of_targets = [value for target in batch.targets for value in target.values() if isinstance(value, torch.Tensor)]
    return [batch.images, batch.nothing, *of_targets]


def test_batches_come_out_as_they_went_in_of_several_loaders_at_a_time() -> None:
    loaders = [_loader(Batches(), [[number] for number in range(start, start + 6)], 2) for start in (0, 100)]
    kept = [batch for pair in zip(*loaders, strict=True) for batch in pair]
    for there in kept:  # later ones have taken nothing from earlier ones
        here = Batches().__getitems__([int(there.text[0])])
        assert there.targets[0]["position"] == here.targets[0]["position"]
        for mine, theirs in zip(tensors(here), tensors(there), strict=True):
            assert mine.equal(theirs) and mine.dtype == theirs.dtype
        assert there.images.stride() == here.images.stride()
        there.images += 1  # it is the process's own
    assert [there.text for there in kept[:4]] == [("0",), ("100",), ("1",), ("101",)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is handed over in torch's way")
def test_nothing_stays_open_and_no_socket_listens_and_no_memory_has_a_name(monkeypatch, tmp_path) -> None:
    """A worker that is killed could not remove them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    batches = iter(_loader(Batches(), [[number] for number in range(40)], 1))
    kept, before = next(batches), len(os.listdir("/dev/fd"))
    for _ in range(30):
        next(batches)
    assert len(os.listdir("/dev/fd")) <= before + 2
    (worker,) = (child.pid for child in data_workers())
    mapped = open(f"/proc/{os.getpid()}/maps").read() + open(f"/proc/{worker}/maps").read()
    assert kept and "/memfd:batch" in mapped and "/dev/shm/torch_" not in mapped
    assert not list(tmp_path.iterdir())


def test_a_worker_that_would_never_be_asked_for_a_batch_is_not_started() -> None:
    """Python's garbage collector would close its queue while torch writes to it, with tracebacks at the end of a run."""
    assert _loader(Batches(), [[0], [1]], 4).num_workers == 2 and _loader(Batches(), [], 4).num_workers == 0


def test_workers_that_cant_be_started_are_refused_in_one_line(monkeypatch) -> None:
    monkeypatch.setattr(DataLoader, "__iter__", MagicMock(side_effect=OSError(30, "Read-only file system")))
    with pytest.raises(
        Refused, match=r"^1 data workers can't be started \(Read-only file system\): they need .* /dev/shm"
    ):
        iter(_loader(Batches(), [[0]], 1))
