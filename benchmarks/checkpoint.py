"""Measures how long training stops for a checkpoint.

    python benchmarks/checkpoint.py [--quick] [--brief] [--output FILE]

A model of 86 million parameters, with AdamW's state and a moving average: 1.4 GB. One training loop saves in two ways, in the
order ABBA: in the background, as the recipes do, and with training waiting until the file is written. Between two checkpoints
it makes as many steps as writing takes. `stop` is how long the loop stands still; `slower steps` is the time added to the steps
made while a checkpoint is written, in total. On the CPU torch uses one thread, and so does the writer.
"""

import copy
import statistics
import tempfile
import time
from pathlib import Path

import timm
import torch
from table import Row, compare, script

from common.checkpoints.state import TrainingState
from common.checkpoints.store import Checkpoints
from common.checkpoints.writer import Writer

GOAL = 10  # times shorter than with training waiting


class Training:
    """Trains a model on one batch, and saves it in either way."""

    def __init__(self, model: str, batch_size: int, folder: Path):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = timm.create_model(model, num_classes=10).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.state = TrainingState(self.model, self.optimizer, copy.deepcopy(self.model))
        size = self.model.pretrained_cfg["input_size"]
        self.images = torch.rand(batch_size, *size, device=self.device)
        self.checkpoints, self.writer, self.saved = Checkpoints(folder), Writer(), 0
        self.quiet: list[float] = []  # seconds of steps during which nothing was written
        self.bytes = 0

    def step(self) -> float:
        """Makes one step; returns its seconds."""
        began = time.perf_counter()
        self.model(self.images).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._finish()
        return time.perf_counter() - began

    def save(self, beside: bool) -> dict[str, float]:
        """Saves a checkpoint; returns how long training stopped, how long writing took, and the time it added to the steps."""
        self.saved += 1
        record = {"step": self.saved, "numbers": self.state.numbers()}
        written = []

        def write(files: dict) -> None:
            path = self.checkpoints.save(record, files)
            self.bytes = sum(file.stat().st_size for file in path.iterdir())
            written.append(time.perf_counter())

        self._finish()
        began = time.perf_counter()
        if beside:
            self.writer.start(self.state.tensors(), write)
        else:
            write(self.state.tensors())
        stop = time.perf_counter() - began
        steps = []
        while not written:
            steps.append(self.step())
        self.writer.wait()
        self.quiet += [self.step() for _ in range(3)]
        slower = sum(steps) - len(steps) * statistics.median(self.quiet)
        return {"beside": beside, "stop_s": stop, "writing_s": written[0] - began, "slower_steps_s": slower}

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(quick: bool, brief: bool) -> tuple[list[Row], dict]:
    """Saves in the order ABBA; also prints what it took."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    model, quartets = ("test_vit", 1) if quick else ("vit_base_patch16_224", 1 if brief else 4)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(model, 1, Path(folder))
        training.step()
        first = training.save(beside=True)  # also allocates memory for the copies
        rows = [training.save(beside) for _ in range(quartets) for beside in (True, False, False, True)]
    beside = [row for row in rows if row["beside"]]
    stops, writing, slower = ([row[key] for row in beside] for key in ("stop_s", "writing_s", "slower_steps_s"))
    median = statistics.median
    print(f"{model}, {training.bytes / 1e9:.2f} GB per checkpoint, a step takes {1e3 * median(training.quiet):.0f} ms")
    print(
        f"in the background: stop {median(stops):.3f} s ({min(stops):.2f} to {max(stops):.2f}; the first "
        f"{first['stop_s']:.2f}), writing {median(writing):.2f} s, slower steps {median(slower):.2f} s"
    )
    taken = {"ours": stops, "training waits": [row["stop_s"] for row in rows if not row["beside"]]}
    what = f"stop for a checkpoint of {training.bytes / 1e9:.2g} GB"
    return [compare(what, "s", taken, "training waits", goal=GOAL)], [first, *rows]


if __name__ == "__main__":
    script(__doc__, measure)
