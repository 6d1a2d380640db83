"""A batch is a pure function of its positions in any process. Broken images are replaced. Workers
never hang a run.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from common.classification.augmentation import ColorJitter, Mixing, RandomErasing
from common.classification.batches import Batch, TrainDataset
from common.classification.transforms import TrainingTransform
from common.data import loader
from common.data.batch_plan import BatchPlan
from common.data.decoding import Picture
from common.data.images import BrokenImage
from common.data.loader import Prefetcher, create_train_loader
from common.data.stream import Stream
from common.distributed import environment
from common.distributed.collectives import world_size
from common.randomness import key_of, mix, seed_generators
from tests.harness.processes import list_data_workers

DATA = {
    "input_size": (3, 16, 16),
    "interpolation": "bilinear",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.2, 0.2, 0.2),
    "crop_pct": 1.0,
}
VARIED = SimpleNamespace(crop_scale=0.4, hflip=0.5, vflip=0.5, augment="rand-m9-n2-p1.0-mstd0.5")
PLAIN = SimpleNamespace(crop_scale=1.0, hflip=0.0, vflip=0.0, augment="")
AUGMENTATIONS = [
    ColorJitter(5, 0.3),
    RandomErasing(5, 0.5, (16, 16), torch.float32, torch.device("cpu")),
    Mixing(5, 0.2, 1.0, (16, 16)),
]


@dataclass
class Numbers:
    """Images whose pixels tell their index; `broken` ones can't be read."""

    size: int
    broken: frozenset[int] = frozenset()
    classes: tuple[str, ...] = ("even", "odd")
    fingerprint: str = "00"
    multi_label: bool = False
    labels: np.ndarray = field(init=False)

    def __post_init__(self):
        self.labels = np.arange(self.size)  # so that a test can tell them apart

    def __len__(self) -> int:
        return self.size

    def get_name(self, index: int) -> str:
        return f"numbers[{index}]"

    def get_content(self, index: int) -> Image.Image:
        if index in self.broken:
            raise BrokenImage("torn")
        noise = np.random.default_rng(index).integers(0, 30, (20, 24, 3))
        return Image.fromarray((noise + [index, 2 * index, 255 - index]).astype(np.uint8))

    load_image = get_content


def create_dataset(source: Numbers, batch: int = 12, config=VARIED, **options) -> TrainDataset:
    stream = Stream(len(source), batch, seed=5)
    transform = TrainingTransform(config, DATA)
    return TrainDataset(source, stream, transform, 5, AUGMENTATIONS, **options)


def split_batch(batch: Batch) -> dict[int, bytes]:
    """Position -> all that the batch holds for it."""
    colours, erasing, mixing = batch.random_params
    columns = [
        batch.images.flatten(1),
        batch.labels[:, None],
        mixing.repeat_interleave(2, 0),
        batch.drop_path.T,
        colours,
        erasing,
    ]
    by_position = {}
    for i, position in enumerate(batch.positions.tolist()):
        by_position[position] = b"".join(column[i].numpy().tobytes() for column in columns)
    return by_position


LAYERS = dict(drop_path_layers=3)


def load_on_rank(limit: int, workers: int) -> dict[int, bytes]:
    """What this rank's batches of eight steps hold for each position."""
    dataset = create_dataset(Numbers(50, broken=frozenset({3, 4, 17})), **LAYERS)
    plan = BatchPlan(12, world_size(), limit, 2)
    batches = list(create_train_loader(dataset, plan, 3, 11, workers))
    assert len(batches) == 8 * plan.micro_steps
    assert batches[0].images.dtype == torch.uint8
    by_position = {}
    for batch in batches:
        by_position |= split_batch(batch)
    return by_position


@pytest.mark.smoke
def test_a_sample_is_the_same_in_whatever_batch_worker_or_layout(processes) -> None:
    expected = load_on_rank(12, 0)
    assert list(expected) == list(range(36, 36 + 96))
    assert load_on_rank(4, 2) == expected
    first, second, third = processes.run(load_on_rank, 2, 0, ranks=3)
    assert len(first) + len(second) + len(third) == len(expected)
    assert first | second | third == expected


def test_the_seed_and_the_epoch_vary_an_image() -> None:
    source = Numbers(12)
    loader = create_train_loader(create_dataset(source), BatchPlan(12, 1, 12), 0, 2, 0)
    first, second = list(loader)
    assert sorted(first.labels.tolist()) == sorted(second.labels.tolist()) == list(range(12))
    for label in range(12):
        first_image = first.images[first.labels == label]
        second_image = second.images[second.labels == label]
        assert not torch.equal(first_image, second_image)
    transform = TrainingTransform(VARIED, DATA)
    with_another_seed = TrainDataset(source, Stream(12, 12, 5), transform, 6)
    batch = with_another_seed.__getitems__(np.arange(12))
    assert not torch.equal(batch.images, first.images)


def test_a_broken_image_is_replaced_and_named_once() -> None:
    source = Numbers(20, broken=frozenset({5, 6, 7, 19}))
    stream = Stream(20, 20, seed=5)
    transform = TrainingTransform(VARIED, DATA)
    positions = np.arange(20)
    batch = TrainDataset(source, stream, transform, 5).__getitems__(positions)
    drawn = stream.get_indices(positions).tolist()
    replacements = {5: 8, 6: 8, 7: 8, 19: 0}
    indices = [replacements.get(index, index) for index in drawn]
    assert batch.labels.tolist() == indices  # the label is the neighbour's, too
    keys = mix(positions, key_of(5, "augmentation")).tolist()
    for image, index, key in zip(batch.images, indices, keys, strict=True):
        seed_generators(key)  # varied as at any position
        assert torch.equal(image, transform(Picture(source.get_content(index))))
    # One per sample: a run of broken images does not count many times.
    broken = [f"numbers[{index}]: torn" for index in drawn if index in source.broken]
    assert list(batch.broken) == broken
    all_broken = create_dataset(Numbers(7, broken=frozenset(range(7))), 7, PLAIN)
    black = all_broken.__getitems__(np.arange(7))
    assert (black.images == 0).all()
    assert len(black.broken) == 7
    assert sorted(black.labels.tolist()) == list(range(7))


def test_the_feed_adds_up_what_it_waited_for_and_what_was_broken() -> None:
    def slow():
        for name in ("a", "b", "c"):
            time.sleep(0.02)
            yield Batch(torch.zeros(1), torch.zeros(1), torch.zeros(1), broken=(name,))

    feed = Prefetcher(slow(), torch.device("cpu"))
    next(feed)
    next(feed)
    waited, broken = feed.pop_stats()
    assert 0.04 <= waited < 10
    assert broken == ("a", "b")
    assert feed.pop_stats() == (0.0, ())


def count_workers_on_rank(cores: int, limit: Path) -> int:
    """How many data workers this rank starts by itself on a machine with so many cores, in a
    container with this file.
    """
    affinity = mock.patch.object(os, "sched_getaffinity", return_value=range(cores))
    with affinity, mock.patch.object(environment, "_ALLOTMENT", limit):
        assert loader.count_workers(0) == 0
        assert loader.count_workers(5) == 5
        return loader.count_workers(-1)


@pytest.mark.parametrize("cores, ranks, workers", [(1, 1, 0), (8, 2, 3), (3, 3, 0), (64, 1, 16)])
def test_the_ranks_of_a_machine_share_its_cores(
    processes, tmp_path, cores: int, ranks: int, workers: int
) -> None:
    counts = processes.run(count_workers_on_rank, cores, tmp_path / "none", ranks=ranks)
    assert counts == [workers] * ranks


@pytest.mark.parametrize(
    "limit, workers", [("max 100000", 16), ("400000 100000", 3), ("50000 100000", 0)]
)
def test_a_container_limits_the_cores(tmp_path, limit: str, workers: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert count_workers_on_rank(64, tmp_path / "cpu.max") == workers


@pytest.mark.parametrize("device, goes_on", [("cuda", True), ("mps", False)])
def test_a_batch_goes_to_its_device_whole(monkeypatch, device, goes_on) -> None:
    """On MPS such a copy reads memory that is in use again."""
    calls = []

    def record_call(tensor, *args, **options):
        calls.append((args, options))
        return tensor

    batch = create_dataset(Numbers(12), **LAYERS).__getitems__(np.arange(12))
    monkeypatch.setattr(torch.Tensor, "to", record_call)
    assert split_batch(batch) == split_batch(batch.to(torch.device(device)))
    assert calls == [((torch.device(device),), {"non_blocking": goes_on})] * 7


def test_a_signal_to_everyone_leaves_the_workers_at_work() -> None:
    dataset = create_dataset(Numbers(40))
    batches = iter(create_train_loader(dataset, BatchPlan(12, 1, 12), 0, 1000, 2))
    # One of each worker, so that both have begun.
    first = next(batches)
    next(batches)
    for worker in list_data_workers():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(worker.pid, number)
    following = [next(batches) for _ in range(20)]
    assert following[0].positions[0] == 24
    assert not torch.equal(first.positions, following[-1].positions)


STUCK = """
import sys, time
import torch
from common.data.loader import _create_loader

class Stuck(torch.utils.data.Dataset):
    def __getitems__(self, places):
        if places[0]:
            time.sleep(3600)  # as a reader on a dead network drive
        return places

batches = iter(_create_loader(Stuck(), [[0]] * 8 + [[1]] * 8, num_workers=8))
print(next(batches), flush=True)
sys.exit(7)
"""


def test_workers_that_are_stuck_do_not_hang_the_end() -> None:
    script = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120
    )
    assert script.returncode == 7, script.stderr
    assert script.stdout.strip() == "[0]"
    assert "DataLoader worker" not in script.stderr  # nor do they have the last word
