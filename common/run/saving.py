"""Checkpoints and `best/` of a run: chosen and loaded at its start, written beside training.

All ranks call it alike; only the main process, which has a `folder`, writes.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common.checkpoints.resume import choose_together, compare_identities
from common.checkpoints.state import Tensors, TrainingState
from common.checkpoints.store import AUDIT_FOLDER, Checkpoints, verify
from common.checkpoints.writer import Writer, take_part
from common.config.fields import RunConfig, fields_with
from common.config.recipe_source import Source
from common.distributed.collectives import broadcast_object
from common.errors import Refused
from common.files import MEDIUM
from common.run.best import Best
from common.run.folder import RunFolder, read_json
from common.run.progress import Progress
from common.run.records import Records

_LONG_WAIT = 1.0  # seconds; people are told of longer ones
_AUDIT_SHARE = 0.25  # of the run; later a detector has memorised wrong boxes (docs/after_training.md)


class Saving:
    """Checkpoints and `best/` of the run in the folder `path`."""

    def __init__(self, config: RunConfig, path: Path, folder: RunFolder | None, records: Records):
        self.config, self._path, self._folder, self._records = config, path, folder, records
        self._say = records.log.say
        self._checkpoints = Checkpoints(path / "checkpoints", config.keep_checkpoints)
        self.writer = Writer()

    def resume(self, state: TrainingState, export: Callable[..., None], identity: dict, recipe: Source) -> int | None:
        """Load the checkpoint to resume from, if there is one; returns the step after which the run then ends, else None.

        `export(model, results=..., folder=...)` writes a folder of the model that is evaluated, which becomes `best/`.
        """
        self._state, records = state, self._records
        recorded = fields_with(self.config, "is_recorded")
        self._best = Best(self._path, state, export, self._say, recorded) if self._folder else None
        options = recipe, self.config.allow_changed_source
        found = choose_together(self.config.resume, self._checkpoints, identity, self._say, *options)
        if not found:
            return None
        nothing = {"status": "", "step": 0, "cause": ""}
        said = broadcast_object(nothing | read_json(self._path / "status.json") if self._folder else None)
        with records.writing(f"loading {found.path}"):
            state.check(found.shapes(), str(found.path))
            try:
                records.progress = Progress(**found.record["ledger"])
                if self._best:
                    self._best.mend(found, records.progress)
                state.load(found.tensors(), found.record["numbers"])
                return records.resume(found, said)
            except (KeyError, TypeError, ValueError) as error:
                raise Refused(
                    f"{found.path} is not as this version of the code writes it ({type(error).__name__}: {error}): "
                    "go on with the version that wrote it, or give this run another --name"
                ) from error

    def keep_best(self, results: dict) -> None:
        """Export the model, which has these results; with the next checkpoint it takes the place of `best/`."""
        model = self._state.exported()
        with self._records.writing("writing best/"):
            if self._best:
                self._best.export(model, results, self._records.checkpoint())

    def save(self, step: int) -> None:
        """Copy the state, and let the writer make a checkpoint of it; waits for the checkpoint before if that is still written.

        What can't be written stops the run within a few steps, on all ranks.
        """
        records = self._records
        with records.writing("writing a checkpoint"):
            if self._best:
                records.log.check()
                if (waited := self.writer.wait()) > _LONG_WAIT:
                    self._say(
                        f"step {step}: waited {waited:.0f} s for the checkpoint before to be written; "
                        "a larger --checkpoint_every leaves it the time"
                    )
                self._best.take()
        with records.writing("writing a checkpoint"):  # here, no rank fails alone while the others gather their shards
            if self._folder and self._best:
                self._start_writing(self._folder, self._best)
                if self.config.dry_run:
                    self.writer.wait()
                    self._state.load(verify(self._checkpoints.paths()[0]).tensors(), self._state.numbers())
            else:
                take_part(self._state.tensors())

    def save_alone(self) -> None:
        """Make a checkpoint on the main process, without the others, and wait until it is written."""
        if self._folder and self._best:
            self.writer.wait()
            self._best.take()
            self._start_writing(self._folder, self._best)
            self.writer.wait()

    def _start_writing(self, folder: RunFolder, best: Best) -> None:
        records = self._records
        contents = records.checkpoint(), records.summary()
        self.writer.start(self._state.tensors(), partial(self._commit, folder, best, *contents))

    def wait(self) -> None:
        """Wait for the checkpoint that is being written."""
        with self._records.writing("writing a checkpoint"):
            self.writer.wait()

    def _commit(self, folder: RunFolder, best: Best, record: dict, summary: dict, files: dict[str, Tensors]) -> None:
        """Make the checkpoint, then best/, summary and status, which name it; in the writer's thread."""
        folder.sync()
        record = record | {"best": best.seal()}
        folder.check()
        checkpoint = self._checkpoints.save(record, files)
        if self.config.keep_for_audit and record["step"] >= _AUDIT_SHARE * record["total_steps"]:
            audit = Checkpoints(self._path / AUDIT_FOLDER)
            if not audit.paths():
                audit.link(checkpoint)
        best.place()
        self._records.log.summary(summary)
        if read_json(self._path / "status.json").get("status") == "running":  # no rank has written why it failed
            folder.status("running", record["step"])


def find_run(output_dir: Path, stem: str, expected: dict) -> str:
    """The name of the newest run in `output_dir` with the identity `expected`; it begins with `stem`. "" if there is none."""
    runs = sorted(output_dir.glob(f"{stem}-*/environment.json"), key=os.path.getmtime, reverse=True)
    for environment in runs:
        if read_json(environment).get("fingerprint") == expected["data"]:
            run = environment.parent
            for checkpoint in Checkpoints(run / "checkpoints").paths()[:1]:
                record = read_json(checkpoint / "record.json", MEDIUM)
                if not compare_identities(record.get("identity") or {}, expected):
                    return run.name
    return ""
