"""How does a run begin, go on from where it was, pause and end?

A recipe opens a `Run`, takes the first step from `start`, hands over what each step made with `observe`, and asks when to
evaluate, save and stop. Everything here is called on every rank: what writes or prints is quiet off the main process.
"""

import dataclasses
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

from common import config as configuration
from common import pictures
from common.broken_images import BrokenImages
from common.checkpoint import Checkpoint, Checkpoints, verify
from common.collectives import broadcast_object, is_main, together
from common.config import RunConfig, identity, short_hash
from common.environment import environment
from common.errors import Refused
from common.health import Health, Report
from common.journal import Journal
from common.optimization import Schedule
from common.resume import choose
from common.run_folder import RunFolder
from common.state import TrainingState
from common.stream import Stream
from common.tracking import Tracker

RESUMABLE = 75  # exit code of a run that was asked to stop and saved: EX_TEMPFAIL of sysexits.h, "try again"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Run:
    """One start of a run, from the claim on its folder to its last word."""

    def __init__(self, config: RunConfig, accelerator: Accelerator, recipe: str):
        self.config, self.accelerator = config, accelerator
        name = config.name or f"{recipe}-{short_hash(identity(config))}"
        if Path(name).name != name:
            raise Refused(f"--name {name}: must be a folder name without slashes; where it lies is --output_dir")
        self._scratch = broadcast_object(tempfile.mkdtemp() if is_main() else None) if config.dry_run else None
        self.path = Path(self._scratch or config.output_dir) / name
        self.step, self.stopping = 0, False
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        with together("opening the run folder"):
            self._folder = RunFolder(self.path) if is_main() else None
        self._journal = Journal(self._folder)
        self.say = self._journal.say
        self._checkpoints = Checkpoints(self.path / "checkpoints", config.keep_checkpoints)
        self._broken = BrokenImages(config.max_broken_share, config.global_batch_size, self.say)
        self._signal = ""
        self._started = False
        self._seconds = 0.0  # of training, over all starts
        self._row_steps, self._row_seconds, self._row_wait = 0, 0.0, 0.0  # since the last row

    def __enter__(self) -> "Run":
        self._handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, kind, error, trace) -> None:
        asked_to_stop = error is None and self.stopping and self.step < self.total_steps
        try:
            if asked_to_stop or isinstance(error, (KeyboardInterrupt, SystemExit)):
                self._end("resumable", self._signal or "stopped on request", patience=5.0)
            elif error is None:
                self._end("finished", "", patience=30.0)
            else:
                self._end("failed", str(error) or kind.__name__, patience=5.0)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            if self._folder:
                self._folder.close()
            if self._scratch and is_main():
                shutil.rmtree(self._scratch, ignore_errors=True)
        if asked_to_stop:
            sys.exit(RESUMABLE)

    # --- before the first step

    def length(self, stream: Stream) -> int:
        """The run's length in steps: --max_steps, or else --epochs in whole steps, rounded up; two for --dry_run."""
        steps = self.config.max_steps or stream.steps(self.config.epochs)
        return min(2, steps) if self.config.dry_run else steps

    def describe(self, rows: dict[str, str]) -> None:
        """The start table."""
        self.say(_table(rows))

    def start(self, state: TrainingState, stream: Stream, schedule: Schedule, fingerprint: str) -> int:
        """Load the checkpoint to go on from, if there is one; returns how many steps are done."""
        self._state, self._stream, self._schedule, self.total_steps = state, stream, schedule, schedule.total_steps
        self._identity = identity(self.config) | {"data": fingerprint}
        self._health = Health(self.config.global_batch_size, fp16=state.scaler is not None)
        with together("choosing a checkpoint"):
            found = choose(self.config.resume, self._checkpoints, self._identity, self.say) if is_main() else None
        if found := broadcast_object(found):
            with together(f"loading {found.path}"):
                state.check(found.shapes(), str(found.path))
                state.load(found.tensors(), found.record["numbers"])
            self._take_over(found)
        facts = environment(self.accelerator.mixed_precision)
        with together("writing the run folder"):
            if self._folder:
                self._open_files(facts)
        self._durations: dict[int, float] = {}
        self._started = True
        self.resume_clock()
        return self.step

    # --- every step

    def observe(
        self,
        step: int,
        losses: torch.Tensor,
        positions: torch.Tensor,
        grad_norm: torch.Tensor,
        data_wait: float,
        broken: tuple[str, ...],
    ) -> None:
        """Hand over what this rank's share of `step` made: per-sample losses [n], positions [n], seconds waited for data."""
        now = time.perf_counter()
        self._durations[step], self._tick = now - self._tick, now
        self.step = step
        self._health.post(step, losses, positions, grad_norm, data_wait, broken, bool(self._signal))
        self._journal.advance(step)
        self._take_in(self._health.read())

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after `step`: a function of the step alone."""
        return self._due(self.config.eval_every, step)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`: by the cadence, or because some rank was asked to stop."""
        return self._due(self.config.checkpoint_every, step) or self.stopping

    def settle(self) -> None:
        """Wait until every step so far is known to be finite on all ranks: evaluation and checkpoints build on that."""
        self._take_in(self._health.settle())

    def record(self, step: int, results: dict, leading: str) -> bool:
        """Note an evaluation's results as `eval/...`; whether `results[leading]` (larger is better) is the best so far."""
        numbers = {f"eval/{key}": value for key, value in results.items() if not isinstance(value, list)}
        self._journal.note(step, numbers)
        self.last = {"step": step} | numbers
        leading = f"eval/{leading}"
        better = not self.best or (self.last[leading] or 0) > (self.best[leading] or 0)
        if better:
            self.best = self.last
        return better

    def keep_best(self, write: Callable[[Path], None]) -> None:
        """Let `write` fill a new folder, which then takes the place of `best/`."""
        with together("writing best/"):
            if self._folder:
                draft = self.path / ".best.tmp"
                shutil.rmtree(draft, ignore_errors=True)
                write(draft)
                self._folder.replace_folder(draft, "best")

    def save(self, step: int) -> None:
        """Make a checkpoint of `step`, once it is known that all its steps were finite."""
        self.settle()
        self._journal.flush()
        with together("writing a checkpoint"):
            if self._folder:
                path = self._checkpoints.save(self._record(step), self._state.tensors())
                self._journal.summary(self._summary())
                self._folder.status("running", step)
                if self.config.dry_run:
                    self._state.load(verify(path).tensors(), self._state.numbers())
                    self.say("dry run: a checkpoint was written, verified and loaded")
        self.resume_clock()

    def resume_clock(self) -> None:
        """Leave what was done since the last step out of the training time."""
        self._tick = time.perf_counter()

    def draw(self, name: str, function: Callable, *arguments) -> None:
        """Draw `pictures/<name>.png` by `function(*arguments, path)` on the main process; a failure is said, not raised."""
        if self._folder:
            path = self.path / "pictures" / f"{name}.png"
            try:
                function(*arguments, path)
                self._journal.pictures({name: path})
            except Exception as error:  # a picture is not worth a run
                self.say(f"{path} could not be drawn: {type(error).__name__}: {error}")

    # --- inside

    def _on_signal(self, number: int, frame) -> None:
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once, without saving
        self._signal = signal.Signals(number).name

    def _due(self, every: int, step: int) -> bool:
        return step == self.total_steps or (step % every == 0 if every else self._stream.ends_epoch(step))

    def _take_in(self, reports: list[Report]) -> None:
        for report in reports:
            duration = self._durations.pop(report.step)
            self._seconds += duration
            self.stopping = self.stopping or report.stop
            self._broken.count(report.step, report.broken)
            self._row_steps += 1
            self._row_seconds += duration
            self._row_wait += report.data_wait
            if report.step % self.config.log_every == 0 or self.evaluates(report.step):
                self._journal.note(report.step, self._row(report))
                self._row_steps, self._row_seconds, self._row_wait = 0, 0.0, 0.0

    def _row(self, report: Report) -> dict[str, float]:
        samples = report.step * self.config.global_batch_size
        row = {
            "epoch": self._stream.epoch(report.step),
            "samples": samples,
            "train/loss": report.loss,
            "train/lr": self._schedule(report.step - 1),
            "train/grad_norm": report.grad_norm,
            "perf/images_per_second": self._row_steps * self.config.global_batch_size / self._row_seconds,
            "perf/data_wait": self._row_wait / self._row_seconds,
            "data/broken": self._broken.total,
        }
        if self._state.scaler:
            row["train/loss_scale"] = self._state.scaler.get_scale()
            row["train/skipped_steps"] = self._health.skipped
        if torch.cuda.is_available():
            row["perf/gpu_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
        return row

    def _take_over(self, found: Checkpoint) -> None:
        record = found.record
        self.step, self.best, self.last, self._seconds = (
            record["step"],
            record["best"],
            record["last"],
            record["seconds"],
        )
        self._broken.total, self._broken.in_window = record["broken"], record["broken_in_window"]
        self._health.skipped = record["skipped"]
        self.say(f"going on from step {self.step} of {self.total_steps} ({found.path})")
        if self.step >= self.total_steps:
            self.say("this run is finished; a larger --epochs or --max_steps takes it further")
        elif record["total_steps"] != self.total_steps:
            before = dataclasses.replace(self._schedule, total_steps=record["total_steps"])
            self.say(
                f"its length was {record['total_steps']} steps: the schedule is now that of {self.total_steps} from the start, "
                f"so the learning rate goes on at {self._schedule(self.step):.3g} (it ended at {before(self.step - 1):.3g})"
            )

    def _record(self, step: int) -> dict:
        return {
            "step": step,
            "total_steps": self.total_steps,
            "identity": self._identity,
            "numbers": self._state.numbers(),
            "best": self.best,
            "last": self.last,
            "broken": self._broken.total,
            "broken_in_window": self._broken.in_window,
            "skipped": self._health.skipped,
            "seconds": self._seconds,
            "config": dataclasses.asdict(self.config),
            "environment": self._facts,
            "tracker": self._tracker_id,
        }

    def _summary(self) -> dict:
        samples = self.step * self.config.global_batch_size
        return {
            "step": self.step,
            "epoch": self._stream.epoch(self.step),
            "samples": samples,
            "best": self.best,
            "last": self.last,
            "train_seconds": round(self._seconds, 3),
            "images_per_second": round(samples / self._seconds, 1) if self._seconds else None,
            "broken": self._broken.total,
            "skipped_steps": self._health.skipped,
        }

    def _open_files(self, facts: dict) -> None:
        folder, config = self._folder, self.config
        configuration.save(config, self.path / "config.yaml")
        folder.write("environment.json", facts)
        stood = folder.rewind(self.step)
        folder.status("running", self.step)
        tracker = Tracker(
            self.accelerator,
            "none" if config.dry_run else config.tracker,
            folder=self.path,
            project=config.project,
            name=self.path.name,
            config=dataclasses.asdict(config),
            run_id=folder.read("tracker.json").get("id"),
            sent_up_to=stood if self.step else 0,
            say=self.say,
        )
        self._facts, self._tracker_id = facts, tracker.run_id
        folder.write("tracker.json", {"id": tracker.run_id})
        self._journal.open(tracker, self.step, self.total_steps)

    def _end(self, status: str, cause: str, patience: float) -> None:
        if not self._folder:
            return
        where = ""
        try:
            if self._started:
                if status == "finished":
                    self._journal.flush()
                    self.draw("curves", pictures.curves, self.path)
                self._journal.summary(self._summary())
                where = self._journal.close(exit_code=int(status == "failed"), patience=patience)
            self._folder.status(status, self.step, cause)
        except OSError as error:
            self.say(f"{self.path}: its last word could not be written: {error}")
        if self._started and status != "failed":
            self.say(self._last_word(status, cause, where))

    def _last_word(self, status: str, cause: str, where: str) -> str:
        if status == "resumable":
            return f"stopped by {cause} at step {self.step} of {self.total_steps}: the same command goes on from there"
        rows = {
            "finished": f"step {self.step}, {self._stream.epoch(self.step):.1f} epochs, {self._seconds:.0f} s of training"
        }
        for name, results in (("last", self.last), ("best", self.best)):
            shown = ", ".join(
                f"{key.removeprefix('eval/')} {value:.4g}" for key, value in results.items() if "eval/" in key
            )
            rows[name] = f"step {results.get('step', '-')}: {shown}"
        rows |= {
            "model": f"{self.path / 'best'}",
            "pictures": f"{self.path / 'pictures'}",
            "rows": f"{self.path / 'metrics.jsonl'}",
        }
        if where:
            rows[self.config.tracker] = where
        return _table(rows)


def _table(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())
