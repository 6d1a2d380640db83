"""Measures how long training stops for a checkpoint.

    python benchmarks/checkpoint.py [--quick] [--turns N]

A model of 86 million parameters, with AdamW's state and a moving average: 1.4 GB. One training loop
saves in two ways, in the order ABBA: in the background, as the recipes do, and with training
waiting until the file is written. While a checkpoint is written in the background, training goes
on. On the CPU torch uses one thread, and so does the writer.
"""

import copy
import itertools
import tempfile
import time
from functools import partial
from pathlib import Path

import timm
import torch
from table import Row, compare, run_script, take_turns

from common.checkpoints.state import TrainingState
from common.checkpoints.store import Checkpoints
from common.checkpoints.writer import Writer


class Training:
    """Trains a model on one batch, and saves it in either way."""

    def __init__(self, model: str, folder: Path):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = timm.create_model(model, num_classes=10).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.state = TrainingState(self.model, self.optimizer, copy.deepcopy(self.model))
        self.images = torch.rand(1, *self.model.pretrained_cfg["input_size"], device=self.device)
        self.checkpoints = Checkpoints(folder)
        self.writer = Writer()
        self.numbers = itertools.count(1)
        self.is_written = False

    def step(self) -> None:
        self.model(self.images).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, in_background: bool) -> float:
        """Saves a checkpoint; returns for how many seconds training stopped."""
        self.is_written = False
        record = {"step": next(self.numbers), "numbers": self.state.get_values()}

        def write(files: dict) -> None:
            self.checkpoints.save(record, files)
            self.is_written = True

        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        if in_background:
            self.writer.start(self.state.get_tensors(), write)
        else:
            write(self.state.get_tensors())
        seconds = time.perf_counter() - start
        while not self.is_written:
            self.step()
        self.writer.wait()
        return seconds


def measure(turns: int, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        training = Training("test_vit" if quick else "vit_base_patch16_224", Path(folder))
        training.step()
        training.save(in_background=True)  # also allocates memory for the copies
        ways = {
            "ours": partial(training.save, in_background=True),
            "training waits": partial(training.save, in_background=False),
        }
        seconds = take_turns(ways, 2 * turns)
        num_bytes = sum(
            file.stat().st_size for file in training.checkpoints.list_paths()[0].iterdir()
        )
    return [
        compare(
            f"stop for a checkpoint of {num_bytes / 1e9:.2g} GB",
            "s",
            seconds,
            "training waits",
            goal=10,
        )
    ]


if __name__ == "__main__":
    run_script(__doc__, measure)
