"""An augmentation of one's own, in the recipe's list, is applied and gives the same batches on any layout."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from common.classification.augmentation import Augmentation, Normalize
from common.classification.batches import TrainingSamples
from common.classification.image_sizes import StepSizes
from common.classification.random_erasing import RandomErasing
from common.classification.transforms import training_transform
from common.data import loader
from common.data.batch_plan import BatchPlan
from common.data.loader import Prefetcher, training_loader
from common.data.stream import Stream
from common.randomness import key_of, uniforms
from recipes import cls
from tests.classification.test_batches import DATA, Numbers

CPU = torch.device("cpu")


@dataclass
class RandomGreyscale(Augmentation):
    seed: int
    probability: float

    def draw(self, positions: np.ndarray) -> np.ndarray:
        return uniforms(positions, key_of(self.seed, "greyscale")) < self.probability

    def apply(self, images, targets, draws):
        grey = images.mean(1, keepdim=True)
        return torch.where(draws[:, None, None, None], grey, images), targets


def augmented(config: cls.Config, own: list[Augmentation], plan: BatchPlan, workers: int) -> tuple[torch.Tensor, ...]:
    """Positions, images and targets of the steps 3 to 6 of all ranks, in the order of the positions."""
    source = Numbers(50, classes=tuple(map(str, range(50))))
    augmentations, augment, _ = cls.build_augmentation(config, source, DATA, CPU)
    augmentations[:0] = own
    transform = training_transform(config, DATA)
    samples = TrainingSamples(source, Stream(50, 12, config.seed), transform, config.seed, augmentations)
    seen = []
    for rank in range(plan.world_size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loader, "rank", lambda rank=rank: rank)
            feed = Prefetcher(training_loader(samples, plan, 3, 7, workers), CPU)
            batches = [next(feed) for _ in range(4 * plan.micro_steps)]
        seen += [(batch.positions, *augment(batch)) for batch in batches]
    positions, images, targets = map(torch.cat, zip(*seen, strict=True))
    order = positions.argsort()
    return positions[order], images[order], targets[order]


@pytest.mark.smoke
def test_an_augmentation_of_ones_own_gives_the_same_batches_on_any_layout() -> None:
    config = cls.Config(color_jitter=0.4, random_erasing=0.5, mixup=0.2, cutmix=1.0, dtype="float64")
    own = [RandomGreyscale(config.seed, 0.5)]
    positions, images, targets = augmented(config, own, BatchPlan(12, 1, 12, 2), 0)
    assert positions.tolist() == list(range(36, 84))
    assert images.dtype == targets.dtype == torch.float64 and targets.shape == (48, 50)
    for world_size, limit, workers in ((1, 4, 2), (2, 6, 0), (3, 2, 1)):
        others = augmented(config, own, BatchPlan(12, world_size, limit, 2), workers)
        assert torch.equal(others[0], positions)
        assert torch.equal(others[1], images) and torch.equal(others[2], targets)
    assert not torch.equal(augmented(config, [], BatchPlan(12, 1, 12, 2), 0)[1], images)


def test_an_augmentation_of_ones_own_changes_the_images_that_it_has_drawn() -> None:
    config, plan = cls.Config(), BatchPlan(12, 1, 12)
    positions, plain, targets = augmented(config, [], plan, 0)
    greyscale = RandomGreyscale(config.seed, 0.5)
    _, images, same = augmented(config, [greyscale], plan, 0)
    drawn = torch.from_numpy(greyscale.draw(positions.numpy()))
    assert 10 < drawn.sum() < 38
    assert torch.equal(images[~drawn], plain[~drawn]) and torch.equal(same, targets)
    assert (images[drawn].diff(dim=1) == 0).all() and (plain[drawn].diff(dim=1) != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_normalised_images_are_new_and_of_the_runs_type_and_memory_format(
    dtype: torch.dtype, channels_last: bool
) -> None:
    config = {"mean": (0.1, 0.5, 0.9), "std": (0.2, 0.3, 0.4)}
    normalize = Normalize(config, dtype, CPU, channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for given in (torch.randint(256, (4, 3, 5, 6), dtype=torch.uint8), 255 * torch.rand(4, 3, 5, 6, dtype=dtype)):
        before = given.clone()
        normalised = normalize(given)
        assert normalised.dtype == dtype and normalised.is_contiguous(memory_format=layout)
        assert torch.equal(given, before)
        mean, std = (torch.tensor(config[key], dtype=dtype)[:, None, None] for key in ("mean", "std"))
        assert torch.allclose(normalised, (given / 255 - mean) / std, atol=1e-5)


def test_a_worker_that_is_not_forked_gets_no_tensors() -> None:
    """They may lie in the memory of a GPU, which data workers must not touch."""
    erasing = RandomErasing(3, 0.5, StepSizes(((16, 16),)), torch.float32, CPU)
    there = pickle.loads(pickle.dumps([Normalize(DATA, torch.float32, CPU), erasing]))
    assert not any(isinstance(value, torch.Tensor) for each in there for value in vars(each).values())
    assert there[0].draw(np.arange(4)).shape == (4, 0)
    assert np.array_equal(there[1].draw(np.arange(4)), erasing.draw(np.arange(4)))
