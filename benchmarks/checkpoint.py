"""How long does training stand still for a checkpoint?

    python benchmarks/checkpoint.py [--quick] [--brief] [--output FILE]

A model of 86 million parameters, its AdamW state and its moving average: 1.4 GB. One training loop saves now the way the
recipes do, beside the training, now in the old way, with everything waiting, in the order ABBA. Between two checkpoints come
as many steps as the writing needs. `stop` is how long the loop stands still for a checkpoint, `slower steps` what the steps
beside the writing take more than the others, all together. On the CPU torch works in one thread, as does the writer.
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

GOAL = 10  # times shorter


class Training:
    """Steps of a model, and the two ways to save it."""

    def __init__(self, model: str, batch_size: int, folder: Path):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = timm.create_model(model, num_classes=10).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.state = TrainingState(self.model, self.optimizer, copy.deepcopy(self.model))
        size = self.model.pretrained_cfg["input_size"]
        self.images = torch.rand(batch_size, *size, device=self.device)
        self.checkpoints, self.writer, self.saved = Checkpoints(folder), Writer(), 0
        self.quiet: list[float] = []  # seconds of steps beside which nothing was written
        self.bytes = 0

    def step(self) -> float:
        """Seconds of one."""
        began = time.perf_counter()
        self.model(self.images).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._finish()
        return time.perf_counter() - began

    def save(self, beside: bool) -> dict[str, float]:
        """Make a checkpoint; how long the training stood still, how long writing took, and what it cost the steps."""
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
    """The rows of the table of all benchmarks."""
    beside, waiting = (
        statistics.median(row["stop_s"] for row in result["rows"] if row["beside"] == kind) for kind in (True, False)
    )
    what = f"stop for a checkpoint of {result['bytes'] / 1e9:.2g} GB"
    return [Row(what, "s", beside, "everything waits", waiting, result["ratio"], goal=GOAL)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only see that it works: a tiny model, few checkpoints")
    parser.add_argument("--brief", action="store_true", help="fewer turns, for the table of all benchmarks")
    parser.add_argument("--output", type=Path, help="write the rows to this JSON file, too")
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
        first = training.save(beside=True)  # it makes the copies' memory
        rows = [training.save(beside) for _ in range(quartets) for beside in (True, False, False, True)]
    finally:
        shutil.rmtree(folder)

    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    quiet, more = statistics.median(training.quiet), f", {torch.get_num_threads()} thread"
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU" + more
    print(f"{model}, {parameters / 1e6:.1f} M parameters, {training.bytes / 1e9:.2f} GB a checkpoint")
    print(f"{where}; torch {torch.__version__}; medians of {2 * quartets}; a step takes {1e3 * quiet:.0f} ms")
    print(f"{'':24}{'stop':>22}{'writing':>12}{'slower steps':>16}")
    medians = {}
    for beside, name in ((True, "beside the training"), (False, "everything waits")):
        mine = [row for row in rows if row["beside"] == beside]
        medians[beside] = {key: statistics.median(row[key] for row in mine) for key in ("stop_s", "writing_s")}
        stops = [row["stop_s"] for row in mine]
        slower = f"{statistics.median(row['slower_steps_s'] for row in mine):14.2f} s" if beside else ""
        print(
            f"{name:24}{medians[beside]['stop_s']:8.3f} s ({min(stops):.2f}-{max(stops):.2f})"
            f"{medians[beside]['writing_s']:10.2f} s{slower}"
        )
    ratio = medians[False]["stop_s"] / medians[True]["stop_s"]
    print(f"the first one beside the training: {first['stop_s']:.3f} s; it makes the copies' memory")
    print(f"everything waits / beside: {ratio:.1f}; goal: at least {GOAL}")
    if arguments.output:
        result = {"model": model, "parameters": parameters, "bytes": training.bytes, "step_s": quiet}
        result |= {"first_stop_s": first["stop_s"], "ratio": ratio, "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
