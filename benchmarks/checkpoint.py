"""Measures how long training stops for a checkpoint.

    python benchmarks/checkpoint.py [--quick] [--brief] [--output FILE]

A model of 86 million parameters, with AdamW's state and a moving average: 1.4 GB. One training loop saves in two ways, in the
order ABBA: in the background, as the recipes do, and with training waiting until the file is written. Between two checkpoints
it makes as many steps as writing takes. `stop` is how long the loop stands still; `slower steps` is the time added to the steps
made while a checkpoint is written, in total. On the CPU torch uses one thread, and so does the writer.
"""

import argparse
import copy
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import timm
import torch
from table import Row

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


def table(result: dict) -> list[Row]:
    """Rows for the common table."""
    beside, waiting = (
        statistics.median(row["stop_s"] for row in result["rows"] if row["beside"] == kind) for kind in (True, False)
    )
    what = f"stop for a checkpoint of {result['bytes'] / 1e9:.2g} GB"
    return [Row(what, "s", beside, "training waits", waiting, result["ratio"], goal=GOAL)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it works: a tiny model, few checkpoints")
    parser.add_argument("--brief", action="store_true", help="fewer repetitions, as for `make bench`")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    model, batch_size, quartets = "vit_base_patch16_224", 1, 1 if arguments.brief else 4
    if arguments.quick:
        model, batch_size, quartets = "test_vit", 1, 1
    folder = Path(tempfile.mkdtemp())
    try:
        training = Training(model, batch_size, folder)
        training.step()
        first = training.save(beside=True)  # also allocates memory for the copies
        rows = [training.save(beside) for _ in range(quartets) for beside in (True, False, False, True)]
    finally:
        shutil.rmtree(folder)

    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    quiet, more = statistics.median(training.quiet), f", {torch.get_num_threads()} thread"
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU" + more
    print(f"{model}, {parameters / 1e6:.1f} M parameters, {training.bytes / 1e9:.2f} GB per checkpoint")
    print(f"{where}; torch {torch.__version__}; medians of {2 * quartets}; a step takes {1e3 * quiet:.0f} ms")
    print(f"{'':24}{'stop':>22}{'writing':>12}{'slower steps':>16}")
    medians = {}
    for beside, name in ((True, "in the background"), (False, "training waits")):
        mine = [row for row in rows if row["beside"] == beside]
        medians[beside] = {key: statistics.median(row[key] for row in mine) for key in ("stop_s", "writing_s")}
        stops = [row["stop_s"] for row in mine]
        slower = f"{statistics.median(row['slower_steps_s'] for row in mine):14.2f} s" if beside else ""
        print(
            f"{name:24}{medians[beside]['stop_s']:8.3f} s ({min(stops):.2f}-{max(stops):.2f})"
            f"{medians[beside]['writing_s']:10.2f} s{slower}"
        )
    ratio = medians[False]["stop_s"] / medians[True]["stop_s"]
    print(f"first save in the background: {first['stop_s']:.3f} s, with the allocation of memory for the copies")
    print(f"training waits / in the background: {ratio:.1f}; goal: at least {GOAL}")
    if arguments.output:
        result = {"model": model, "parameters": parameters, "bytes": training.bytes, "step_s": quiet}
        result |= {"first_stop_s": first["stop_s"], "ratio": ratio, "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
