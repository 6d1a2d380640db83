"""What is measured of a subject: losses and evaluations of several runs, samples after a kill."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import NamedTuple

from data import CLASSIFICATION, count_val
from launching import Launch, start

# Where one folder has the images to train on and to evaluate on, sizes tell data sets apart.
VAL_SIZES = [count_val(num_train) for num_train in CLASSIFICATION[:2]]
KILL_AFTER = 24  # steps: in the second epoch


class Step(NamedTuple):
    loss: float
    files: list[str]  # of the samples


def read_rank(path: Path) -> list[Step]:
    """The steps of a rank. Batches are trained on in the order in which they are fetched.

    A loss before the first batch is no part of training.
    """
    batches = []
    losses = []
    steps = []
    for line in path.read_text().splitlines():
        event = json.loads(line)
        files = event.get("files")
        if files and event["size"] not in VAL_SIZES and "/val" not in files[0]:
            batches.append(files)
        elif "loss" in event and batches:
            losses.append(event["loss"])
        elif "step" in event:
            files = []
            for _ in losses:
                files += batches.pop(0)
            steps.append(Step(sum(losses), files))
            losses = []
    return steps


def read_steps(log: Path) -> list[Step]:
    """A loss is the mean over ranks of what they called backward on: DDP applies its gradient."""
    ranks = [read_rank(path) for path in log.glob("*.jsonl")]
    steps = []
    for by_rank in zip(*ranks, strict=False):  # a kill may come between ranks
        losses, files = zip(*by_rank, strict=True)
        steps.append(Step(fmean(losses), list(itertools.chain(*files))))
    return steps


def compare_losses(left: Sequence[Step], right: Sequence[Step]) -> float | None:
    """The largest relative difference of a step's loss; None if a run made no steps."""
    differences = [abs(a.loss - b.loss) / abs(a.loss) for a, b in zip(left, right, strict=False)]
    return max(differences, default=None)


def compare_pairs(runs: Sequence[list[Step]]) -> list[float | None]:
    return [compare_losses(*pair) for pair in itertools.pairwise(runs)]


def count_samples(steps: Sequence[Step]) -> Counter:
    return Counter(itertools.chain(*(step.files for step in steps)))


def measure(subject: ModuleType, variant: str, root: Path, checkouts: Path, num_seeds: int) -> dict:
    """What the table and the file of results have. Raises RuntimeError if a run fails."""

    sizes = getattr(subject, "SIZES", CLASSIFICATION)

    def run(name: str, count: int, num_train: int = sizes.num_train, **options) -> Path:
        """The folder with the log of the run on `count` processes."""
        data = root.parent / str(num_train)
        options["global_batch_size"] = sizes.batch_size
        launch = Launch(root / name, data, checkouts, variant, count, **options)
        start(launch, subject.train)
        return launch.log

    def run_layouts(name: str, **options) -> list[list[Step]]:
        return [read_steps(run(f"{name}-{count}", count, **options)) for count in (1, 2, 3)]

    by_seed = [run_layouts(f"seed-{seed}", seed=seed) for seed in range(num_seeds)]
    even = run_layouts("even", num_train=sizes.num_train_even, augment=False)
    evaluated = []
    for count in (1, 2, 3):
        log = run(f"evaluated-{count}", count, weights=root / "seed-0-1")
        evaluated += re.findall(subject.METRIC, (log / "0.txt").read_text())[-1:]
    results = {
        "version": subject.VERSION,
        "changes": subject.CHANGES,
        "loss 1 to 2, 2 to 3": [compare_pairs(runs) for runs in by_seed],
        "the same, even and without augmentation": compare_pairs(even),
        "seeds 0 to 1, 1 to 2": compare_pairs([runs[0] for runs in by_seed]),
        "evaluated on 1, 2, 3": evaluated,
    }
    for name, augment in (("", True), (", without augmentation", False)):
        expected = read_steps(run(f"undisturbed{name}", 2, augment=augment))
        killed = read_steps(run(f"killed{name}", 2, augment=augment, kill_after=KILL_AFTER))
        resumed = read_steps(run(f"killed{name}", 2, augment=augment, resume=True))
        saved_at = subject.VARIANTS[variant] or len(expected) - len(resumed)
        actual = killed[:saved_at] + resumed
        num_more = (count_samples(actual) - count_samples(expected)).total()
        num_less = (count_samples(expected) - count_samples(actual)).total()
        results[f"killed: samples more / less often{name}"] = f"{num_more}/{num_less}"
        results[f"killed: loss{name}"] = compare_losses(expected[saved_at:], resumed)
    return results
