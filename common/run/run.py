"""A run, as a recipe sees it: begun, prepared, trained step by step, evaluated, saved, ended.

Everything here is called on every rank; only the main process writes and prints.
"""

import contextlib
import math
import os
import shutil
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
from common.config.parsing import compute_short_hash, get_identity, read_eval_origin
from common.data import workers as data_workers
from common.data.batch_plan import BatchPlan
from common.data.cache import EvalCache
from common.data.data_spec import is_fingerprint, join_fingerprints
from common.data.loader import DeviceBatch, create_eval_loader
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
from common.distributed.environment import describe_environment
from common.errors import Refused
from common.launching import launch
from common.launching.exit_codes import RESUMABLE
from common.run import eval_only, micro_batch, plots
from common.run.ending import Ending
from common.run.eval_batches import EvalBatches
from common.run.folder import RunFolder, read_json, write_status
from common.run.observer import Observer
from common.run.profiling import Profile
from common.run.progress import direction_of
from common.run.records import Records, check_names
from common.run.saving import Saving, find_run
from common.run.shutdown import Shutdown
from common.run.start_table import build_start_table, get_sizes
from common.run.step_reports import Lap, StepReport, StepReports
from common.run.tracking import require
from common.training import batch_norm, exactness
from common.training import optimizer as optimization
from common.training.freezing import Freezing
from common.training.step import TrainDataset, TrainingStep
from common.training.update_size import UpdateSize
from common.training.warm_up import is_out_of_memory, summarize_error, warm_up

FIRST_SHOWN = 24  # samples of the first global batch, as a picture
MOST_DETAILED = 10_000  # classes that results.json and the checkpoint's record describe each: 2 MB


class Run:
    """One start of a run, from joining the processes of its launch to its final status.

    With --eval_only it only evaluates: no folder is claimed, and `evaluate_only` is called instead
    of `prepare`.

    Attributes:
        accelerator: Accelerate's; `Run.prepare` calls its `prepare`.
        device: of this rank.
        path: the run folder.
        weights: with --eval_only, where the weights to evaluate are from; else None.
        say: logs lines, `run.say("a line")`; the main process prints them and writes them to log.txt.
        step: optimizer steps done.
        best_step: the step since which no evaluation had a better leading result, over all starts;
            0 before the first.

    `Run.prepare` adds:
        model: as the recipe made it, without wrappers.
        plan: how the global batch is spread.
        total_steps: the run's length.
    """

    plan: BatchPlan

    def __init__(self, config: Any, observer: Observer | None = None):
        """Join the processes, and claim the run folder.

        `config` has the fields of `RunConfig` and `OptimizationConfig`, and of the recipe's data and model.
        """
        self.config = config
        self._observer = Observer() if observer is None else observer
        self.accelerator = launch.start(config)
        self.device = self.accelerator.device
        self.step = 0
        self.best_step = 0
        self.weights = read_eval_origin(config) if config.eval_only else None
        if self.weights is not None:
            eval_only.announce(config, self.weights)
            return
        if config.dtype == "float64" and self.accelerator.mixed_precision != "no":
            raise Refused(
                f"--dtype float64 would be computed in {self.accelerator.mixed_precision}, as the "
                "launch says: launch with --mixed_precision no, or leave out --dtype"
            )
        name = config.name
        if not name:
            identity_hash = compute_short_hash(get_identity(config))
            name = f"{recipe_source.get_recipe_name(config)}-{identity_hash}"
        if Path(name).name != name or name == "..":
            raise Refused(
                f"--name {name}: must be a folder name without slashes; where it lies is "
                "--output_dir"
            )
        # Refused before data are read.
        BatchPlan(config.global_batch_size, world_size(), config.max_micro_batch_size)
        output_dir = config.output_dir
        if config.dry_run:
            output_dir = broadcast_object(tempfile.mkdtemp() if is_main() else None)
        self._scratch = output_dir if config.dry_run else None
        # Sets path, say, _folder, _records, _saving and _shutdown.
        self._open(Path(output_dir) / name)
        self._ending = Ending(self._leave_alone)
        self._started = False  # `prepare` is done
        # The state is that of `step`, with its evaluation: no update has begun.
        self._is_whole = False
        self._seconds: dict[int, float] = {}  # of the steps whose reports are not in yet
        self._evaluation: Any = None  # of this step, if there is one
        self._is_drawn = False  # its pictures

    def _open(self, path: Path) -> None:
        """Claim the run folder `path`, which this start writes from here on; also in place of another one."""
        self.path = path
        with all_or_none("opening the run folder"):
            if is_main():
                require(self.config.tracker)  # before a file is touched
            self._folder = RunFolder(path) if is_main() else None
        self._records = Records(self.config, path, self._folder)
        self.say = self._records.log.say
        self._saving = Saving(self.config, path, self._folder, self._records)
        self._shutdown = Shutdown(
            self.config, path, self._folder, self._records, self._saving.writer
        )
        self._check_folder_is_shared()

    @property
    def last(self) -> int:
        """The step after which this start ends; 0 before `prepare`."""
        return self._ending.last

    def __enter__(self) -> "Run":
        if self.weights is not None:
            return self
        self._ending.handle_signals()
        watchdog.set_end_callback(lambda cause: write_status(self.path, "failed", self.step, cause))
        return self

    def __exit__(self, _, error, trace) -> None:
        if self.weights is not None:
            return
        try:
            if (
                error is None
                and self._started
                and not self._ending.is_stopping
                and self.step < self.last
            ):
                self._leave_early()
        except Exception as failure:
            self._close(failure)
            raise
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        ending = self._ending
        ending.cancel_alarm()
        if ending.requested_by and error and is_lost_peer(error):
            # One that has left alone says so; one that was killed does not, and then the evaluation
            # is made again.
            self._save_alone(ending.is_evaluating and self._shutdown.is_left())
        # Else torch would raise for one that dies, also between the lines of what follows.
        data_workers.stop_workers()
        watchdog.stop()  # from here on only the main process has long work: pictures, the dashboard
        stopped = error is None and self.step < self.last
        leavers: list[int] = []
        replacement = self._take_less(error)
        try:
            if self._started:
                status, cause = self._shutdown.decide_outcome(
                    stopped, ending.requested_by, replacement or error
                )
                leavers = launch.gather_leavers(ending.is_leaving) if stopped else []
                goes_on = stopped and launch.get_machine_rank() not in leavers
                self._shutdown.finish(status, cause, goes_on)
            elif not replacement:
                self._shutdown.leave_no_trace()
        finally:
            ending.restore_handlers()
            if self._folder:
                self._folder.close()
            if self._scratch and is_main():
                shutil.rmtree(self._scratch, ignore_errors=True)
        if replacement:
            raise replacement
        if isinstance(error, torch.OutOfMemoryError) and not hasattr(self, "plan"):
            raise Refused(
                f"the model does not fit into the memory of a device ({summarize_error(error)}): take "
                "a smaller one, or shard it over more devices with --config_file "
                "accelerate_configs/fsdp_bf16.yaml"
            ) from error
        if stopped:
            launch.leave(RESUMABLE, leavers)

    def _take_less(self, error: BaseException | None) -> Exception | None:
        """The exception to raise in place of `error`, if that is a lack of memory with a way out."""
        # Of a dry run the next start would find nothing. Before there is a plan, nothing can be
        # smaller.
        if error and is_out_of_memory(error) and hasattr(self, "plan") and not self._scratch:
            return self._shutdown.take_less(self.plan, self.device)
        return None

    # --- before the first step

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        schedule: Callable[[int], float],
        train_set: TrainDataset,
        val_set: Any,
        compute_losses: Callable[[torch.nn.Module, DeviceBatch], torch.Tensor],
    ) -> tuple:
        """All that comes before the first step; returns the wrapped model and the optimizers.

        1. Finds the largest micro-batches that fit into the memory of every process, by a trial of a step.
        2. Wraps the model, and warms DDP up. With --ema_decay, makes the moving average of its weights.
        3. Prints the start table.
        4. Loads the checkpoint to resume from, if there is one, and starts the data workers.

        The attributes of the run that need a model are born here: `model`, `plan`, `total_steps`,
        and those of the loop.

        `schedule(step)` is the learning rate of a step, counted from 0; the run's length is its
        `total_steps` if it has that, else that of --epochs or --max_steps. Several optimizers have
        parameters of their own each, are all stepped in every step, and come back as a list.
        `val_set` (`step.EvalDataset`) says how images are evaluated, and exports the model
        accordingly. `compute_losses(network, batch)`, one loss per sample, is explained at
        `step.TrainingStep`.
        """
        optimizers = (
            [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        )
        self._check_trainable(model, optimizers)
        self._observer.on_prepare(model, train_set, compute_losses)
        train = train_set.source
        val = val_set.source
        self._take_over_folder(train, val)
        self._shutdown.has_audit = getattr(train, "has_audit", True)
        self.model = model
        self._ema = optimization.build_ema(self.config, model)
        determinism.set_benchmark(train_set.has_few_shapes)
        freezing = Freezing(self.config, model, train_set.stream)
        self._training = TrainingStep(self.accelerator, model, train_set, compute_losses, freezing)
        self.plan = self._make_plan(train_set)
        trial_rows = self._fit()
        network, wrapped = self._wrap(model, optimizers)
        warm_up(network, model, partial(self._training.run_trial, network, self.plan))
        self._stream = train_set.stream
        self.total_steps = getattr(schedule, "total_steps", 0)
        if not self.total_steps:
            self.total_steps = optimization.count_steps(self.config, self._stream)
        rates = optimization.describe_optimization(
            self.config, model, schedule, optimizers, self.total_steps
        )
        self._print_start_table(train_set, val, rates, freezing, trial_rows)

        averaged_model = self._ema.module if self._ema else None
        state = TrainingState(model, optimizers, averaged_model, self.accelerator.scaler)
        run_identity = self._identify(train, val)
        self._resume(state, schedule, train, run_identity, partial(val_set.export, train=train))
        self._profile = Profile(
            self.config.profile, self.step, self.total_steps, self.path, self.say
        )
        facts = get_sizes(model, train_set, val, self.plan)
        facts |= {"fingerprint": run_identity["data"], "optimization": rates}
        self._open_records(facts, {"train": train, "val": val})
        self._step_reports = StepReports(self.config.global_batch_size, state.scaler)
        self._update_size = UpdateSize(model, optimizers)
        self._start_loop(network, wrapped, val_set)
        return network, wrapped[0] if isinstance(optimizer, torch.optim.Optimizer) else wrapped

    def _start_loop(self, network: torch.nn.Module, wrapped: list[Any], val_set: Any) -> None:
        """Start the data workers, and draw the first batch."""
        self._lap = Lap(self.device)  # of the present step
        self._ending.forbid_leaving()
        self._started = True
        self._is_whole = True
        steps = self.step, self.last
        self._training.start(
            network, wrapped, self.plan, self.config.seed, steps, self.config.workers
        )
        self._val_set = val_set
        val_set.cache = EvalCache(local_world_size())
        self._loader = create_eval_loader(
            val_set, self.plan.max_micro_batch_size, self.config.workers
        )
        self.model.train()
        self._draw_first_batch(self.model)

    def _check_trainable(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Raise `Refused` if this start can't train `model`, or a checkpoint would not have all of it."""
        if self.weights is not None:
            raise Refused(
                f"--eval_only {self.config.eval_only}: this recipe has no way to evaluate alone; "
                "add to its main, before run.prepare: if config.eval_only: return "
                "run.evaluate_only(model, val_set, evaluate)"
            )
        if len(optimizers) > 1 and self.accelerator.scaler:
            raise Refused(
                f"fp16 with {len(optimizers)} optimizers: a step of one would change the scale of "
                "the others' gradients; launch in bf16 or fp32, or take parameter groups of one "
                "optimizer"
            )
        best_metric = self.config.best_metric
        if best_metric and direction_of(best_metric) is None:
            raise Refused(
                f"--best_metric {best_metric}: whether a larger one is better is not known; take "
                "a result such as top1, f1_macro, mean_class_accuracy, AP, AP50 or loss, or name "
                "your own in run.evaluate"
            )
        TrainingState(model, optimizers)  # refuses parameters that no optimizer has
        sharding.check_all_sharded(model)

    def _wrap(
        self, model: torch.nn.Module, optimizers: list[Any]
    ) -> tuple[torch.nn.Module, list[Any]]:
        """The network and its optimizers, wrapped by Accelerate.

        A model in shards is not wrapped again, and optimizers only under fp16.
        """
        network = model
        if not sharding.is_sharded(model):
            with sharding.hide_shards(model):
                network = self.accelerator.prepare(model)
        if self.accelerator.scaler:  # otherwise the wrapper would only take time
            optimizers = [self.accelerator.prepare_optimizer(optimizer) for optimizer in optimizers]
        return network, optimizers

    def _make_plan(self, train_set: TrainDataset) -> BatchPlan:
        """How the global batch is spread: pairs of MixUp and groups of batch norm stay together."""
        limit = self.config.max_micro_batch_size
        if self._folder:
            # More was too much in an earlier start.
            earlier_limit = micro_batch.load_limit(self.path, self.device)
            if earlier_limit is not None:
                limit = min(limit, earlier_limit)
        return BatchPlan(
            self.config.global_batch_size,
            world_size(),
            max_micro_batch_size=broadcast_object(limit),
            unit_size=math.lcm(train_set.unit_size, batch_norm.get_group_size(self.model)),
            undivided_for=batch_norm.get_undivided_flag(self.model),
        )

    def _take_over_folder(self, train: Any, val: Any) -> None:
        """Take the folder of the same run on the same data at another place, if there is one.

        Such a place is a job's scratch folder.

        The default name has the path of the data in it, since data are not read yet where a folder
        is claimed.
        """
        name = ""
        if (
            self._folder
            and self._folder.fresh
            and not self.config.name
            and self.config.resume == "auto"
        ):
            expected = get_identity(self.config) | {"data": join_fingerprints(train, val)}
            name = find_run(self.path.parent, recipe_source.get_recipe_name(self.config), expected)
        name = broadcast_object(name)
        if name:
            self._shutdown.leave_no_trace()
            if self._folder:
                self._folder.close()
            self._open(self.path.with_name(name))

    # A graph made before DDP wraps the model would keep it from overlapping.
    @torch.compiler.set_stance("force_eager")
    def _fit(self) -> dict[str, str]:
        """Halve the micro-batches of the plan until they fit. Returns rows of the start table.

        With --compile, too, the model runs uncompiled here, which usually takes more memory.
        """
        watchdog.note("finding the micro-batch that fits into memory")
        # A rank that is out of memory leaves no other waiting.
        with batch_norm.normalize_per_rank(self.model), sharding.skip_communication(self.model):
            self.plan, peak = micro_batch.fit(self.plan, self._training, self.say)
            with all_or_none("looking for what depends on the layout"):
                if self.config.dry_run:
                    self._training.check_reproducible(self.plan)
                inexact = exactness.describe_exactness(self.config, self._training.uses_generator)
        return {"memory": peak} | inexact

    def _print_start_table(
        self,
        train_set: TrainDataset,
        val: Any,
        rates: str,
        freezing: Freezing,
        trial_rows: dict[str, str],
    ) -> None:
        rows = build_start_table(
            self.config,
            self.model,
            train_set,
            val,
            plan=self.plan,
            total_steps=self.total_steps,
            rates=rates,
            freezing=freezing,
            layout=launch.describe_launch(self.accelerator, self.config.dtype),
            folder=self.path,
            trial=trial_rows,
        )
        self._records.log.table(rows)

    def _identify(self, train: Any, val: Any) -> dict[str, Any]:
        """What the run is: its configuration and its data."""
        recorded = read_json(self.path / "environment.json").get("fingerprint", "")
        data = recorded if is_fingerprint(recorded, train, val) else join_fingerprints(train, val)
        return get_identity(self.config) | {"data": data}

    def _resume(
        self,
        state: TrainingState,
        schedule: Callable[[int], float],
        train: Any,
        run_identity: dict[str, Any],
        export: Callable[..., None],
    ) -> None:
        """Load the checkpoint to resume from, if there is one, and count on from its step."""
        records = self._records
        records.begin(self._stream, self.total_steps)
        watchdog.note("choosing and loading a checkpoint")
        self._ending.last = self._saving.resume(
            state,
            schedule,
            total_steps=self.total_steps,
            class_names=train.classes,
            identity=run_identity,
            recipe=recipe_source.read_source(self.config),
            export=export,
        )
        records.share()
        self.step = records.progress.step
        self.best_step = records.progress.improved_step
        if self.step > self.total_steps:
            raise Refused(
                f"{self.path}: has made {self.step:,} steps, more than the {self.total_steps:,} of "
                "--max_steps or --epochs; take as many or more, or another --name"
            )

    def _open_records(self, sizes: dict[str, Any], splits: dict[str, Any]) -> None:
        """Open the files of the run folder, unless no step is left to make.

        `sizes` are added to environment.json.
        """
        facts = describe_environment(
            launch.get_precision(self.accelerator, self.config.dtype), self.device, self.config
        )
        facts |= sizes | {"steps": self.total_steps}
        with self._records.writing("writing the run folder"):
            if self._folder and self.step < self.last:
                self._records.open(facts, splits)
        if devices.has_streams():
            torch.accelerator.reset_peak_memory_stats()  # rows have the peak of training

    def _draw_first_batch(self, model: torch.nn.Module) -> None:
        """Draw samples of the first global batch as `model` gets them, in a run's first start."""
        if not self.step and not self.config.dry_run:
            parts = self._training.iterate_first_batch(self.plan, FIRST_SHOWN)
            normalization = getattr(model, "pretrained_cfg", None) or {}
            self.draw(
                "first_batch", plots.first_batch, parts, self.plan.global_batch_size, normalization
            )

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
            self._lap = Lap(self.device)
            watchdog.note("training", step + 1)
            yield step
            if self._ending.is_stopping or self.step >= self.last:
                break
        self._end_steps()

    def log(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Add numbers of your own to the row of this step, as in `run.log({"train/aux": losses.detach()})`.

        Call it on every rank, once per step or once per micro-batch, before `end_step`. What is
        logged is the mean over all values that all ranks gave in this step: with one value per
        sample, [n], the mean over the global batch, the same on every layout. A number or a tensor
        [] counts as one value. Nothing waits for the device. Calls before the first step, where the
        forward pass is tried, do nothing. Raises `Refused` for a name that rows have already; a
        value that is not finite, or a name that some ranks left out, stops the run within two
        steps.
        """
        check_names(values)
        if self._started:
            self._step_reports.add(values)

    def micro_batches(self) -> Iterator[DeviceBatch]:
        """This rank's share of the step's global batch, in micro-batches on the device.

        Call `backward` once for each.
        """
        batches = self._training.load_micro_batches(self.step)
        while True:
            with self._ending.leavable():
                batch = next(batches, None)
            if batch is None:
                return
            self._observer.on_micro_batch(self.step + 1, batch)
            yield batch

    def backward(self, losses: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's losses, one per sample, [B].

        After the last micro-batch it is the gradient of the mean loss over the global batch,
        whatever the layout.
        """
        self._lap.ready()
        self._training.backward(losses)

    def clip_gradients(self, limit: float, mode: str = "norm") -> torch.Tensor:
        """Clip in place if `limit` > 0; returns the global L2 norm before that, a scalar on the device.

        mode `norm` scales all gradients together (Pascanu et al., 2013), `agc` each unit by the
        norm of its weights (Brock et al., 2021).
        """
        self._is_whole = False
        norm = self._training.clip_gradients(limit, mode)
        if self._is_logged(self.step + 1):
            self._update_size.start()
        return norm

    def end_step(self, grad_norm: torch.Tensor) -> None:
        """Finish the step: update running statistics and the moving average, and report the step."""
        self._evaluation = None
        self._is_drawn = False
        outcome = self._training.finish()
        self.step += 1
        step = self.step
        if self._ema:
            self._ema.update(self.model, step)
        progress = self._records.progress
        progress.step = step
        if launch.is_orphaned():
            self._ending.request("the end of its launcher")
        self._ending.stop_by_flags(progress, self.config)
        update = self._update_size.finish() if self._is_logged(step) else None
        self._step_reports.post(
            step,
            outcome,
            grad_norm,
            self._must_stop(),
            self._ending.stop_reason,
            update=update,
            lap=self._lap,
            rate=self._update_size.get_max_rate(),
        )
        reports = self._step_reports.read()
        self._seconds[step] = time.perf_counter() - self._lap.began
        self._records.log.advance(step)
        self._record_reports(reports)
        self._ending.end_if_agreed(step, progress)
        self._profile.after(step)
        self._is_whole = True
        self._observer.on_end_step(self, step)

    def stop(self, why: str) -> None:
        """End the run early, with a last evaluation and checkpoint: `run.stop("patience")`.

        Call it on one rank or on all.

        Called after an evaluation, it ends the run there; else within three steps. The reason is
        recorded: the same command does not train further, but a larger --epochs or --max_steps
        does.
        """
        self._ending.stop(why)

    def should_evaluate(self) -> bool:
        """True if an evaluation is due: by the cadence, at the end, or for one that a signal ended."""
        if self._records.progress.owes_evaluation:
            return True
        return self._is_due(self.config.eval_every, self.step)

    def evaluate(
        self,
        evaluate: Callable[[torch.nn.Module, EvalBatches, Any], Any],
        best_metric: str,
        larger_is_better: bool | None = None,
    ) -> Any:
        """Evaluate the model, and its moving average if there is one.

        Returns what the last call of `evaluate` returned: for the moving average, if there is one.
        `evaluate(model, batches, data)` gets this rank's share of the images and their source. It
        returns a dict of results over all ranks, or an object with `results()`, which makes that
        dict, and `draw(pictures)`, which is called when there is time. Results are logged as
        `eval/...` and `eval/ema_...`. The model with the best `results[best_metric]` so far, of the
        average if there is one, goes to `best/` with the next checkpoint. For names that are not
        known, as loss and accuracy are, `larger_is_better` is needed, else `Refused` is raised.
        """
        self._is_whole = False
        self._settle()  # evaluations and checkpoints build on finite steps
        if self.config.best_metric not in ("", best_metric):
            raise Refused(
                f"--best_metric {self.config.best_metric}: this recipe decides by {best_metric}; "
                "leave out the flag"
            )
        larger = direction_of(best_metric) if larger_is_better is None else larger_is_better
        if larger is None:
            raise Refused(
                f"run.evaluate: whether a larger {best_metric} is better is not known; add "
                "larger_is_better=True, or False"
            )
        evaluation, results = self._evaluate(self.model, evaluate)
        if best_metric not in results:
            raise Refused(
                f"run.evaluate: best_metric={best_metric!r} is no result; there are "
                f"{', '.join(results)}"
            )
        if self._ema:
            evaluation, ema_results = self._evaluate(self._ema.module, evaluate)
            # The exported weights' first.
            results = {f"ema_{key}": value for key, value in ema_results.items()} | results
            best_metric = f"ema_{best_metric}"
        self._records.progress.owes_evaluation = False
        if self._records.record_evaluation(self.step, results, best_metric, larger):
            watchdog.note("writing best/")
            self._saving.keep_best(results | self._get_details(evaluation), evaluation)
        self._is_whole = True
        self.best_step = self._records.progress.improved_step
        self._ending.stop_by_flags(self._records.progress, self.config)
        self._evaluation = evaluation
        if broadcast_object(self._records.has_time_to_draw()):
            self._draw_evaluation()
        return evaluation

    # As it will be used; its sizes would need graphs of their own.
    @torch.compiler.set_stance("force_eager")
    def _evaluate(self, model: torch.nn.Module, evaluate: Callable[..., Any]) -> tuple[Any, dict]:
        """What `evaluate` returns of `model`, and its results."""
        model.eval()
        with (
            self._ending.leavable(is_evaluating=True),
            sharding.join_uneven_batches(model, self._loader) as loader,
        ):
            batches = EvalBatches(loader, self._val_set.normalize, self.accelerator)
            evaluation = evaluate(model, batches, self._val_set.source)
            results = results_of(evaluation)
            lines = batches.describe_broken() + list_notes(evaluation)
        self._records.log_once(lines)
        model.train()
        return evaluation, results

    def _get_details(self, evaluation: Any) -> dict[str, Any]:
        """Details of `evaluation` for results.json of the exported model; {} but on the main process."""
        is_small = len(self._val_set.source.classes) <= MOST_DETAILED
        if not is_main() or not is_small or not hasattr(evaluation, "details"):
            return {}
        prefix = "ema_" if self._ema else ""
        return {f"{prefix}{key}": value for key, value in evaluation.details().items()}

    def evaluate_only(
        self,
        model: torch.nn.Module,
        val_set: Any,
        evaluate: Callable[[torch.nn.Module, EvalBatches, Any], Any],
    ) -> None:
        """Evaluate the weights of --eval_only, print the results and write a report.

        A checkpoint's moving average is evaluated if it has one. `model` is built for the weights,
        and `evaluate` is as for `Run.evaluate`.
        """
        weights = self.weights
        if weights is None:
            raise Refused(
                "run.evaluate_only: needs --eval_only, which names the weights to evaluate"
            )
        data = val_set.source
        launch.print_on_main(eval_only.describe_data(self.config, weights, data))
        eval_only.load_weights(model, weights)
        batches = eval_only.build_batches(self.config, val_set, self.accelerator)
        model.eval()
        with torch.compiler.set_stance("force_eager"):
            evaluation = evaluate(val_set.adapt(model).eval(), batches, data)
            results = results_of(evaluation)
        for line in batches.describe_broken() + list_notes(evaluation):
            launch.print_on_main(line)
        eval_only.report(self.config, weights, data, results, evaluation)

    def should_save(self) -> bool:
        """True if a checkpoint is due now: by the cadence, or because some rank was asked to stop.

        After an evaluation this is a collective, by which the ranks agree whether the run ends there.
        """
        if self._evaluation is not None:
            self._ending.agree(self.step, self._records.progress)
        if self._ending.is_stopping:
            return True
        return self._is_due(self.config.checkpoint_every, self.step)

    def save(self) -> None:
        """Make a checkpoint.

        Training continues as soon as the state is copied; a thread of the main process writes.
        """
        self._settle()
        self._records.log.flush()
        if self.step == self.last:  # before a checkpoint says that nothing is left to do
            with self._records.writing("writing predictions"):
                if self._folder and hasattr(self._evaluation, "write_predictions"):
                    self._evaluation.write_predictions(self.path)
        watchdog.note("writing a checkpoint")
        self._saving.save(self.step)

    def draw(self, name: str, function: Callable, *arguments) -> None:
        """Draw `pictures/<name>.png` by `function(*arguments, path)` on the main process.

        A failure is logged, not raised.
        """
        watchdog.note(f"drawing {name}")
        self._records.draw(name, function, *arguments)

    # --- inside

    def _settle(self) -> None:
        """Wait until every step so far is known to be finite on all ranks."""
        watchdog.note("settling")
        self._record_reports(self._step_reports.settle())

    def _record_reports(self, reports: list[StepReport]) -> None:
        for report in reports:
            is_evaluated = self._is_due(self.config.eval_every, report.step)
            self._records.record_step(report, self._seconds.pop(report.step), is_evaluated)
            self._ending.record_report(report)
            self._observer.on_report(report)

    def _must_stop(self) -> bool:
        """True if this rank was asked to stop, or can't write the run any more."""
        if self._ending.requested_by:
            return True
        if self._folder is not None and self._folder.lost:
            return True
        return self._records.log.failed or self._saving.writer.failed

    def _is_due(self, interval: int, step: int) -> bool:
        """True if something is due after `step` that happens every `interval` steps; 0: after each epoch."""
        if step == self.last:
            return True
        return step % interval == 0 if interval else self._stream.ends_epoch(step)

    def _is_logged(self, step: int) -> bool:
        """True if a row of `step` is due."""
        if step % self.config.log_every == 0:
            return True
        return self._is_due(self.config.eval_every, step)

    def _draw_evaluation(self) -> None:
        """Draw the pictures of this step's evaluation, if it has any and they are not drawn."""
        if not self._is_drawn:
            plots.draw_evaluation(self._evaluation, self, self.say)
            if hasattr(self._evaluation, "worst"):
                self._records.log.pictures(self.step, {"eval/worst": self._evaluation.worst})
        self._is_drawn = True

    def _check_folder_is_shared(self) -> None:
        """Log which machines don't see the run folder; refuse if a restart could leave only such ones."""
        is_seen = bool(self._scratch) or self.path.is_dir()
        hosts = set(gather_objects("" if is_seen else socket.gethostname())) - {""}
        if not hosts:
            return
        text = (
            f"{self.path} is not seen from {', '.join(sorted(hosts))}: to go on from its "
            "checkpoints, name an --output_dir that all see"
        )
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
            self._shutdown.leave_no_trace()
            raise Refused(text)
        self.say(f"{text}, or copy them before the next start")

    def _end_steps(self) -> None:
        self._profile.after(self.step, ends=True)
        if self.step == self.last:
            self._draw_evaluation()
        self._saving.wait()

    def _leave_early(self) -> None:
        """The recipe left its loop: save the model as it is, as after `stop`."""
        self.say(
            f"the loop was left at step {self.step} of {self.total_steps}, as by `break`: no last "
            "evaluation; "
            'run.stop("why") ends a run with one'
        )
        self._ending.end_here(self.step, "the recipe, which left its loop", self._records.progress)
        if self.step:
            self.save()
        self._end_steps()

    def _leave_alone(self) -> None:
        """Save and close this process without the others, which may hang. No communication."""
        if not self._started:
            cause = self._ending.requested_by
            self.say(f"stopped by {cause} before the first step: the same command starts again")
        self._save_alone(self._ending.is_evaluating)
        self._close(SystemExit(RESUMABLE))

    def _save_alone(self, is_evaluating: bool) -> None:
        """Make a checkpoint of the last step without the other processes, which may hang.

        `is_evaluating`: without the evaluation of that step, which the resumed run makes after the next one.
        """
        if not self._folder or not self.step or not (self._is_whole or is_evaluating):
            return
        in_parts = sharding.has_shards(self.model)
        # A run can't do without its last evaluation.
        if in_parts or (is_evaluating and self.step == self.last):
            return
        self._records.progress.owes_evaluation |= is_evaluating
        try:
            self._settle()
            self._records.log.flush()
            self._saving.save_alone()
        except Exception as error:
            self.say(f"step {self.step} could not be saved: {error}")


def results_of(evaluation: Any) -> dict:
    """Results over all ranks, from what a recipe's `evaluate` returned. A collective.

    It returned a dict, or an object whose `results()` makes that dict.
    """
    return evaluation if isinstance(evaluation, dict) else evaluation.results()


def list_notes(evaluation: Any) -> list[str]:
    """Lines about the evaluated data, if what a recipe's `evaluate` returned has `list_notes()`."""
    return evaluation.list_notes() if hasattr(evaluation, "list_notes") else []
