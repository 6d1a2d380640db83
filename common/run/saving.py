"""Checkpoints and `best/` of a run: chosen and loaded at its start, written beside training.

All ranks call it alike; only the main process, which has a `folder`, writes.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from common.checkpoints.resume import choose_checkpoint, compare_identities
from common.checkpoints.state import Tensors, TrainingState
from common.checkpoints.store import AUDIT_FOLDER, Checkpoint, Checkpoints, verify
from common.checkpoints.writer import Writer, join_gather
from common.config.fields import RunConfig, get_fields_with
from common.config.recipe_source import Source, diff_sources, get_recipe_name
from common.distributed.collectives import broadcast_object
from common.errors import Refused
from common.files import MEDIUM
from common.run.best import Best
from common.run.folder import RunFolder, read_json
from common.run.progress import Progress
from common.run.records import Records
from common.training.optimizer import Schedule

_LONG_WAIT = 1.0  # seconds; people are told of longer ones
_AUDIT_SHARE = 0.25  # of the run; later a model has memorised wrong labels (docs/after_training.md)


class Saving:
    """Checkpoints and `best/` of the run in the folder `path`."""

    def __init__(self, config: RunConfig, path: Path, folder: RunFolder | None, records: Records):
        self.config = config
        self._path = path
        self._folder = folder
        self._records = records
        self._say = records.log.say
        self._checkpoints = Checkpoints(path / "checkpoints", config.keep_checkpoints)
        self.writer = Writer()

    def resume(
        self,
        state: TrainingState,
        schedule: Callable[[int], float],
        *,
        total_steps: int,
        class_names: Sequence[str],
        identity: dict[str, Any],
        recipe: Source,
        export: Callable[..., None],
    ) -> int:
        """Load the checkpoint to resume from, if there is one.

        Returns the step after which the run then ends; without a checkpoint it is `total_steps`.

        `identity` and `recipe`, the run's own source, decide which checkpoints fit. `export(model,
        results=..., folder=...)` writes a folder of the model that is evaluated, which becomes
        `best/`.
        """
        self._state = state
        self._schedule = schedule
        self._total_steps = total_steps
        self._class_names = list(class_names)
        self._identity = identity
        self._recipe = recipe
        recorded = get_fields_with(self.config, "is_recorded")
        self._best = Best(self._path, state, export, self._say, recorded) if self._folder else None
        records = self._records
        checkpoint = choose_checkpoint(
            self.config.resume,
            self._checkpoints,
            identity,
            self._say,
            recipe,
            self.config.allow_changed_source,
        )
        if not checkpoint:
            return total_steps
        status = {"status": "", "step": 0, "cause": ""} | read_json(self._path / "status.json")
        status = broadcast_object(status)
        with records.writing(f"loading {checkpoint.path}"):
            state.check(checkpoint.read_shapes(), str(checkpoint.path))
            try:
                records.progress = Progress(**checkpoint.record["ledger"])
                if self._best:
                    self._best.repair(checkpoint, records.progress)
                state.load(checkpoint.load_tensors(), checkpoint.record["numbers"])
                return self._find_last_step(checkpoint, status)
            except (KeyError, TypeError, ValueError) as error:
                raise Refused(
                    f"{checkpoint.path} was written by another version ({type(error).__name__}: "
                    f"{error}): resume with that version, or give this run another --name"
                ) from error

    def _find_last_step(self, checkpoint: Checkpoint, status: dict) -> int:
        """The step after which the resumed run ends. Logs where it resumes.

        `status` is the content of status.json.
        """
        progress = self._records.progress
        step = progress.step
        total_steps = self._total_steps
        has_changed = bool(diff_sources(checkpoint.record["source"], self._recipe))
        is_own = checkpoint.path.parent.resolve() == (self._path / "checkpoints").resolve()
        has_finished = is_own and status["status"] == "finished" and status["step"] == step
        # Ended when its checkpoint was there.
        if has_finished and not progress.ended_by:
            progress.ended_by = str(status["cause"])
        if is_own and not has_changed and self._stays_ended(checkpoint):
            flag = progress.ended_by_flag
            larger = f"--{flag}" if flag else "--epochs or --max_steps"
            self._say(
                f"this run was ended at step {step} of {checkpoint.record['total_steps']} by "
                f"{progress.ended_by}; a larger {larger} takes it further"
            )
            return step
        progress.ended_by = ""
        if step < total_steps:
            self._log_resume(checkpoint)
        elif has_changed:
            raise Refused(
                f"{checkpoint.path} is finished, and was made by another source: give this run "
                "another --name, or a larger --epochs or --max_steps to train on with this one"
            )
        else:
            self._say(
                f"this run is finished at step {step}; a larger --epochs or --max_steps takes it "
                "further"
            )
        return total_steps

    def _stays_ended(self, checkpoint: Checkpoint) -> bool:
        """True if the run was ended early, and nothing that ended it has become larger."""
        progress = self._records.progress
        if not progress.ended_by:
            return False
        if progress.ended_by_flag:
            return bool(progress.exhausted(self.config))
        return self._total_steps <= checkpoint.record["total_steps"]

    def _log_resume(self, checkpoint: Checkpoint) -> None:
        """Log where the run resumes, and the effect of data at another place and of a new length."""
        step = self._records.progress.step
        total_steps = self._total_steps
        self._say(f"resuming from step {step} of {total_steps} ({checkpoint.path})")
        earlier_data = str(checkpoint.record["config"].get("data", ""))
        data = getattr(self.config, "data", "")
        if data != earlier_data:
            self._say(
                f"the data are the same, and lie at {data} now; the run began with {earlier_data}"
            )
        earlier_steps = checkpoint.record["total_steps"]
        if earlier_steps != total_steps:
            text = f"its length was {earlier_steps} steps, and now is {total_steps}"
            if isinstance(self._schedule, Schedule):
                earlier_rate = replace(self._schedule, total_steps=earlier_steps)(step - 1)
                text = (
                    f"its length was {earlier_steps} steps: the schedule now has {total_steps} "
                    "steps from the start, so the learning rate continues at "
                    f"{self._schedule(step):.3g} (the last was {earlier_rate:.3g})"
                )
            self._say(text)

    def keep_best(self, results: dict, evaluation: Any) -> None:
        """Export the model, which has these results. It becomes `best/` with the next checkpoint."""
        model = self._state.get_exported_model()
        with self._records.writing("writing best/"):
            if self._best:
                self._best.export(model, results, self._make_record(), evaluation)

    def save(self, step: int) -> None:
        """Copy the state, and let the writer make a checkpoint of it.

        Waits for the checkpoint before, if that is still being written.

        What can't be written stops the run within a few steps, on all ranks.
        """
        records = self._records
        with records.writing("writing a checkpoint"):
            if self._best:
                records.log.check()
                waited = self.writer.wait()
                if waited > _LONG_WAIT:
                    self._say(
                        f"step {step}: waited {waited:.0f} s for the checkpoint before to be "
                        "written; a larger --checkpoint_every leaves it the time"
                    )
                self._best.stage()
        # Here, no rank fails alone while the others gather their shards.
        with records.writing("writing a checkpoint"):
            if self._folder and self._best:
                self._start_writing(self._folder, self._best)
                if self.config.dry_run:
                    self.writer.wait()
                    self._state.load(
                        verify(self._checkpoints.list_paths()[0]).load_tensors(),
                        self._state.get_values(),
                    )
            else:
                join_gather(self._state.get_tensors())

    def save_alone(self) -> None:
        """Make a checkpoint on the main process, without the others, and wait until it is written."""
        if self._folder and self._best:
            self.writer.wait()
            self._best.stage()
            self._start_writing(self._folder, self._best)
            self.writer.wait()

    def _start_writing(self, folder: RunFolder, best: Best) -> None:
        commit = partial(self._commit, folder, best, self._make_record(), self._records.summary())
        self.writer.start(self._state.get_tensors(), commit)

    def _make_record(self) -> dict:
        """What a checkpoint holds beside tensors."""
        progress = self._records.progress
        return {
            "name": self._path.name,
            "recipe": get_recipe_name(self.config),
            "step": progress.step,
            "classes": self._class_names,
            "total_steps": self._total_steps,
            "identity": self._identity,
            "source": self._recipe,
            "numbers": self._state.get_values(),
            "ledger": asdict(progress),
            "config": asdict(self.config),
            "environment": self._records.facts,
        }

    def wait(self) -> None:
        """Wait for the checkpoint that is being written."""
        with self._records.writing("writing a checkpoint"):
            self.writer.wait()

    def _commit(
        self, folder: RunFolder, best: Best, record: dict, summary: dict, files: dict[str, Tensors]
    ) -> None:
        """Make the checkpoint, then best/, summary and status, which name it; in the writer's thread."""
        folder.sync()
        record = record | {"best": best.seal()}
        folder.check()
        checkpoint = self._checkpoints.save(record, files)
        if self.config.keep_for_audit and record["step"] >= _AUDIT_SHARE * record["total_steps"]:
            audit = Checkpoints(self._path / AUDIT_FOLDER)
            if not audit.list_paths():
                audit.link(checkpoint)
        best.publish()
        self._records.log.summary(summary)
        # No rank has written why it failed.
        if read_json(self._path / "status.json").get("status") == "running":
            folder.status("running", record["step"])


def find_run(output_dir: Path, stem: str, expected: dict) -> str:
    """The newest run in `output_dir` of the identity `expected` whose name begins with `stem`, or ""."""
    runs = sorted(output_dir.glob(f"{stem}-*/environment.json"), key=os.path.getmtime, reverse=True)
    for environment in runs:
        if read_json(environment).get("fingerprint") == expected["data"]:
            run = environment.parent
            for checkpoint in Checkpoints(run / "checkpoints").list_paths()[:1]:
                record = read_json(checkpoint / "record.json", MEDIUM)
                if not compare_identities(record.get("identity") or {}, expected):
                    return run.name
    return ""
