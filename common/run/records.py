"""Records of a run beside its checkpoints: totals, rows of metrics, results, the environment."""

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.config import parsing as configuration
from common.config import recipe_source
from common.config.fields import RunConfig
from common.data.stream import Stream
from common.distributed import devices
from common.distributed.collectives import all_or_none, broadcast_object, gather_objects
from common.durable import write_csv
from common.errors import Refused
from common.run import plots
from common.run.folder import RunFolder, read_json, writing
from common.run.log import RunLog
from common.run.progress import Progress
from common.run.step_reports import StepReport
from common.run.tracking import Tracker

EXPLODED = 1_000  # a loss that rises by so much in the steps of a dry run is lost
MOST_DRAWING = 0.02  # of the time of training, for pictures between the first step and the last
FIRST_DRAWING_S = 1.0  # about the time of the first pictures
MENDED_BY = "lower --lr, set --clip 1 or --warmup_epochs"

# Names and prefixes in a row that numbers of one's own can't have.
OWN_NAMES = {"loss", "grad_norm", "weight_norm", "update_ratio", "loss_scale", "skipped_steps"}
OWN_PARTS = {"data", "eval", "perf", "run", "summary"}


def check_names(names: Iterable[str]) -> None:
    """Raise `Refused` unless all `names` are free for numbers of one's own."""
    for name in names:
        part, _, rest = str(name).partition("/")
        if part in OWN_PARTS or (
            part == "train" and (rest in OWN_NAMES or re.fullmatch("lr(_.*)?", rest))
        ):
            raise Refused(
                f"run.log: {name} is a name of the run's own (docs/run_folder.md); take another, "
                "such as train/aux"
            )
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", str(name)):
            raise Refused(
                f"run.log: {str(name)!r:.60} is no name of a number; take one such as train/aux"
            )


class Records:
    """The records of one start of a run.

    All ranks call it alike; only the main process, which has a `folder`, writes.
    """

    def __init__(self, config: RunConfig, path: Path, folder: RunFolder | None):
        self._config = config
        self._path = path
        self._folder = folder
        self.log = RunLog(folder)
        self.progress = Progress()
        self._first_loss = 0.0
        self._drawing = FIRST_DRAWING_S  # seconds that pictures of this start took
        self._trained_before = 0.0  # seconds of training in earlier starts
        self._logged_once: set[str] = set()
        self.facts: dict = {}  # the content of environment.json, once it is written

    @contextlib.contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """A block in which the main process writes: if that fails, every rank raises `Refused`."""
        with all_or_none(what), writing(self._path):
            try:
                if self._folder:
                    self._folder.check()
                yield
            finally:
                if self._folder:
                    self._folder.check()

    def begin(self, stream: Stream, total_steps: int) -> None:
        """Set the length of the run, and what counts its epochs."""
        self._stream = stream
        self._total_steps = total_steps

    def share(self) -> None:
        """Give all ranks the totals of the checkpoint, to count on from; a collective."""
        self.progress.best = broadcast_object(self.progress.best)
        self._trained_before = self.progress.seconds

    def open(self, facts: dict, splits: Mapping[str, Any]) -> None:
        """Write `facts` and the images of `splits`, sources by name, and open the tracker.

        Rows of steps that will be repeated are dropped.
        """
        folder = self._folder
        config = self._config
        assert folder, "only the main process opens them"
        configuration.save_config(config, self._path / "config.yaml")
        folder.write("environment.json", facts)
        recipe_source.save_source(recipe_source.read_source(config), self._path)
        if not (self._path / "split.csv").exists():
            write_csv(self._path / "split.csv", _list_images(splits))
        rows = folder.rewind(self.progress.step)
        folder.status("running", self.progress.step)
        tracker = Tracker(
            "none" if config.dry_run else config.tracker,
            folder=self._path,
            config=dataclasses.asdict(config)
            | {f"run/{key}": value for key, value in facts.items()},
            run_id=read_json(self._path / "tracker.json").get("id"),
            rows=rows,
            say=self.log.say,
        )
        if config.wandb_artifact and config.tracker != "wandb":
            self.log.say(
                f"--wandb_artifact: best/ is not uploaded with --tracker {config.tracker}; take "
                "--tracker wandb"
            )
        self.facts = facts
        folder.write("tracker.json", {"id": tracker.run_id})
        self.log.open(tracker, self.progress.step, self._total_steps)

    def record_step(self, report: StepReport, seconds: float, is_evaluated: bool) -> None:
        """Count a step that took `seconds`, and note its row if one is due.

        One is due by --log_every, and if there is an evaluation (`is_evaluated`).
        """
        self.progress.record_step(report, seconds)
        self.progress.count_broken(report.step, report.broken, self._config, self.log.say)
        if self._config.dry_run:
            if not self._first_loss:
                self._first_loss = max(1.0, report.loss)
            if report.loss > EXPLODED * self._first_loss:  # it would not be finite some steps later
                rose = f"the loss rose to {report.loss:.3g}, more than {EXPLODED:,} times the first"
                raise Refused(f"step {report.step}: {rose}; {MENDED_BY}")
        if report.step % self._config.log_every == 0 or is_evaluated:
            self.log.note(report.step, self._row(report))

    def record_evaluation(
        self, step: int, results: dict, leading: str, larger_is_better: bool = True
    ) -> bool:
        """Log results as `eval/...`; returns whether `results[leading]` is the best so far. A collective."""
        _refuse_differing(results)
        metrics = {
            f"eval/{key}": value for key, value in results.items() if not isinstance(value, list)
        }
        wrong = [
            name
            for name, value in metrics.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        if wrong:
            text = f"step {step}: {', '.join(wrong)} is not finite; {MENDED_BY}"
            if self._config.dry_run:
                raise Refused(text)
            self.log.say(text)  # a run may get over it; if not, the loss of a later step stops it
        self.log.leading = leading
        self.log.note(step, metrics)
        return self.progress.record_evaluation(step, metrics, f"eval/{leading}", larger_is_better)

    def log_once(self, lines: Iterable[str]) -> None:
        """Log the lines that were not logged so before in this start."""
        for line in lines:
            if line not in self._logged_once:
                self._logged_once.add(line)
                self.log.say(line)

    def has_time_to_draw(self) -> bool:
        """Whether pictures took at most `MOST_DRAWING` of the time of training; before the first, a guess."""
        return self._drawing <= MOST_DRAWING * (self.progress.seconds - self._trained_before)

    def draw(self, name: str, function: Callable, *arguments) -> None:
        """See `Run.draw`; on the main process."""
        if self._folder and not self._folder.lost:
            path = self._path / "pictures" / f"{name}.png"
            began = time.perf_counter()
            if plots.attempt(path, self.log.say, function, *arguments):
                # The first batch is step 1's.
                self.log.pictures(max(1, self.progress.step), {name: path})
            if self.progress.step:  # before that, data workers are starting
                self._drawing += time.perf_counter() - began

    def summary(self) -> dict:
        """The content of summary.json."""
        progress = self.progress
        samples = progress.step * self._config.global_batch_size
        return {
            "step": progress.step,
            "epoch": self._stream.count_epochs(progress.step),
            "samples": samples,
            "exported_weights": "ema" if progress.leading.startswith("eval/ema_") else "model",
            "best": progress.best,
            "last": progress.last,
            "leading": progress.leading,
            "train_seconds": round(progress.seconds, 3),
            "images_per_second": round(samples / progress.seconds, 1) if progress.seconds else None,
            "broken_files": progress.broken_files,
            "broken_draws": progress.broken,
            "skipped_steps": progress.skipped,
        }

    def _row(self, report: StepReport) -> dict[str, float]:
        row = {
            "epoch": self._stream.count_epochs(report.step),
            "samples": report.step * self._config.global_batch_size,
            "train/loss": report.loss,
            "train/lr": report.rate,
            "train/grad_norm": report.grad_norm,
            **{f"train/{name}": value for name, value in report.update.items()},
            **self.progress.pace(self._config.global_batch_size, report.ready),
            "data/broken": self.progress.broken,
            **report.logged,
        }
        if report.loss_scale is not None:
            row |= {
                "train/loss_scale": report.loss_scale,
                "train/skipped_steps": self.progress.skipped,
            }
        if devices.has_streams():
            row["perf/gpu_memory_gb"] = torch.accelerator.max_memory_allocated() / 2**30
        return row


def _list_images(splits: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Path and split of each image; none of those that are drawn anew in each epoch."""
    yield "path", "split"
    for split, source in splits.items():
        if not source.fresh:
            for index in range(len(source)):
                yield source.get_listed_name(index), split


def _refuse_differing(results: Mapping[str, Any]) -> None:
    """Raise `Refused` if a result differs between ranks, as one of one rank's samples would. A collective."""
    metrics = {}
    for name, value in results.items():
        if not isinstance(value, str):
            metrics[name] = np.ravel(np.array(value, float)).tolist()
    metrics_by_rank = gather_objects(metrics)
    expected = metrics_by_rank[0]
    for rank, actual in enumerate(metrics_by_rank[1:], start=1):
        for name in sorted(expected.keys() | actual.keys()):
            first = expected.get(name, [])
            other = actual.get(name, [])
            # Machines of different kinds may differ in the last bits.
            if len(other) != len(first) or not np.allclose(other, first, 1e-5, equal_nan=True):
                raise Refused(
                    f"run.evaluate: {name} differs between processes ({_format_first(first)} on "
                    f"the first, {_format_first(other)} on rank {rank}): sum over the samples of "
                    "all of them with common.distributed.collectives.reduce_dict, then divide"
                )


def _format_first(values: list[float]) -> str:
    return f"{values[0]:.5g}" if values else "missing"
