"""Records of a run beside its checkpoints: totals, rows of metrics, results, and the environment."""

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

from common.checkpoints.state import TrainingState
from common.checkpoints.store import Checkpoint
from common.config import parsing as configuration
from common.config import recipe_source
from common.config.fields import RunConfig
from common.config.recipe_source import difference, keep, stem
from common.data.batch_plan import BatchPlan
from common.data.source import Source
from common.data.stream import Stream
from common.distributed import devices, sharding
from common.distributed.collectives import all_or_none, broadcast_object, gather_objects
from common.errors import Refused
from common.run import plots
from common.run.folder import RunFolder, read_json, writing
from common.run.log import RunLog
from common.run.progress import Progress
from common.run.step_reports import StepReport
from common.run.tracking import Tracker
from common.training import batch_norm, timm_models
from common.training import optimizer as optimization
from common.training.optimizer import Schedule
from common.training.step import Samples, describe_step_modules

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
        if part in OWN_PARTS or (part == "train" and (rest in OWN_NAMES or re.fullmatch("lr(_.*)?", rest))):
            raise Refused(
                f"run.log: {name} is a name of the run's own (docs/run_folder.md); take another, such as train/aux"
            )
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", str(name)):
            raise Refused(f"run.log: {str(name)!r:.60} is no name of a number; take one such as train/aux")


class Records:
    """The records of one start. All ranks call it alike; only the main process, which has a `folder`, writes."""

    def __init__(self, config: RunConfig, path: Path, folder: RunFolder | None):
        self._config, self._path, self._folder = config, path, folder
        self.log = RunLog(folder)
        self.progress = Progress()
        self._first_loss = 0.0
        self._drawing = FIRST_DRAWING_S  # seconds that pictures of this start took
        self._trained_before = 0.0  # seconds of training in earlier starts

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

    def begin(
        self, state: TrainingState, stream: Stream, schedule: Schedule, identity: dict, recipe: recipe_source.Source
    ) -> None:
        """Set the sources of rows, of the summary and of checkpoints."""
        self._state, self._stream, self._schedule, self._identity = state, stream, schedule, identity
        self._source = recipe

    def resume(self, found: Checkpoint, said: dict) -> int:
        """Log where the run resumes, and the effect of a new length; returns its last step.

        `said` is the status.json that was found.
        """
        say, progress, step = self.log.say, self.progress, self.progress.step
        before, now = found.record["total_steps"], self._schedule.total_steps
        is_here = found.path.parent.resolve() == (self._path / "checkpoints").resolve()
        if is_here and (said["status"], said["step"]) == ("finished", step):  # ended when its checkpoint was there
            progress.ended_by = progress.ended_by or str(said["cause"])
        changed = difference(found.record["source"], self._source)
        flag = progress.ended_by_flag
        stays = bool(progress.exhausted(self._config)) if flag else now <= before
        if progress.ended_by and stays and is_here and not changed:
            larger = f"--{flag}" if flag else "--epochs or --max_steps"
            say(
                f"this run was ended at step {step} of {before} by {progress.ended_by}; a larger {larger} takes it further"
            )
            return step
        progress.ended_by = ""
        if step >= now:
            if changed:
                raise Refused(
                    f"{found.path} is finished, and was made by another source: give this run another --name, or a larger "
                    "--epochs or --max_steps to train on with this one"
                )
            say(f"this run is finished at step {step}; a larger --epochs or --max_steps takes it further")
            return now
        say(f"resuming from step {step} of {now} ({found.path})")
        earlier_data = str(found.record["config"].get("data", ""))
        data = getattr(self._config, "data", "")
        if data != earlier_data:
            say(f"the data are the same, and lie at {data} now; the run began with {earlier_data}")
        if before != now:
            rate = dataclasses.replace(self._schedule, total_steps=before)(step - 1)
            say(
                f"its length was {before} steps: the schedule now has {now} steps from the start, so the learning rate "
                f"continues at {self._schedule(step):.3g} (the last was {rate:.3g})"
            )
        return now

    def share(self) -> None:
        """Give all ranks the totals of the checkpoint, to count on from; a collective."""
        self.progress.best = broadcast_object(self.progress.best)
        self._trained_before = self.progress.seconds

    def describe(self, rows: dict[str, str], train: Source, val: Source, plan: BatchPlan, sizes: dict) -> None:
        """Print the start table: `rows` that have a value."""
        self.log.table({name: value for name, value in rows.items() if value})
        self._classes = list(train.classes)
        self._sizes = {"train_images": len(train), "val_images": len(val), "classes": len(train.classes)} | sizes
        self._sizes |= {"micro_batch_size": plan.micro_batch_sizes[0], "micro_steps": plan.micro_steps}
        if plan.undivided_for:
            self._sizes["undivided_for"] = plan.undivided_for

    def open(self, facts: dict) -> None:
        """Write the environment `facts`, drop rows of steps that will be repeated, and open the tracker."""
        facts |= self._sizes | {"fingerprint": self._identity["data"], "steps": self._schedule.total_steps}
        facts["parameters"] = sum(parameter.numel() for parameter in self._state.model.parameters())
        folder, config, total_steps = self._folder, self._config, self._schedule.total_steps
        assert folder, "only the main process opens them"
        configuration.save(config, self._path / "config.yaml")
        folder.write("environment.json", facts)
        keep(self._source, self._path)
        rows = folder.rewind(self.progress.step)
        folder.status("running", self.progress.step)
        tracker = Tracker(
            "none" if config.dry_run else config.tracker,
            folder=self._path,
            config=dataclasses.asdict(config) | {f"run/{key}": value for key, value in facts.items()},
            run_id=read_json(self._path / "tracker.json").get("id"),
            rows=rows,
            say=self.log.say,
        )
        self._facts = facts
        folder.write("tracker.json", {"id": tracker.run_id})
        self.log.open(tracker, self.progress.step, total_steps)

    def take_in(self, report: StepReport, seconds: float, evaluated: bool) -> None:
        """Count a step that took `seconds`, and note its row if one is due or the step is `evaluated`."""
        self.progress.take_in(report, seconds)
        self.progress.count_broken(report.step, report.broken, self._config, self.log.say)
        if self._config.dry_run:
            self._first_loss = self._first_loss or max(1.0, report.loss)
            if report.loss > EXPLODED * self._first_loss:  # it would not be finite some steps later
                rose = f"the loss rose to {report.loss:.3g}, more than {EXPLODED:,} times the first"
                raise Refused(f"step {report.step}: {rose}; {MENDED_BY}")
        if report.step % self._config.log_every == 0 or evaluated:
            self.log.note(report.step, self._row(report))

    def evaluation(self, step: int, results: dict, leading: str, larger_is_better: bool = True) -> bool:
        """Log results as `eval/...`; returns whether `results[leading]` is the best so far. A collective."""
        _check_alike(results)
        numbers = {f"eval/{key}": value for key, value in results.items() if not isinstance(value, list)}
        if wrong := [name for name, value in numbers.items() if isinstance(value, float) and not math.isfinite(value)]:
            text = f"step {step}: {', '.join(wrong)} is not finite; {MENDED_BY}"
            if self._config.dry_run:
                raise Refused(text)
            self.log.say(text)  # a run may get over it; if not, the loss of a later step stops it
        self.log.note(step, numbers)
        return self.progress.judge(step, numbers, f"eval/{leading}", larger_is_better)

    def has_time_to_draw(self) -> bool:
        """Whether the pictures of this start took at most `MOST_DRAWING` of its training; a guess before the first ones."""
        return self._drawing <= MOST_DRAWING * (self.progress.seconds - self._trained_before)

    def draw(self, name: str, function: Callable, *arguments) -> None:
        """See `Run.draw`; on the main process."""
        if self._folder and not self._folder.lost:
            path, began = self._path / "pictures" / f"{name}.png", time.perf_counter()
            if plots.attempt(path, self.log.say, function, *arguments):
                self.log.pictures(self.progress.step or 1, {name: path})  # the first batch is step 1's
            if self.progress.step:  # before that, data workers are starting
                self._drawing += time.perf_counter() - began

    def checkpoint(self) -> dict:
        """What a checkpoint holds beside tensors."""
        return {
            "name": self._path.name,
            "recipe": stem(self._config),
            "step": self.progress.step,
            "classes": self._classes,
            "total_steps": self._schedule.total_steps,
            "identity": self._identity,
            "source": self._source,
            "numbers": self._state.numbers(),
            "ledger": dataclasses.asdict(self.progress),
            "config": dataclasses.asdict(self._config),
            "environment": self._facts,
        }

    def summary(self) -> dict:
        """The content of summary.json."""
        progress = self.progress
        samples = progress.step * self._config.global_batch_size
        return {
            "step": progress.step,
            "epoch": self._stream.epoch(progress.step),
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
            "epoch": self._stream.epoch(report.step),
            "samples": report.step * self._config.global_batch_size,
            "train/loss": report.loss,
            "train/lr": self._schedule(report.step - 1),
            "train/grad_norm": report.grad_norm,
            **{f"train/{name}": value for name, value in report.update.items()},
            **self.progress.pace(self._config.global_batch_size, report.ready),
            "data/broken": self.progress.broken,
            **report.logged,
        }
        if report.loss_scale is not None:
            row |= {"train/loss_scale": report.loss_scale, "train/skipped_steps": self.progress.skipped}
        if devices.has_streams():
            row["perf/gpu_memory_gb"] = torch.accelerator.max_memory_allocated() / 2**30
        return row


def start_rows(config: Any, model: torch.nn.Module, samples: Samples, plan: BatchPlan, steps: int) -> dict[str, str]:
    """Rows about a run of `steps`; a row without a value is not printed."""
    stream = samples.stream
    least = stream.min_epoch_steps
    longer = f", counted as {steps / least:.1f} of {least} steps each" if stream.extends_epochs else ""
    return {
        **timm_models.describe(config.model, model),
        **samples.describe(),
        **describe_step_modules(model),
        "batch norm": batch_norm.describe(model),
        **sharding.describe(model),
        "batch": str(plan),
        "learning rate": optimization.describe(config, model),
        "length": f"{steps:,} steps, {stream.epoch(steps):.1f} epochs{longer}",
    }


def _check_alike(results: Mapping[str, Any]) -> None:
    """Raise `Refused`, with the name, if a result differs between ranks: it is of one rank's samples alone. A collective."""
    numbers = {name: value for name, value in results.items() if not isinstance(value, str)}
    of_ranks = gather_objects({name: np.ravel(np.array(value, float)).tolist() for name, value in numbers.items()})
    for name in sorted({name for theirs in of_ranks for name in theirs}):
        first, *others = (theirs.get(name, []) for theirs in of_ranks)
        for other in others:
            # Machines of different kinds may differ in the last bits.
            if len(other) != len(first) or not np.allclose(other, first, 1e-5, equal_nan=True):
                one, two = (f"{value[0]:.5g}" if value else "missing" for value in (first, other))
                raise Refused(
                    f"run.evaluate: {name} differs between processes ({one} on the first, {two} on another): sum over the "
                    "samples of all of them with common.distributed.collectives.reduce_dict, then divide"
                )
