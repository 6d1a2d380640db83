"""How does a run begin, go on from where it was, evaluate and save?

A recipe opens a `Run`, takes the first step from `start`, hands over what each step made with `observe`, and asks when to
evaluate, save and stop. Everything here is called on every rank: what writes or prints is quiet off the main process.
"""

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from common.checkpoints.resume import choose_together
from common.checkpoints.state import Tensors, TrainingState
from common.checkpoints.store import Checkpoints, verify
from common.checkpoints.writer import Writer
from common.config import recipe_source
from common.config.fields import RunConfig, steps_between
from common.config.parsing import identity, short_hash
from common.data import workers as data_workers
from common.data.batch_plan import BatchPlan
from common.data.stream import Stream
from common.distributed import launch, watchdog
from common.distributed.collectives import all_or_none, broadcast_object, gather_objects, is_main
from common.distributed.environment import environment
from common.distributed.exit_codes import RESTART, RESUMABLE, notice
from common.errors import Refused
from common.run import micro_batch, plots, profiling
from common.run.best import Best
from common.run.folder import RunFolder
from common.run.profiling import Profile
from common.run.progress import Progress
from common.run.records import Records, check_names
from common.run.shutdown import Shutdown
from common.run.step_reports import StepReport, StepReports, first_said
from common.run.tracking import require
from common.training import batch_norm, exactness
from common.training.optimizer import Schedule
from common.training.warm_up import Trial, check_losses, is_out_of_memory, warm_up

_LONG_WAIT = 1.0  # seconds; people are told of longer ones
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Run:
    """One start of a run, from the claim on its folder to its last word."""

    def __init__(self, config: RunConfig, accelerator: Accelerator):
        self.config, self.accelerator = config, accelerator
        if config.dtype == "float64" and accelerator.mixed_precision != "no":
            raise Refused(
                f"--dtype float64 would be computed in {accelerator.mixed_precision}, as the launch says: "
                "launch with --mixed_precision no, or leave out --dtype"
            )
        name = config.name or f"{recipe_source.stem(config)}-{short_hash(identity(config))}"
        if Path(name).name != name or name == "..":
            raise Refused(f"--name {name}: must be a folder name without slashes; where it lies is --output_dir")
        profiled = steps_between(config.profile)
        if config.max_steps:
            profiling.check(profiled, config.max_steps)  # where the length is known before the data are
        self._scratch = broadcast_object(tempfile.mkdtemp() if is_main() else None) if config.dry_run else None
        self.path = Path(self._scratch or config.output_dir) / name
        with all_or_none("opening the run folder"):
            if is_main():
                require(config.tracker)  # before a file is touched
            self._folder = RunFolder(self.path) if is_main() else None
        self._records = Records(config, self.path, self._folder)
        self._log, self.say = self._records.journal, self._records.journal.say
        self._profile = Profile(*profiled, self.path, self.say) if profiled else None
        self._checkpoints = Checkpoints(self.path / "checkpoints", config.keep_checkpoints)
        self._writer = Writer()
        self._shutdown = Shutdown(config, self.path, self._folder, self._records, self._writer)
        self._look_for_others()
        self.max_micro_batch_size = self._most()  # at once, of a process
        self._asked_by = ""  # what asked this process to stop
        self._ended_by = self._agreed = ""  # what was said to `stop`: on this rank; on some rank, as all know
        self._asked_to_go = False  # whether it asked this machine to leave, rather than to start its processes again
        self._started = self._stopping = False
        self._plan: BatchPlan | None = None

    def __enter__(self) -> "Run":
        self._handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        watchdog.on_end(lambda cause: self._shutdown.leave_word(self._step, cause))
        return self

    def __exit__(self, _, error, trace) -> None:
        try:
            if error is None and self._started and not self._stopping and self._step < self.last:
                self._leave_early()
        except Exception as failure:
            self._close(failure)
            raise
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        data_workers.end()  # else torch would raise for one that dies, also between the lines of what follows
        watchdog.end()  # from here on the main process alone has long work: pictures, the dashboard
        stopped = error is None and self._step < self.last
        lasting = self._plan and not self._scratch  # of a dry run the next start would find nothing
        too_much = lasting and error and is_out_of_memory(error)
        instead = self._shutdown.take_less(self._plan, self.accelerator.device) if too_much else None
        error = instead or error
        try:
            if self._started:
                status, cause = self._shutdown.outcome(stopped, self._asked_by, error)
                leavers = launch.leavers(self._asked_to_go) if stopped else []
                goes_on = stopped and launch.machine() not in leavers
                self._shutdown.finish(status, cause, self._draw_curves, goes_on)
            elif not instead:
                self._shutdown.leave_no_trace()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            if self._folder:
                self._folder.close()
            if self._scratch and is_main():
                shutil.rmtree(self._scratch, ignore_errors=True)
        if instead:
            raise instead
        if stopped:
            launch.leave(RESUMABLE, leavers)

    # --- before the first step

    def length(self, stream: Stream) -> int:
        """The run's length in steps: --max_steps, or else --epochs in whole steps, rounded up; two for --dry_run."""
        steps = self.config.max_steps or stream.steps(self.config.epochs)
        if steps < 1:
            raise Refused(f"--epochs {self.config.epochs}: no step to make; train longer, or take --eval_only")
        steps = min(2, steps) if self.config.dry_run else steps
        profiling.check(steps_between(self.config.profile), steps)
        return steps

    @torch.compiler.set_stance("force_eager")  # a graph made before DDP wraps the model would keep it from overlapping
    def fit(self, plan: BatchPlan, model: torch.nn.Module, trial: Trial) -> BatchPlan:
        """`plan`, its micro-batches halved until a trial of the largest fits into the memory of every process.

        With --compile, too, the model runs uncompiled here, which usually takes more memory.
        """
        watchdog.note("finding the micro-batch that fits into memory")
        attempt = lambda plan: warm_up(model, model, partial(trial, model, plan))  # noqa: E731
        with batch_norm.alone(model):  # a rank that is out of memory leaves no other waiting
            self._plan, peak = micro_batch.fit(plan, attempt, model, self.say)
            with all_or_none("looking for what depends on the layout"):
                inexact = exactness.describe(self.config, model, partial(trial, model, self._plan))
        self._rows = {"memory": peak} | inexact
        return self._plan

    def wrap(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer, trial: Trial) -> list:
        """`model` and each optimizer as Accelerate prepares them for the processes of this run, in the state of a run's middle.

        Several optimizers have parameters of their own each, and are all stepped in every step.
        """
        if len(optimizers) > 1 and self.accelerator.scaler:
            raise Refused(
                f"fp16 with {len(optimizers)} optimizers: a step of one would change the scale of the others' gradients; "
                "launch in bf16 or fp32, or take parameter groups of one optimizer"
            )
        network, *optimizers = self.accelerator.prepare(model, *optimizers)
        warm_up(network, model, partial(trial, network, self._plan))
        return [network, *optimizers]

    def describe(self, rows: dict[str, str], train: Sized, val: Sized, **sizes: int | Sequence[int]) -> None:
        """Print the start table: `rows` that have a value, and what of the run depends on its layout.

        The sizes of the data `train` and `val`, and `sizes`, go into the tracker's configuration as `run/train_images` etc.
        """
        self._records.describe(rows | self._rows, train, val, self._plan, sizes)

    def start(
        self,
        state: TrainingState,
        stream: Stream,
        schedule: Schedule,
        fingerprint: str,
        export: Callable[[dict, Path], None],
    ) -> int:
        """Load the checkpoint to go on from, if there is one; returns how many steps are done.

        `export(results, folder)` writes a folder of the model that is evaluated: what `keep_best` makes `best/` of.
        """
        self._state, self._stream, self.total_steps = state, stream, schedule.total_steps
        self.last = self.total_steps  # the step after which the run ends
        told, recipe = identity(self.config) | {"data": fingerprint}, recipe_source.read(self.config)
        records = self._records
        records.begin(state, stream, schedule, told, recipe)
        watchdog.note("choosing and loading a checkpoint")
        self._best = Best(self.path, state, export, self.say) if self._folder else None
        options = recipe, self.config.allow_changed_source
        if found := choose_together(self.config.resume, self._checkpoints, told, self.say, *options):
            nothing = {"status": "", "step": 0, "cause": ""}
            said = broadcast_object(nothing | self._folder.read("status.json") if self._folder else None)
            with self._records.writing(f"loading {found.path}"):
                state.check(found.shapes(), str(found.path))
                try:
                    records.progress = Progress(**found.record["ledger"])
                    if self._best:
                        self._best.mend(found, records.progress)
                    state.load(found.tensors(), found.record["numbers"])
                    self.last = records.resume(found, said)
                except (KeyError, TypeError, ValueError) as error:
                    raise Refused(
                        f"{found.path} is not as this version of the code writes it ({type(error).__name__}: {error}): "
                        "go on with the version that wrote it, or give this run another --name"
                    ) from error
        records.share()
        if self._profile:
            self._profile.skip(self._step)
        self._step_reports = StepReports(self.config.global_batch_size, state.scaler)
        self._seconds: dict[int, float] = {}  # of the steps whose reports are not in yet
        facts = environment(launch.precision(self.accelerator, self.config.dtype), self.accelerator.device, self.config)
        with self._records.writing("writing the run folder"):
            if self._folder and self._step < self.last:
                records.open(self.accelerator, facts)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # rows tell the peak of training, not of what was tried before
        self._started = True
        return self._step

    # --- every step

    def steps(self) -> Iterator[int]:
        """The steps that are to be made, until the last, or until some rank was asked to stop.

        To end the run earlier call `stop`, which a `break` would not.
        """
        for step in range(self._step, self.last):
            if self._profile:
                self._profile.before(step + 1)
            self._began = time.perf_counter()
            watchdog.note("training", step + 1)
            yield step
            if self._stopping or self._step >= self.last:
                break
        self._end_steps()

    def log(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Add numbers of your own to the row of this step, as in `run.log({"train/aux": losses.detach()})`.

        Call it on every rank, once per step or once per micro-batch, before `observe`. What is logged is the mean over all
        values that all ranks gave in this step: with one value per sample, [n], the mean over the global batch, the same
        on every layout. A number or a tensor [] counts as one value. Nothing waits for the device. Calls before the first
        step, where the forward pass is tried, do nothing. Raises `Refused` for a name that rows have already; a value
        that is not finite, or a name that some ranks left out, stops the run within two steps.
        """
        check_names(values)
        if self._started:
            self._step_reports.add(values)

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
        self._records.progress.step = step
        if launch.orphaned():
            self._ask("the end of its launcher")
        lost = self._folder is not None and self._folder.lost
        stop = bool(self._asked_by) or lost or self._log.failed or self._writer.failed
        check_losses(losses, len(positions))
        self._step_reports.post(step, losses, positions, grad_norm, data_wait, broken, stop, self._ended_by)
        reports = self._step_reports.read()
        self._seconds[step] = time.perf_counter() - self._began
        self._log.advance(step)
        self._take_in(reports)
        self._end(step)
        if self._profile:
            self._profile.after()

    def stop(self, why: str) -> None:
        """End the run as well as at its last step, such as by `run.stop("patience")`; on one rank or on all.

        Said after an evaluation, it ends there; else within three steps, with an evaluation. It is remembered: the same command
        does not train on, but a larger --epochs or --max_steps does.
        """
        self._ended_by = self._ended_by or why or "the recipe"

    def ends(self, step: int) -> bool:
        """Whether `step` is the run's last: by its length, or since some rank said `stop`. A collective, after evaluations."""
        if step < self.last:
            self._agreed = self._agreed or first_said(self._ended_by)
            self._end(step)
        return step == self.last

    @property
    def best_step(self) -> int:
        """Step of the best evaluation so far, over all starts; 0 before the first."""
        return self._records.progress.best.get("step", 0)

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after `step`: by the cadence, or because the run ends there."""
        return self._due(self.config.eval_every, step)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`: by the cadence, or because some rank was asked to stop."""
        return self._due(self.config.checkpoint_every, step) or self._stopping

    def settle(self) -> None:
        """Wait until every step so far is known to be finite on all ranks: evaluation and checkpoints build on that."""
        watchdog.note("settling")
        self._take_in(self._step_reports.settle())

    def record(self, step: int, results: dict, leading: str) -> bool:
        """Note an evaluation's results as `eval/...`; whether `results[leading]` (larger is better) is the best so far."""
        return self._records.evaluation(step, results, leading)

    def keep_best(self, results: dict) -> None:
        """Export the model, which has these results; with the next checkpoint it takes the place of `best/`."""
        watchdog.note("writing best/")
        with self._records.writing("writing best/"):
            if self._best:
                self._best.export(results, self._records.checkpoint())

    def save(self, step: int) -> None:
        """Make a checkpoint of `step`, once it is known that all its steps were finite.

        Training goes on when the state is copied; if the checkpoint before is still being written, it waits for that first.
        What can't be written stops the run within a few steps, on all ranks.
        """
        self.settle()
        self._log.flush()
        watchdog.note("writing a checkpoint")
        with self._records.writing("writing a checkpoint"):
            if self._folder:
                self._log.check()
                if (waited := self._writer.wait()) > _LONG_WAIT:
                    self.say(
                        f"step {step}: waited {waited:.0f} s for the checkpoint before to be written; "
                        "a larger --checkpoint_every leaves it the time"
                    )
                self._best.take()
                self._writer.start(
                    self._state.tensors(), partial(self._commit, self._records.checkpoint(), self._records.summary())
                )
                if self.config.dry_run:
                    self._writer.wait()
                    self._state.load(verify(self._checkpoints.paths()[0]).tensors(), self._state.numbers())

    def draw(self, name: str, function: Callable, *arguments) -> None:
        """Draw `pictures/<name>.png` by `function(*arguments, path)` on the main process; a failure is said, not raised.

        Images with boxes that it returns go to the dashboard, too.
        """
        watchdog.note(f"drawing {name}")
        self._records.draw(name, function, *arguments)

    # --- inside

    @property
    def _step(self) -> int:
        """Optimizer steps done."""
        return self._records.progress.step

    def _look_for_others(self) -> None:
        """Say which machines don't see the run folder; refuse them where processes may be restarted, on one of these alone."""
        blind = "" if self._scratch or self.path.is_dir() else socket.gethostname()
        if blind := ", ".join(sorted({*gather_objects(blind)} - {""})):
            text = f"{self.path} is not seen from {blind}: to go on from its checkpoints, name an --output_dir that all see"
            if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
                self._shutdown.leave_no_trace()
                raise Refused(text)
            self.say(f"{text}, or copy them before the next start")

    def _most(self) -> int:
        """The most samples that a process takes at once: fewer than asked for where those once were too many."""
        most = self.config.max_micro_batch_size
        kept = micro_batch.kept(self.path, self.accelerator.device) if self._folder else None
        return broadcast_object(min(most, kept or most))

    def _on_signal(self, number: int, frame) -> None:
        if self._asked_by and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once, without saving
        if notice() == RESTART:  # said by the launcher before it ends its processes
            self._asked_by = self._asked_by or "a change of machines"
        else:
            self._ask(signal.Signals(number).name)

    def _ask(self, what: str) -> None:
        self._asked_by = self._asked_by or what
        self._asked_to_go = True

    def _commit(self, record: dict, summary: dict, files: dict[str, Tensors]) -> None:
        """Make the checkpoint, and then what says that it is there; in the writer's thread."""
        self._folder.sync()
        record = record | {"best": self._best.seal()}
        self._folder.check()
        self._checkpoints.save(record, files)
        self._best.place()
        self._log.summary(summary)
        if self._folder.read("status.json").get("status") == "running":  # no rank has left word why it failed
            self._folder.status("running", record["step"])

    def _draw_curves(self) -> None:
        of = self._records.progress
        self.draw("curves", plots.curves, self.path, of.leading, of.best.get("step"))

    def _due(self, every: int, step: int) -> bool:
        return step == self.last or (step % every == 0 if every else self._stream.ends_epoch(step))

    def _end(self, step: int) -> None:
        """Let `step` be the run's last, if all ranks know that it is to end; before its evaluation and its checkpoint."""
        if self._agreed and step < self.last:
            self.last, self._records.progress.ended_by = step, self._agreed

    def _end_steps(self) -> None:
        if self._profile:
            self._profile.end()
        with self._records.writing("writing a checkpoint"):
            self._writer.wait()

    def _leave_early(self) -> None:
        """The recipe has left its loop: keep what it has trained, as if it had said `stop`."""
        self.say(
            f"the loop was left at step {self._step} of {self.total_steps}, as by `break`: no last evaluation; "
            'run.stop("why") ends a run with one'
        )
        self._agreed = "the recipe, which left its loop"
        self._end(self._step)
        if self._step:
            self.save(self._step)
        self._end_steps()

    def _take_in(self, reports: list[StepReport]) -> None:
        for report in reports:
            self._records.take_in(report, self._seconds.pop(report.step), self.evaluates(report.step))
            self._stopping = self._stopping or report.stop
            self._agreed = self._agreed or report.ended_by
