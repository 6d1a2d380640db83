"""What is measured of a subject: losses and evaluations of several runs, samples after a kill."""

import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import NamedTuple

from launching import Launch, start

KILL_AFTER = 24  # steps: in the second epoch
LAYOUTS = "loss 1 to 2, 2 to 3"


class Step(NamedTuple):
    loss: float
    files: list[str]  # of the samples


def read_steps(log: Path) -> list[Step]:
    """A loss is the mean over ranks of what they called backward on: DDP applies its gradient."""
    ranks = [map(json.loads, path.open()) for path in log.glob("*.jsonl")]
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


def measure(subject: ModuleType, variant: str, root: Path, num_seeds: int) -> dict:
    """What the table and the file of results have. Raises RuntimeError if a run fails."""
    task = subject.VARIANTS[variant]
    shutil.rmtree(root, ignore_errors=True)
    for num_train in task.num_train:
        task.save(root / str(num_train), num_train)

    def run(name: str, num_processes: int, augment: bool = True, **options) -> Path:
        """The folder with the log."""
        data = root / str(task.num_train[not augment])
        layout = (num_processes, task.batch_size, augment)
        launch = Launch(root / name, data, variant, *layout, **options)
        start(launch, subject.train)
        return launch.log

    def run_layouts(name: str, **options) -> list[list[Step]]:
        return [read_steps(run(f"{name}-{count}", count, **options)) for count in (1, 2, 3)]

    by_seed = [run_layouts(f"seed-{seed}", seed=seed) for seed in range(num_seeds)]
    plain = run_layouts("plain", augment=False)
    evaluated = []
    for count in (1, 2, 3):
        log = run(f"evaluated-{count}", count, weights=root / "seed-0-1")
        evaluated += re.findall(subject.METRIC, (log / "0.txt").read_text())[-1:]
    results = {
        "changes": subject.__doc__,
        LAYOUTS: [compare_pairs(runs) for runs in by_seed],
        "the same, even and without augmentation": compare_pairs(plain),
        "seeds 0 to 1, 1 to 2": compare_pairs([runs[0] for runs in by_seed]),
        "evaluated on 1, 2, 3": evaluated,
    }
    for augment, (_, expected, _) in ((True, by_seed[0]), (False, plain)):
        killed = read_steps(run(f"killed-{augment}", 2, augment, kill_after=KILL_AFTER))
        resumed = read_steps(run(f"killed-{augment}", 2, augment, resume=True))
        saved_at = getattr(subject, "SAVED_AT", {}).get(variant, len(expected) - len(resumed))
        actual = killed[:saved_at] + resumed
        num_more = (count_samples(actual) - count_samples(expected)).total()
        num_less = (count_samples(expected) - count_samples(actual)).total()
        name = "" if augment else ", even and without augmentation"
        results[f"killed: samples more / less often{name}"] = f"{num_more}/{num_less}"
        results[f"killed: loss{name}"] = compare_losses(expected[saved_at:], resumed)
    return results
