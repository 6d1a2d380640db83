"""A run that moves between layouts draws the samples of the one-process run: each once, with the same augmentation."""

import functools
import hashlib
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import Dataset

from tests.harness.drawings import draw_stripes

STEPS, BATCH = 16, 14
WORDS = (
    *("--image_size", 32, "--global_batch_size", BATCH, "--max_micro_batch_size", 4, "--tracker", "none"),
    *("--max_steps", STEPS, "--log_every", 1, "--checkpoint_every", 5, "--eval_every", STEPS, "--repeats", 2),
    *("--augment", "rand-m9-mstd0.5", "--random_erasing", 0.3, "--hflip", 0.5, "--mixup", 0.2, "--sampling", "sqrt"),
)


@dataclass
class RecordedSamples(Dataset):
    """Training samples, and one line for each that is drawn: its position, its index, and a hash of its varied pixels.

    Each process appends to a file of its own in `folder`. Data workers draw ahead: a kill loses what they have drawn, and the
    next start draws it again.
    """

    samples: Dataset
    folder: Path

    def __getitems__(self, positions: np.ndarray):
        batch = self.samples.__getitems__(positions)
        indices = self.samples.stream.indices(positions).tolist()
        hashes = (hashlib.sha1(image.numpy().tobytes()).hexdigest() for image in batch.complete().images)
        drawn = zip(positions.tolist(), indices, hashes, strict=True)
        with (self.folder / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{position} {index} {pixels}\n" for position, index, pixels in drawn)
        return batch


def write_draws(folder: Path, stop_after: int, rank: int) -> None:
    """In a fork: write down what is drawn; rank 0 is asked to stop when `stop_after` steps are done."""
    from common.data import loader
    from common.run.run import Run

    folder.mkdir(exist_ok=True)
    load, end_step = loader._loader, Run.end_step

    def load_recorded(samples: Dataset, batches, workers: int, *kind):
        return load(samples if kind else RecordedSamples(samples, folder), batches, workers, *kind)

    loader._loader = load_recorded

    def end_and_ask(run: Run, grad_norm) -> None:
        end_step(run, grad_norm)
        done = run.step
        if rank == 0 and done == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    Run.end_step = end_and_ask


def draws_in(folder: Path) -> Counter:
    """(position, index, hash of the pixels) -> how often."""
    return Counter(tuple(line.split()) for path in folder.iterdir() for line in path.read_text().splitlines())


@pytest.fixture
def drawn(forks, tmp_path):
    """`drawn(name, (processes, stop after step), ..., workers=0)` is what all starts of a run have drawn."""
    draw_stripes(tmp_path / "data/train", (12, 9, 6))
    draw_stripes(tmp_path / "data/val", (3, 3, 3), seed=1)

    def run(name: str, *starts: tuple[int, int], workers: int = 0) -> Counter:
        folder = tmp_path / f"draws of {name}"
        words = (*WORDS, "--data", tmp_path / "data", "--output_dir", tmp_path, "--name", name, "--workers", workers)
        for processes, stop_after in starts:
            ends = [
                fork.end()
                for fork in forks.start_ranks(
                    processes, *words, before=functools.partial(write_draws, folder, stop_after)
                )
            ]
            assert {end.code for end in ends} == {75 if stop_after else 0}, ends
        return draws_in(folder)

    return run


def test_a_run_from_four_to_two_to_three_to_one_processes_draws_what_one_process_draws(drawn):
    whole = drawn("whole", (1, 0))
    assert sorted(int(position) for position, _, _ in whole) == [*range(STEPS * BATCH)]
    assert len({pixels for _, _, pixels in whole}) > STEPS * BATCH / 2, "the variation is to be seen in the hash"
    moved = drawn("moved", (4, 3), (2, 7), (3, 11), (1, 0))
    assert moved == whole and moved.total() == STEPS * BATCH

    ahead = drawn("ahead", (2, 3), (1, 0), workers=1)  # what was drawn ahead may be drawn again, and is the same
    assert set(ahead) == set(whole)
