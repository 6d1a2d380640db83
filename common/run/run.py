"""A run, as a recipe sees it: begun, prepared, trained step by step, evaluated, saved, ended.

Everything here is called on every rank; only the main process writes and prints.
"""

import contextlib
import math
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.checkpoints.state import TrainingState
from common.config import recipe_source
from common.config.parsing import identity, read_weights, short_hash
from common.data import duplicates
from common.data import workers as data_workers
from common.data.batch_plan import BatchPlan
from common.data.cache import EvalCache
from common.data.data_spec import data_rows, fingerprint, is_fingerprint
from common.data.loader import DeviceBatch, evaluation_loader
from common.distributed import determinism, devices, sharding, watchdog
from common.distributed.collectives import (
    all_or_none,
    broadcast_object,
    gather_objects,
    is_lost_peer,
    is_main,
    local_world_size,
    world_size,
)
from common.distributed.environment import environment
from common.errors import Refused
from common.launching import launch
from common.launching.exit_codes import END, RESTART, RESUMABLE, handle_stopping, notice, signal_name
from common.run import eval_only, micro_batch, plots
from common.run.eval_batches import EvalBatches
from common.run.folder import RunFolder, read_json, write_status
from common.run.observer import Observer
from common.run.profiling import Profile
from common.run.progress import direction_of
from common.run.records import Records, check_names, start_rows
from common.run.saving import Saving, find_run
from common.run.shutdown import Shutdown
from common.run.step_reports import Lap, StepReport, StepReports, first_said
from common.run.tracking import require
from common.training import batch_norm, exactness
from common.training import optimizer as optimization
from common.training.freezing import Freezing
from common.training.optimizer import Schedule
from common.training.step import Samples, TrainingStep
from common.training.update_size import UpdateSize
from common.training.warm_up import first_line, is_out_of_memory, warm_up

GRACE_S = 5.0  # seconds that a wait for data or an evaluation may take once this process was asked to stop
FIRST_SHOWN = 24  # samples of the first global batch, as a picture


class Run:
    """One start of a run, from joining the processes of its launch to its final status.

    With --eval_only it only evaluates: no folder is claimed, and `evaluate_only` is called instead of `prepare`.

    Attributes:
        accelerator: Accelerate's; `Run.prepare` calls its `prepare`.
        device: of this rank.
        weights: with --eval_only, where the weights to evaluate are from; else None.
        step: optimizer steps done.
        best_step: the step of the best evaluation so far, over all starts; 0 before the first.
        total_steps: the run's length. `last`: the step after which this start ends.
        plan: how the global batch is spread, once `prepare` knows it.
    """

    plan: BatchPlan

    def __init__(self, config: Any, observer: Observer | None = None):
        """`config` is a recipe's, with the fields of `RunConfig` and `OptimizationConfig`, and its data and model."""
        self.config, self.accelerator = config, launch.start(config)
        self._observer = observer or Observer()
        self._device = self.device = self.accelerator.device
        self.step, self.best_step = 0, 0
        self.weights = read_weights(config) if config.eval_only else None
        if self.weights is not None:
            eval_only.announce(config, self.weights)
            return
        if config.dtype == "float64" and self.accelerator.mixed_precision != "no":
            raise Refused(
                f"--dtype float64 would be computed in {self.accelerator.mixed_precision}, as the launch says: "
                "launch with --mixed_precision no, or leave out --dtype"
            )
        name = config.name or f"{recipe_source.stem(config)}-{short_hash(identity(config))}"
        if Path(name).name != name or name == "..":
            raise Refused(f"--name {name}: must be a folder name without slashes; where it lies is --output_dir")
        BatchPlan(config.global_batch_size, world_size(), config.max_micro_batch_size)  # refused before data are read
        self._scratch = broadcast_object(tempfile.mkdtemp() if is_main() else None) if config.dry_run else None
        self._open(Path(self._scratch or config.output_dir) / name)
        self._asked_by = ""  # what asked this process to stop
        self._ended_by = self._agreed = ""  # the reason given to `stop`: on this rank; on some rank, known to all
        self._asked_to_go = False  # whether this machine was asked to leave, rather than to restart its processes
        self._started = self._stopping = False
        # When a wait for data or an evaluation began, which can be left; before the first step, always.
        self._leavable_since: float | None = 0.0
        self._evaluation: Any = None  # of this step, if there is one
        self._is_drawn = False  # its pictures
        self._is_evaluating = self._is_whole = False  # whole: the state is that of `step`, no update has begun

    def _open(self, path: Path) -> None:
        """Claim the run folder `path`, which this start writes from here on."""
        self.path, config = path, self.config
        with all_or_none("opening the run folder"):
            if is_main():
                require(config.tracker)  # before a file is touched
            self._folder = RunFolder(self.path) if is_main() else None
        self._records = Records(config, self.path, self._folder)
        self._log, self.say = self._records.log, self._records.log.say
        self._saving = Saving(config, self.path, self._folder, self._records)
        self._writer = self._saving.writer
        self._shutdown = Shutdown(config, self.path, self._folder, self._records, self._writer)
        self._look_for_others()

    def __enter__(self) -> "Run":
        if self.weights is not None:
            return self
        self._handlers = handle_stopping(self._on_signal)
        watchdog.on_end(lambda cause: write_status(self.path, "failed", self.step, cause))
        return self

    def __exit__(self, _, error, trace) -> None:
        if self.weights is not None:
            return
        try:
            if error is None and self._started and not self._stopping and self.step < self.last:
                self._leave_early()
        except Exception as failure:
            self._close(failure)
            raise
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._asked_by and error and is_lost_peer(error):  # it has left, see `_on_alarm`
            self._save_alone()
        data_workers.end()  # else torch would raise for one that dies, also between the lines of what follows
        watchdog.end()  # from here on only the main process has long work: pictures, the dashboard
        stopped = error is None and self.step < self.last
        is_planned = hasattr(self, "plan")
        lasting = is_planned and not self._scratch  # of a dry run the next start would find nothing
        too_much = lasting and error and is_out_of_memory(error)
        instead = self._shutdown.take_less(self.plan, self._device) if too_much else None
        error = instead or error
        try:
            if self._started:
                status, cause = self._shutdown.outcome(stopped, self._asked_by, error)
                leavers = launch.leavers(self._asked_to_go) if stopped else []
                goes_on = stopped and launch.machine() not in leavers
                self._shutdown.finish(status, cause, goes_on)
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
        if not is_planned and isinstance(error, torch.OutOfMemoryError):
            raise Refused(
                f"the model does not fit into the memory of a device ({first_line(error)}): take a smaller one, or shard it "
                "over more devices with --config_file accelerate_configs/fsdp_bf16.yaml"
            ) from error
        if stopped:
            launch.leave(RESUMABLE, leavers)

    # --- before the first step

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        train_set: Samples,
        val_set: Any,
        compute_losses: Callable[[torch.nn.Module, DeviceBatch], torch.Tensor],
    ) -> tuple:
        """All that comes before the first step; returns the wrapped model and the optimizers.

        1. Finds the largest micro-batches that fit into the memory of every process, by a trial of a step.
        2. Wraps the model, and warms DDP up. With --ema_decay, makes the moving average of its weights.
        3. Prints the start table.
        4. Loads the checkpoint to resume from, if there is one, and starts the data workers.

        Several optimizers have parameters of their own each, are all stepped in every step, and come back as a list.
        `val_set` (`step.Evaluated`) says how images are evaluated, and exports the model accordingly.
        `compute_losses(network, batch)`, one loss per sample, is explained at `step.TrainingStep`.
        """
        if self.weights is not None:
            raise Refused(
                f"--eval_only {self.config.eval_only}: this recipe has no way to evaluate alone; add to its main, before "
                "run.prepare: if config.eval_only: return run.evaluate_only(model, val_set, evaluate)"
            )
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]
        if len(optimizers) > 1 and self.accelerator.scaler:
            raise Refused(
                f"fp16 with {len(optimizers)} optimizers: a step of one would change the scale of the others' gradients; "
                "launch in bf16 or fp32, or take parameter groups of one optimizer"
            )
        TrainingState(model, optimizers)  # refuses parameters that no checkpoint would have
        sharding.check(model)
        self._observer.on_prepare(model, train_set, compute_losses)
        self._go_on_from_elsewhere(train_set.source, val_set.source)
        self.model, self._ema = model, optimization.build_ema(self.config, model)
        determinism.search_fastest(train_set.few_shapes)
        freezing, data = Freezing(self.config, model, train_set.stream), (train_set.source, val_set.source)
        self._training = TrainingStep(self.accelerator, model, train_set, compute_losses, freezing)
        inexact = self._fit(self._make_plan(train_set))
        network, *wrapped = self._wrapped(model, optimizers)
        warm_up(network, model, partial(self._training.attempt, network, self.plan))
        counted = "boxes" if hasattr(train_set.source, "boxes") else "images"
        rows = data_rows(self.config.data, *data, counted)
        rows |= start_rows(self.config, model, train_set, self.plan, schedule.total_steps) | freezing.describe()
        rows |= {"layout": launch.describe(self.accelerator, self.config.dtype), "run folder": str(self.path)} | inexact
        if self.config.dry_run and self._folder:
            watchdog.note("looking for duplicates")
            rows |= duplicates.rows(*data)
        self._records.describe(rows, *data, self.plan, getattr(train_set, "sizes", {}))
        state = TrainingState(model, optimizers, self._ema and self._ema.module, self.accelerator.scaler)
        self._start(state, schedule, data, partial(val_set.export, train=train_set.source))
        self._update_size = UpdateSize(model, optimizers)
        steps = self.step, self.last
        self._training.begin(network, wrapped, self.plan, self.config.seed, steps, self.config.workers)
        self._val_set = val_set
        val_set.cache = EvalCache(local_world_size())
        self._loader = evaluation_loader(val_set, self.plan.max_micro_batch_size, self.config.workers)
        model.train()
        if not self.step and not self.config.dry_run:
            parts = self._training.first_batch(self.plan, FIRST_SHOWN)
            batch = self.plan.global_batch_size, getattr(model, "pretrained_cfg", None) or {}
            self.draw("first_batch", plots.first_batch, parts, *batch)
        return network, wrapped[0] if isinstance(optimizer, torch.optim.Optimizer) else wrapped

    def _wrapped(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple:
        """The network to train and its optimizers, wrapped by Accelerate: no model in shards, optimizers only under fp16."""
        network = model
        if not sharding.is_sharded(model):
            with sharding.hide_shards(model):
                network = self.accelerator.prepare(model)
        if self.accelerator.scaler:  # otherwise the wrapper would only take time
            optimizers = [*map(self.accelerator.prepare_optimizer, optimizers)]
        return network, *optimizers

    def _make_plan(self, samples: Samples) -> BatchPlan:
        """How the global batch is spread: pairs of MixUp and groups of batch norm stay together."""
        limit = self.config.max_micro_batch_size
        kept = micro_batch.kept(self.path, self._device) if self._folder else None  # if that was too much before
        limit = broadcast_object(min(limit, kept or limit))
        unit, undivided_for = batch_norm.unit(self.model), batch_norm.undivided_for(self.model)
        whole_batch = self.config.global_batch_size, world_size()
        return BatchPlan(*whole_batch, limit, math.lcm(samples.unit, unit), undivided_for)

    def _go_on_from_elsewhere(self, train: Any, val: Any) -> None:
        """Take the folder of the same run on the same data at another place, as in a job's scratch folder, if there is one.

        The default name has the path of the data in it, since data are not read yet where a folder is claimed.
        """
        name = ""
        if self._folder and self._folder.fresh and not self.config.name and self.config.resume == "auto":
            expected = identity(self.config) | {"data": fingerprint(train, val)}
            name = find_run(self.path.parent, recipe_source.stem(self.config), expected)
        name = broadcast_object(name)
        if name:
            self._shutdown.leave_no_trace()
            if self._folder:
                self._folder.close()
            self._open(self.path.with_name(name))

    @torch.compiler.set_stance("force_eager")  # a graph made before DDP wraps the model would keep it from overlapping
    def _fit(self, plan: BatchPlan) -> dict[str, str]:
        """Halve the micro-batches of `plan` until they fit. Returns rows of the start table.

        With --compile, too, the model runs uncompiled here, which usually takes more memory.
        """
        model = self.model
        watchdog.note("finding the micro-batch that fits into memory")
        with batch_norm.alone(model), sharding.alone(model):  # a rank that is out of memory leaves no other waiting
            self.plan, peak = micro_batch.fit(plan, self._training, self.say)
            with all_or_none("looking for what depends on the layout"):
                if self.config.dry_run:
                    self._training.check_draws(self.plan)
                inexact = exactness.describe(self.config, self._training.uses_generator)
        return {"memory": peak} | inexact

    def _start(self, state: TrainingState, schedule: Schedule, data: tuple, export: Callable[..., None]) -> None:
        """Load the checkpoint to resume from, if there is one, and open the run folder's files."""
        stream = schedule.stream
        self._stream, self.total_steps = stream, schedule.total_steps
        recorded = read_json(self.path / "environment.json").get("fingerprint", "")
        fingerprint_of_run = recorded if is_fingerprint(recorded, *data) else fingerprint(*data)
        identity_of_run = identity(self.config) | {"data": fingerprint_of_run}
        recipe = recipe_source.read(self.config)
        records = self._records
        records.begin(state, stream, schedule, identity_of_run, recipe)
        watchdog.note("choosing and loading a checkpoint")
        self.last = self._saving.resume(state, export, identity_of_run, recipe) or self.total_steps
        records.share()
        self.step, self.best_step = records.progress.step, records.progress.best.get("step", 0)
        self._profile = Profile(self.config.profile, self.step, self.total_steps, self.path, self.say)
        self._step_reports = StepReports(self.config.global_batch_size, state.scaler)
        self._seconds: dict[int, float] = {}  # of the steps whose reports are not in yet
        facts = environment(launch.precision(self.accelerator, self.config.dtype), self._device, self.config)
        with self._records.writing("writing the run folder"):
            if self._folder and self.step < self.last:
                records.open(facts)
        if devices.has_streams():
            torch.accelerator.reset_peak_memory_stats()  # rows have the peak of training
        self._leavable_since = None
        self._started = self._is_whole = True

    def autocast(self) -> contextlib.AbstractContextManager:
        """The precision of the launch, for a forward pass."""
        return self.accelerator.autocast()

    # --- every step

    def steps(self) -> Iterator[int]:
        """The steps that are to be made, until the last, or until some rank was asked to stop.

        To end the run earlier call `stop`, which a `break` would not.
        """
        for step in range(self.step, self.last):
            self._profile.before()
            self._began, self._lap = time.perf_counter(), Lap(self._device)
            watchdog.note("training", step + 1)
            yield step
            if self._stopping or self.step >= self.last:
                break
        self._end_steps()

    def log(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Add numbers of your own to the row of this step, as in `run.log({"train/aux": losses.detach()})`.

        Call it on every rank, once per step or once per micro-batch, before `end_step`. What is logged is the mean over all
        values that all ranks gave in this step: with one value per sample, [n], the mean over the global batch, the same
        on every layout. A number or a tensor [] counts as one value. Nothing waits for the device. Calls before the first
        step, where the forward pass is tried, do nothing. Raises `Refused` for a name that rows have already; a value
        that is not finite, or a name that some ranks left out, stops the run within two steps.
        """
        check_names(values)
        if self._started:
            self._step_reports.add(values)

    def micro_batches(self) -> Iterator[DeviceBatch]:
        """This rank's share of the step's global batch, in micro-batches on the device; call `backward` once for each."""
        batches = self._training.micro_batches(self.step)
        while True:
            with self._leavable():
                batch = next(batches, None)
            if batch is None:
                return
            self._observer.on_micro_batch(self.step + 1, batch)
            yield batch

    def backward(self, losses: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's losses, one per sample, [B].

        After the last micro-batch it is the gradient of the mean loss over the global batch, whatever the layout.
        """
        self._lap.ready()
        self._training.backward(losses)

    def clip_gradients(self, limit: float, mode: str = "norm") -> torch.Tensor:
        """Clip in place if `limit` > 0; returns the global L2 norm before that, a scalar on the device.

        mode `norm` scales all gradients together (Pascanu et al., 2013), `agc` each unit by the norm of its weights (Brock et
        al., 2021).
        """
        self._is_whole = False
        norm = self._training.clip_gradients(limit, mode)
        if self._logs(self.step + 1):
            self._update_size.begin()
        return norm

    def end_step(self, grad_norm: torch.Tensor) -> None:
        """The step is made: moves batch norm's running statistics and the moving average, and reports the step."""
        self._evaluation = None
        self._is_drawn = False
        outcome = self._training.end()
        self.step = step = self.step + 1
        if self._ema:
            self._ema.update(self.model, step)
        self._records.progress.step = step
        if launch.orphaned():
            self._ask("the end of its launcher")
        self._stop_by_flags()
        lost = self._folder is not None and self._folder.lost
        stop = bool(self._asked_by) or lost or self._log.failed or self._writer.failed
        update = self._update_size.end() if self._logs(step) else None
        self._step_reports.post(step, outcome, grad_norm, stop, self._ended_by, update, self._lap)
        reports = self._step_reports.read()
        self._seconds[step] = time.perf_counter() - self._began
        self._log.advance(step)
        self._take_in(reports)
        self._end(step)
        self._profile.after(step)
        self._is_whole = True

    def stop(self, why: str) -> None:
        """End the run early, with a last evaluation and checkpoint: `run.stop("patience")`, on one rank or on all.

        Called after an evaluation, it ends the run there; else within three steps. The reason is recorded: the same command
        does not train further, but a larger --epochs or --max_steps does.
        """
        self._ended_by = self._ended_by or why or "the recipe"

    def should_evaluate(self) -> bool:
        """True if an evaluation is due now: by the cadence, because the run ends here, or for one that a signal ended."""
        return self._due(self.config.eval_every, self.step) or self._records.progress.owes_evaluation

    def evaluate(
        self,
        evaluate: Callable[[torch.nn.Module, EvalBatches, Any], Any],
        best_metric: str,
        larger_is_better: bool | None = None,
    ) -> Any:
        """Evaluate the model, and its moving average if there is one; returns what `evaluate` did, of the last one.

        `evaluate(model, batches, data)` gets this rank's share of the images and their source. It returns a dict of results
        over all ranks, or an object with `results()`, which makes that dict, and `draw(pictures)`, which is called when
        there is time. Results are logged as `eval/...` and `eval/ema_...`. The model with the best `results[best_metric]` so
        far, of the average if there is one, goes to `best/` with the next checkpoint. For names that are not known, as top1,
        AP and loss are, `larger_is_better` is needed, else `Refused` is raised.
        """
        self._settle()  # evaluations and checkpoints build on finite steps
        larger = direction_of(best_metric) if larger_is_better is None else larger_is_better
        if larger is None:
            raise Refused(
                f"run.evaluate: whether a larger {best_metric} is better is not known; add larger_is_better=True, or False"
            )
        evaluation, results = self._evaluate(self.model, evaluate)
        if best_metric not in results:
            raise Refused(f"run.evaluate: best_metric={best_metric!r} is no result; there are {', '.join(results)}")
        if self._ema:
            evaluation, ema_results = self._evaluate(self._ema.module, evaluate)
            # The exported weights' first.
            results = {f"ema_{key}": value for key, value in ema_results.items()} | results
            best_metric = f"ema_{best_metric}"
        self._records.progress.owes_evaluation = False
        if self._records.evaluation(self.step, results, best_metric, larger):
            watchdog.note("writing best/")
            self._saving.keep_best(results)
            self.best_step = self.step
        self._stop_by_flags()
        self._evaluation = evaluation
        if broadcast_object(self._records.has_time_to_draw()):
            self._draw_evaluation()
        return evaluation

    @torch.compiler.set_stance("force_eager")  # as it will be used; its sizes would need graphs of their own
    def _evaluate(self, model: torch.nn.Module, evaluate: Callable[..., Any]) -> tuple[Any, dict]:
        """What `evaluate` returns of `model`, and its results."""
        model.eval()
        with self._leavable(is_evaluating=True), sharding.shared_passes(model, self._loader) as loader:
            batches = EvalBatches(loader, self._val_set.normalize, self.accelerator)
            evaluation = evaluate(model, batches, self._val_set.source)
            results = results_of(evaluation)
        model.train()
        return evaluation, results

    def evaluate_only(
        self,
        model: torch.nn.Module,
        val_set: Any,
        evaluate: Callable[[torch.nn.Module, EvalBatches, Any], Any],
    ) -> None:
        """Print the results of the weights of --eval_only, a checkpoint's moving average if it has one; write a report.

        `model` is built for them, and `evaluate` is as for `Run.evaluate`.
        """
        weights = self.weights
        if weights is None:
            raise Refused("run.evaluate_only: needs --eval_only, which names the weights to evaluate")
        data = val_set.source
        launch.say(eval_only.describe_data(self.config, weights, data))
        eval_only.load_weights(model, weights)
        batches = eval_only.build_batches(self.config, val_set, self.accelerator)
        model.eval()
        with torch.compiler.set_stance("force_eager"):
            evaluation = evaluate(val_set.adapt(model).eval(), batches, data)
            results = results_of(evaluation)
        eval_only.report(self.config, weights, data, results, evaluation)

    def should_save(self) -> bool:
        """True if a checkpoint is due now: by the cadence, or because some rank was asked to stop.

        After an evaluation this is a collective, by which the ranks agree whether the run ends there.
        """
        if self._evaluation is not None:
            self._agree_on_end()
        return self._due(self.config.checkpoint_every, self.step) or self._stopping

    def save(self) -> None:
        """Make a checkpoint. Training continues as soon as the state is copied; a thread of the main process writes."""
        self._settle()
        self._log.flush()
        watchdog.note("writing a checkpoint")
        self._saving.save(self.step)

    def draw(self, name: str, function: Callable, *arguments) -> None:
        """Draw `pictures/<name>.png` by `function(*arguments, path)` on the main process; a failure is logged, not raised."""
        watchdog.note(f"drawing {name}")
        self._records.draw(name, function, *arguments)

    # --- inside

    def _agree_on_end(self) -> None:
        """Make this step the last if `stop` was called on some rank. A collective."""
        if self.step < self.last:
            self._agreed = self._agreed or first_said(self._ended_by)
            self._end(self.step)

    def _stop_by_flags(self) -> None:
        """Let the run end if --patience or --max_hours says so: the main process decides, since clocks differ."""
        if is_main() and (why := self._records.progress.exhausted(self.config)):
            self.stop(why)

    def _settle(self) -> None:
        """Wait until every step so far is known to be finite on all ranks."""
        watchdog.note("settling")
        self._take_in(self._step_reports.settle())

    def _look_for_others(self) -> None:
        """Log which machines don't see the run folder; refuse if a restart could leave only such a machine."""
        blind = "" if self._scratch or self.path.is_dir() else socket.gethostname()
        if blind := ", ".join(sorted({*gather_objects(blind)} - {""})):
            text = f"{self.path} is not seen from {blind}: to go on from its checkpoints, name an --output_dir that all see"
            if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
                self._shutdown.leave_no_trace()
                raise Refused(text)
            self.say(f"{text}, or copy them before the next start")

    def _on_signal(self, number: int, frame) -> None:
        if self._asked_by and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once, without saving
        if (why := notice()) == RESTART:  # said by the launcher before it ends its processes
            self._asked_by = self._asked_by or "a change of machines"
        else:
            self._ask(why if why not in ("", END) else signal_name(number))
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        self._on_alarm(number, frame)

    def _on_alarm(self, number: int, frame) -> None:
        """End this process, saved if it has made steps, if it waits for what may not come. No communication."""
        if self._leavable_since is None or time.monotonic() - self._leavable_since < GRACE_S:
            return
        self._leavable_since = None
        try:
            if not self._started:
                self.say(f"stopped by {self._asked_by} before the first step: the same command starts again")
            self._save_alone()
            self._close(SystemExit(RESUMABLE))
        finally:
            launch.leave_now(self._asked_to_go)

    @contextlib.contextmanager
    def _leavable(self, is_evaluating: bool = False) -> Iterator[None]:
        """A block that this process leaves if it is asked to stop and the block takes long."""
        self._leavable_since = time.monotonic()
        self._is_evaluating = is_evaluating
        yield
        self._leavable_since = None
        self._is_evaluating = False

    def _save_alone(self) -> None:
        """Make a checkpoint of the last step without the other processes, which may hang."""
        if not self._folder or not self._is_whole or not self.step:
            return
        in_parts = sharding.has_shards(self.model)
        if in_parts or (self._is_evaluating and self.step == self.last):  # a run can't do without its last evaluation
            return
        self._records.progress.owes_evaluation |= self._is_evaluating
        try:
            self._settle()
            self._log.flush()
            self._saving.save_alone()
        except Exception as error:
            self.say(f"step {self.step} could not be saved: {error}")

    def _ask(self, what: str) -> None:
        self._asked_by = self._asked_by or what
        self._asked_to_go = True

    def _due(self, every: int, step: int) -> bool:
        return step == self.last or (step % every == 0 if every else self._stream.ends_epoch(step))

    def _logs(self, step: int) -> bool:
        """True if a row of `step` is due."""
        return step % self.config.log_every == 0 or self._due(self.config.eval_every, step)

    def _end(self, step: int) -> None:
        """Make `step` the run's last if all ranks know that it is to end; called before its evaluation and its checkpoint."""
        if self._agreed and step < self.last:
            self.last, self._records.progress.ended_by = step, self._agreed

    def _draw_evaluation(self) -> None:
        """Draw the pictures of this step's evaluation, if it has any and they are not drawn."""
        if hasattr(self._evaluation, "draw") and not self._is_drawn:
            self._evaluation.draw(self)
        self._is_drawn = True

    def _end_steps(self) -> None:
        self._profile.after(self.step, ends=True)
        if self.step == self.last:
            self._draw_evaluation()
        self._saving.wait()

    def _leave_early(self) -> None:
        """The recipe left its loop: save the model as it is, as after `stop`."""
        self.say(
            f"the loop was left at step {self.step} of {self.total_steps}, as by `break`: no last evaluation; "
            'run.stop("why") ends a run with one'
        )
        self._agreed = "the recipe, which left its loop"
        self._end(self.step)
        if self.step:
            self.save()
        self._end_steps()

    def _take_in(self, reports: list[StepReport]) -> None:
        for report in reports:
            self._records.take_in(
                report, self._seconds.pop(report.step), self._due(self.config.eval_every, report.step)
            )
            self._stopping = self._stopping or report.stop
            self._agreed = self._agreed or report.ended_by
            self._observer.on_report(report)


def results_of(evaluation: Any) -> dict:
    """The results over all ranks of what a recipe's `evaluate` returned: a dict, or an object that makes it. A collective."""
    return evaluation if isinstance(evaluation, dict) else evaluation.results()
